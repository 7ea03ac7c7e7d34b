"""benchmarks/: the race's bookkeeping with engines that are scripts, and the random model's file."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
ENGINE = """
import json, sys
for line in sys.stdin:
    job = json.loads(line)
    ids = [int(sys.argv[1])] * job["new"]
    print(json.dumps({"ids": ids, "prefill_s": 0.5, "decode_s": (job["new"] - 1) / float(sys.argv[1])}), flush=True)
"""


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_engines_race_on_the_same_prompts():
    race = script("race")
    entrants = [race.Entrant(str(n), (sys.executable, "-c", ENGINE, str(n))) for n in (10, 25)]
    answers = race.race(entrants, [[1, 2], [3] * 8], new=6, rounds=2)
    assert [answer.decode for answer in answers["25"]] == pytest.approx([25] * 4)
    assert [answer.prefill for answer in answers["10"]] == [4, 4 * 4] * 2
    assert "| 25 | 25.0 | 2.50 (2.50 to 2.50) | 10.0 | 1.00 (1.00 to 1.00) |" in race.table(answers)


def test_an_engine_that_dies_is_named():
    race = script("race")
    with pytest.raises(SystemExit, match=r"dead ended \(exit 3\)"):
        race.race([race.Entrant("dead", (sys.executable, "-c", "import sys; input(); sys.exit(3)"))], [[1]], 4, 1)


def test_peers_that_are_not_there_are_left_out(tmp_path, capsys):
    race = script("race")
    options = race.argparse.Namespace(
        peer=["llamacpp"], peers=tmp_path, lookup=None, bundle=["some/pair"], num_assistant_tokens=[4]
    )
    found = race.entrants(options, 2)
    assert [entrant.name for entrant in found] == ["pair, plain", "pair, 4 drafted"]
    assert found[1].command[-3:] == ("some/pair", "2", "4")
    assert "llamacpp is left out" in capsys.readouterr().err


def test_llama_cpp_is_built_for_what_may_be_used():
    found = script("race_setup").cmake_arguments({"avx2", "fma", "f16c", "amx_int8"})
    assert "-DGGML_NATIVE=OFF" in found and "-DGGML_AVX2=ON" in found and "-DGGML_AVX512=OFF" in found
    assert "AMX" not in found


def test_a_random_model_is_a_valid_checkpoint(tmp_path):
    from specexport.exporter.checkpoint import read_checkpoint

    random_model = script("random_model")
    shape = dict(random_model.SHAPE, hidden_size=64, num_hidden_layers=2, intermediate_size=96, vocab_size=100)
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    parameters = random_model.write_model(tmp_path, shape)
    layer = 64 * 64 * 2 + 32 * 64 * 2 + 96 * 64 * 3 + 2 * 64
    assert parameters == 100 * 64 + 2 * layer + 64
    found = read_checkpoint(tmp_path)
    assert len(found.tensors) == 2 + 2 * 9
    tensor = found.tensors["model.layers.1.mlp.down_proj.weight"]
    assert tensor.shape == (64, 96) and tensor.dtype == "BF16"
    raw = np.frombuffer((tmp_path / "model.safetensors").read_bytes()[tensor.offset :][: tensor.nbytes], "<u2")
    values = (raw.astype(np.uint32) << 16).view(np.float32)
    assert abs(values.std() - 0.02) < 0.001 and abs(values.mean()) < 0.001
    assert json.loads((tmp_path / "config.json").read_text())["head_dim"] == 32
    assert np.unique(values).size > 1000


def test_the_shape_is_llama_s():
    import math

    random_model = script("random_model")
    assert sum(math.prod(shape) for _, shape in random_model.tensors(random_model.SHAPE)) == 1_235_814_400
