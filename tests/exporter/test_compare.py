"""Paths, generations, text and the whole comparison, with engines that are right and wrong in known ways."""

from __future__ import annotations

import json
import math
import types
from typing import Any

import numpy as np
import pytest
from compare_fakes import VOCAB, FakeEngine, FakePair, FakeReference

from specexport.exporter.compare import CompareOptions, compare_engine, compare_pair
from specexport.exporter.compare_generation import matched_prefix
from specexport.exporter.compare_paths import Segment, choose_segments
from specexport.exporter.compare_reference import ReferenceModelError
from specexport.exporter.compare_result import path_verdict
from specexport.exporter.compare_text import CompareText
from specexport.exporter.gates import parse_gate
from specexport.plugins.errors import InputError


def windows(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length) for length in lengths]


def compare(engine: FakeEngine, lengths: tuple[int, ...] = (40, 40), **options: Any) -> Any:
    chosen = CompareOptions(**{"prefill_chunk": 16, "num_assistant_tokens": 3, "path_tokens": 20, **options})
    return compare_engine(engine, FakeReference(), windows(*lengths), options=chosen)


def test_an_exact_engine_is_exact_and_identical_through_all_paths() -> None:
    engine = FakeEngine()
    found = compare(engine)
    assert found.figures.kl_mean == 0.0 and found.figures.kl_max == 0.0
    assert found.figures.top1_agreement == 1.0
    assert found.figures.perplexity == found.figures.perplexity_reference
    assert found.figures.perplexity_delta == 0.0
    assert [found.paths[name].tokens for name in ("prefill", "token_by_token", "verify")] == [80, 20, 20]
    assert all(path.identical and path.max_difference == 0.0 for path in found.paths.values())
    assert path_verdict(found, 0.05) == "identical"
    # Prefill came in chunks, verify in blocks of k+1 with the last one cut, the other path in single rows.
    assert {16, 8, 4, 2, 1} <= set(engine.calls)


def test_noise_shows_in_every_path_alike() -> None:
    found = compare(FakeEngine(noise=0.05), full=True)
    assert 1e-4 < found.figures.kl_mean < 1e-2
    for path in found.paths.values():
        assert path.tokens == 80
        assert path.identical
        assert path.kl_mean == pytest.approx(found.figures.kl_mean)


def test_a_single_row_that_differs_is_caught() -> None:
    found = compare(FakeEngine(fault="single"))
    assert found.paths["verify"].identical
    path = found.paths["token_by_token"]
    assert not path.identical
    assert path.first_difference == (0, 0)
    assert path.max_difference == pytest.approx(31e-3, rel=1e-2)
    assert found.path_max_difference == path.max_difference
    assert path_verdict(found, 0.05) == f"differ within rounding: up to {path.max_difference:.3g}"
    assert path_verdict(found, 0.01).startswith("fault")


def test_a_rewind_that_leaves_rows_behind_is_caught() -> None:
    found = compare(FakeEngine(fault="rewind", context_length=1000))
    assert found.paths["token_by_token"].identical
    assert not found.paths["verify"].identical
    assert found.paths["verify"].first_difference == (0, 4), "the first block precedes any rewind"
    assert found.paths["verify"].max_difference > 1
    assert found.paths["verify"].kl_mean > 0.1


def test_a_nan_is_no_equality() -> None:
    found = compare(FakeEngine(fault="nan"))
    assert math.isnan(found.figures.kl_mean)
    assert found.figures.nonfinite_rows > 0
    assert math.isnan(found.path_max_difference)
    assert path_verdict(found, 0.05).startswith("fault")
    data = found.to_json()
    assert data["kl_mean"] is None and data["path_max_difference"] is None
    json.dumps(data, allow_nan=False)


def test_a_window_as_long_as_the_context_leaves_no_room_for_a_wrong_block() -> None:
    found = compare(FakeEngine(context_length=40), lengths=(40,), full=True)
    assert found.paths["verify"].identical


def test_bad_windows_and_vocabularies_are_named() -> None:
    with pytest.raises(InputError, match="41 tokens does not fit the engine's 40 positions"):
        compare(FakeEngine(context_length=40), lengths=(41,))
    with pytest.raises(InputError, match="no window"):
        compare(FakeEngine(), lengths=())
    engine = FakeEngine()
    engine.vocab_size = 33
    with pytest.raises(ReferenceModelError, match="logits for 32 ids, the engine for 33"):
        compare(engine)


@pytest.mark.parametrize(
    ("lengths", "tokens", "expected"),
    [
        ([10, 10], None, [(0, 0, 10), (1, 0, 10)]),
        ([10, 10], 20, [(0, 0, 10), (1, 0, 10)]),
        ([10, 10], 6, [(0, 0, 3), (1, 7, 10)]),
        ([10, 4], 6, [(0, 0, 3), (0, 7, 10)]),
        ([10], 10, [(0, 0, 10)]),
        ([10], 9, [(0, 0, 4), (0, 6, 10)]),
        ([], 5, []),
    ],
)
def test_segments_cover_the_start_and_the_deep_end(
    lengths: list[int], tokens: int | None, expected: list[tuple[int, int, int]]
) -> None:
    assert choose_segments(lengths, tokens) == [Segment(*numbers) for numbers in expected]


