"""Activation precision by matrix: what is asked for, what int8 is measured to cost, and what is chosen."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import onnx
import pytest
import tiny_models

from specexport.exporter.activations import DEFAULT_TARGET_KL, ActivationPrecision, parse_activations
from specexport.exporter.compare_statistics import row_statistics
from specexport.exporter.sensitivity import SoftTargets, affordable, grouped, spend
from specexport.exporter.trial_engine import Linear
from specexport.plugins.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", ActivationPrecision(8)),
        ("int16", ActivationPrecision(16)),
        ("fp32", ActivationPrecision(32)),
        ("auto", ActivationPrecision(None, DEFAULT_TARGET_KL)),
        ("auto:1e-4", ActivationPrecision(None, 1e-4)),
    ],
)
def test_what_can_be_asked_for(text: str, expected: ActivationPrecision) -> None:
    assert parse_activations(text) == expected


@pytest.mark.parametrize(
    "text", ["int4", "", "auto:", "auto:x", "auto:0", "auto:-1", "auto:nan", "int8:0.1", "auto:inf"]
)
def test_what_cannot_be_asked_for_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="it can be int8, int16, fp32, auto or auto:KL"):
        parse_activations(text)


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_kl_is_that_of_the_comparison_and_holds_for_tiny_differences(size: float) -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((7, 5000)) * 8).astype(np.float32)
    other = (logits + size * rng.standard_normal(logits.shape)).astype(np.float32)
    logits[:, 3] = other[:, 3] = -np.inf
    exact = row_statistics(logits, other, np.full(7, -1)).kl.mean()
    truth = SoftTargets(logits)
    assert truth.mean_kl(other) == pytest.approx(exact, rel=5e-3)
    assert truth.mean_kl(logits) == 0
    other[2, 5] = np.nan
    assert np.isnan(truth.mean_kl(other))


def linear(name: str, index: int = 0, weights: int = 100) -> Linear:
    return Linear(index, (name,), weights)


def test_the_least_cost_a_weight_goes_first() -> None:
    cheap, large, dear, broken = (
        (linear(name, weights=weights),) for name, weights in (("a", 100), ("b", 1000), ("c", 100), ("d", 100))
    )
    costs = {dear: 3.0, cheap: 1.0, large: 4.0, broken: float("nan")}
    assert affordable(costs, 5.0) == [large, cheap]
    assert affordable(costs, 8.0) == [large, cheap, dear]
    # What does not fit is passed over, not waited for.
    assert affordable(costs, 3.0) == [cheap]
    assert affordable(costs, 0.5) == []


@pytest.mark.parametrize(("off", "kept"), [(1.0, 10), (1.5, 6), (0.5, 19), (0.0, 40), (100.0, 0)])
def test_a_choice_keeps_the_target_as_it_is_measured(off: float, kept: int) -> None:
    """Each of 40 matrices costs 1 alone; together they cost ``off`` times the sum. The target is 10."""
    costs = {(linear(f"{i}", i),): 1.0 for i in range(40)}
    chosen, reached = spend(costs, lambda int8: off * len(int8), 10.0)
    assert (len(chosen), reached) == (kept, off * kept)


def test_a_choice_whose_logits_are_nan_is_not_taken() -> None:
    costs = {(linear(f"{i}", i),): 1.0 for i in range(40)}
    chosen, reached = spend(costs, lambda int8: float(len(int8)) if len(int8) < 8 else float("nan"), 10.0)
    assert (len(chosen), reached) == (5, 5.0)


def test_neighbouring_layers_of_one_kind_are_measured_together() -> None:
    linears = [
        linear(f"layers.{i}.{kind}.weight", 2 * i + j) for i in range(5) for j, kind in enumerate(("up", "down"))
    ]
    linears.append(linear("lm_head.weight", 10))
    assert grouped(linears, 11) == sorted(
        ((x,) for x in linears), key=lambda g: ("down" in g[0].matrices[0]) + (g[0].index == 10) * 2
    )
    coarse = grouped(linears, 4)
    assert [[x.index for x in group] for group in coarse] == [[0, 2, 4], [6, 8], [1, 3, 5], [7, 9], [10]]
    assert sorted(x.index for group in coarse for x in group) == list(range(11))


@pytest.fixture(scope="module")
def outlier_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    """A tiny model of which one down projection's input has a channel that is a thousand times larger than its group.

    The channel's weights in the projection are 0: it changes nothing but the scale of int8 activations.
    """
    import safetensors.torch

    from specexport.exporter.config import BuildConfig
    from specexport.exporter.pipeline import build

    directory = tiny_models.save("llama", tmp_path_factory.mktemp("model"))
    path = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    for channel in range(0, 128, 32):
        tensors["model.layers.1.mlp.up_proj.weight"][channel] *= 1000
        tensors["model.layers.1.mlp.gate_proj.weight"][channel] *= 10
        tensors[name][:, channel] = 0
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    output = tmp_path_factory.mktemp("bundle") / "pair"
    config = BuildConfig(
        model=str(directory), output=output, activations="auto:0.01", draft="layers:1", compare_tokens=256
    )
    assert build(config).passed
    return output, name


def activation_bits(path: pathlib.Path) -> dict[str, int]:
    """Bits by the name of the linear's weight."""
    found = {}
    for node in onnx.load(path, load_external_data=False).graph.node:
        if node.op_type == "QuantizedLinear":
            bits = next(a.i for a in node.attribute if a.name == "activation_bits")
            found[node.input[1].removesuffix(".packed").removesuffix(".gated").removesuffix(".packed")] = bits
    return found


def test_the_matrix_behind_an_outlier_keeps_two_planes(outlier_bundle: tuple[pathlib.Path, str]) -> None:
    bundle, name = outlier_bundle
    for file in ("portable/target.onnx", "engines/cpu/target.onnx"):
        bits = activation_bits(bundle / file)
        assert len(bits) == 9
        assert [weight for weight, b in bits.items() if b == 16] == [f"{name}.int8g32.weight"], file
        assert set(bits.values()) == {8, 16}
    # A draft of the target's layers has the target's precision: here of the first layer, without the outlier.
    assert set(activation_bits(bundle / "engines/cpu/draft.onnx").values()) == {8}


def test_the_choice_is_in_the_manifest_and_no_trial_is_left(outlier_bundle: tuple[pathlib.Path, str]) -> None:
    bundle, name = outlier_bundle
    manifest: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())
    choice = manifest["measured"]["activations"]
    assert choice["int16"] == [name]
    assert (choice["linears"], choice["int8_linears"], choice["target_kl"]) == (9, 8, 0.01)
    assert choice["kl"] <= 0.01 < choice["kl_int8_everywhere"]
    assert len(choice["costs"]) == 9
    assert max(choice["costs"], key=lambda cost: cost["kl"])["int8"] == [name]
    assert "int8 in 8 of 9 linears, int16 in the others" in choice["summary"]
    # The cache is exact with finer activations, and the whole is as near to eager as the choice says.
    assert {layer["key_bits"] for layer in manifest["target"]["cache"]["layers"]} == {16}
    assert not [path for path in bundle.rglob("*trial*")]
    packed = (bundle / "engines/cpu/weights.bin").stat().st_size
    assert packed < manifest["target"]["weights"]["bytes"] + 64 * 4096  # written once, not for the trial again