def test_matched_prefix_counts_ids() -> None:
    assert matched_prefix([1, 2, 3], [1, 1, 2, 3]) == 1
    assert matched_prefix([], [1]) == 0
    assert matched_prefix([1, 2], [1, 2]) == 2


def pair_comparison(pair: FakePair, **options: Any) -> Any:
    text = CompareText("a test", tuple(windows(32)), tuple(windows(5, 7)))
    return compare_pair(pair, FakeReference(), text, CompareOptions(max_new_tokens=12, **options))


def test_an_exact_pair_passes() -> None:
    found = pair_comparison(FakePair(FakeEngine()))
    assert found.options.num_assistant_tokens == 3
    assert found.passed and not found.faults
    generation = found.generation
    assert (generation.matched_mean, generation.matched_share, generation.identical) == (12, 1.0, 2)
    assert generation.speculative_equals_plain is True
    assert generation.prompts[0].plain_ids == generation.prompts[0].reference_ids
    assert found.draft is None


@pytest.mark.parametrize(("tie_margin", "verdict"), [(0.0, "fault"), (1e9, "tie")])
def test_a_generation_that_parts_is_a_tie_or_a_fault_by_the_references_margin(tie_margin: float, verdict: str) -> None:
    found = pair_comparison(FakePair(FakeEngine(noise=1.5)), tie_margin=tie_margin)
    prompt = next(prompt for prompt in found.generation.prompts if prompt.difference is not None)
    parted = prompt.difference
    assert parted.verdict == verdict
    assert prompt.matched == parted.position < 12
    assert prompt.plain_ids[: parted.position] == prompt.reference_ids[: parted.position]
    assert parted.ids == (prompt.reference_ids[parted.position], prompt.plain_ids[parted.position])
    assert len(prompt.reference_ids) == 12
    # The reference goes on alone, as if it had been asked first.
    start = found.generation.prompts.index(prompt)
    alone = FakeReference().greedy(windows(5, 7)[start], 12, ())
    assert list(prompt.reference_ids) == alone
    row = np.sort(FakeReference().logits(np.append(windows(5, 7)[start], alone[: parted.position]))[-1])
    assert parted.margin == pytest.approx(float(row[-1]) - float(row[-2]))


def test_speculation_that_leaves_plain_ids_is_a_fault_even_at_a_tie() -> None:
    found = pair_comparison(FakePair(FakeEngine(), swap=4), tie_margin=1e9)
    assert found.generation.speculative_equals_plain is False
    assert found.generation.speculative_mismatches == 2
    assert found.generation.prompts[0].speculative_difference.position == 4
    assert not found.passed
    assert found.faults[0].startswith("prompt 1: speculative ids leave the plain ones at token 4, where the margin is")


def test_the_json_has_its_keys_and_gates_decide() -> None:
    found = pair_comparison(FakePair(FakeEngine(noise=0.3))).with_gates(
        [parse_gate("kl_mean>1e-9"), parse_gate("top1_agreement<1%")]
    )
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert {"tokens", "windows", "text", "target", "draft", "generation", "gates", "verdicts"} <= data.keys()
    required = ("kl_mean", "kl_p99", "kl_max", "top1_agreement", "perplexity", "perplexity_reference")
    assert all(isinstance(data["target"][name], float) for name in required)
    assert 0 <= data["target"]["top1_agreement"] <= 1
    assert data["draft"] is None
    assert data["target"]["paths"].keys() == {"prefill", "token_by_token", "verify"}
    assert [gate["passed"] for gate in data["gates"]] == [False, True]
    assert data["verdicts"]["passed"] is False
    assert data["verdicts"]["failed_gates"][0].startswith("target.kl_mean is ")
    short = json.loads(json.dumps(found.short(), allow_nan=False))
    assert set(required) <= short["target"].keys()
    assert len(json.dumps(short)) < 4000


def test_a_layers_draft_is_compared_with_the_reference_cut_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = FakePair(FakeEngine(), draft=types.SimpleNamespace(engine=FakeEngine(noise=0.2)))
    pair.manifest.draft = types.SimpleNamespace(kind="layers", engine=object(), num_assistant_tokens=2, layers=6)
    asked = []
    monkeypatch.setattr(
        "specexport.exporter.compare.cut_reference", lambda model, layers: asked.append(layers) or model
    )
    found = pair_comparison(pair)
    assert asked == [6]
    assert found.draft.figures.kl_mean > found.target.figures.kl_mean == 0.0
    assert found.draft.figures.tokens == 32


def test_a_model_draft_needs_its_reference() -> None:
    pair = FakePair(FakeEngine(), draft=types.SimpleNamespace(engine=FakeEngine()))
    engine = types.SimpleNamespace(model=types.SimpleNamespace(source="small"))
    pair.manifest.draft = types.SimpleNamespace(kind="model", engine=engine, num_assistant_tokens=2, layers=None)
    with pytest.raises(InputError, match=r"another model \(small\)"):
        pair_comparison(pair)


def test_ids_and_texts_are_cut_into_windows() -> None:
    pair = FakePair(FakeEngine())
    options = CompareOptions(max_new_tokens=0)
    assert compare_pair(pair, FakeReference(), list(range(20)) * 2, options).tokens == 40
    found = compare_pair(pair, FakeReference(), "abc def", options)
    assert (found.tokens, found.text, found.generation) == (7, "given text", None)
