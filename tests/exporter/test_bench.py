"""`specexport bench`: statistics on a fake clock, bytes counted from a graph, and the command on a tiny bundle."""

from __future__ import annotations

import json
import pathlib
import types

import numpy as np
import pytest
from click.testing import CliRunner
from compare_fakes import FakeEngine
from runtime_fakes import TableModel, make_pair
from tiny_bundle import CONTEXT, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, write_tiny_bundle

from specexport.exporter.bench_bandwidth import read_bandwidth
from specexport.exporter.bench_bytes import cache_bytes, position_bytes, weight_bytes
from specexport.exporter.bench_generation import Generated, PairContestant, generate_in_turn, summarize
from specexport.exporter.bench_memory import measure_memory, resident
from specexport.exporter.bench_prompts import BenchPrompt, load_prompts
from specexport.exporter.bench_report import render_report
from specexport.exporter.bench_statistics import Summary, in_turn, noise, percentile, ratios
from specexport.exporter.bench_steps import time_steps
from specexport.exporter.bench_table import align
from specexport.exporter.cli import cli
from specexport.exporter.measure import WIDTHS, measure_pair
from specexport.exporter.progress import Counter, Silent
from specexport.plugins.errors import InputError
from specexport.runtime.drafts.ngram import NgramDraft
from specexport.runtime.manifest import CacheLayer, CacheLayout, Manifest


def test_a_summary_of_known_measurements():
    found = Summary.of([float(value) for value in range(101)])
    assert (found.count, found.median, found.p10, found.p90, found.p99) == (101, 50, 10, 90, 99)
    assert found.spread == 1.0  # from 25 to 75, over 50
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert found.to_json()["p99"] == 99.0


def test_a_single_measurement_is_no_figure():
    with pytest.raises(InputError, match=r"at least 2 measurements, there are 1; raise --rounds"):
        Summary.of([1.0])


def test_ratios_are_taken_pair_by_pair():
    # Both slow down tenfold in the second round: medians apart would say 2, 1.1 and what not; pairs say 2.
    assert ratios([2, 20, 4], [1, 10, 2]) == [2, 2, 2]
    with pytest.raises(InputError, match="cannot be paired"):
        ratios([1], [1, 2])


def test_tasks_run_in_turn_and_the_first_round_does_not_count():
    order: list[str] = []

    def task(name: str):
        def run() -> float:
            order.append(name)
            return float(len(order))

        return run

    advanced: list[float] = []
    found = in_turn({name: task(name) for name in "abc"}, 2, advance=advanced.append)
    assert "".join(order) == "abcabcabc"
    assert found == {"a": [4, 7], "b": [5, 8], "c": [6, 9]}
    assert advanced == [1, 1, 1]


def test_noise_is_named_where_the_same_step_takes_different_times():
    assert not noise([10, 10.1, 9.9, 10])["noisy"]
    found = noise([10, 20, 10, 20, 10, 20])
    assert found["noisy"] and found["spread"] == pytest.approx(0.6667) and "quote ratios" in found["text"]


class FakeClock:
    """Every forward takes a millisecond, and a tenth for each row beyond the first."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    def __call__(self) -> float:
        return sum(1e-3 + 1e-4 * (rows - 1) for rows in self.engine.calls)


def fake_pair(context_length: int = 256):
    return types.SimpleNamespace(target=FakeEngine(context_length=context_length), draft=None)


def test_steps_are_timed_by_width_at_one_context():
    pair = fake_pair()
    clock = FakeClock(pair.target)
    read: list[int] = []
    found = time_steps(pair, 20, (1, 5), 3, Silent(), beside={"bandwidth": lambda: read.append(1) or 7.0}, clock=clock)
    assert found["verify 1"] == pytest.approx([1.0] * 3)
    assert found["verify 5"] == pytest.approx([1.4] * 3)
    assert found["bandwidth"] == [7.0] * 3 and len(read) == 4
    assert "draft" not in found
    # Prefill once, then four rounds of both widths and of the step that settles the caches after the reading.
    assert pair.target.calls == [20, *[1, 5, 1] * 4]


def test_the_build_measures_with_the_same_code():
    found = measure_pair(fake_pair())
    assert list(found["verify_ms"]) == [str(width) for width in WIDTHS]
    assert found["context"] == 128 and found["draft_ms"] is None
    short = measure_pair(fake_pair(context_length=12))
    assert short["context"] == 4 and list(short["verify_ms"]) == [str(width) for width in WIDTHS]


def test_bytes_of_a_cache_position():
    layer = CacheLayer(3, 64, 8, 16, 32, 0, 0)
    assert position_bytes(layer) == 3 * (64 + 2 * 2 + 128)
    windowed = CacheLayer(3, 64, 8, 16, 32, 0, 100)
    assert cache_bytes(CacheLayout((layer, windowed)), 1000) == 3 * 196 * 1100


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("bench") / "pair"
    write_tiny_bundle(directory, draft="ngram")
    return directory


def test_bytes_of_a_step_are_counted_from_the_graph(bundle):
    found = weight_bytes(bundle / "engines/cpu/target.onnx")
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(bundle / "engines/cpu/target.onnx").graph
    sizes = {t.name: onnx.numpy_helper.to_array(t).nbytes for t in graph.initializer}
    linear = [{name for name in n.input if name in sizes} for n in graph.node if n.op_type == "QuantizedLinear"]
    matrices = set().union(*linear)
    assert found.stored == sum(sizes.values())
    assert found.head == sum(sizes[name] for name in linear[-1]) > VOCAB * HIDDEN
    assert found.step - sum(sizes[name] for name in matrices) == 16 + 4  # a shape and a gain
    assert HEADS * HEAD_DIM * HIDDEN < found.layers < found.stored


def test_a_file_that_is_no_model_is_named(tmp_path):
    path = tmp_path / "odd.onnx"
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(InputError, match=r"odd.onnx: no ONNX model"):
        weight_bytes(path)


def test_the_read_bandwidth_is_a_machine_s():
    found = [read_bandwidth(4 << 20, seconds=0.005, threads=threads) for threads in (0, 1)]
    assert all(1e8 < value < 1e13 for value in found)


def test_prompts_have_categories(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"turns": [f"t{n}"], "category": f"c{n % 2}"} for n in range(6)] + [{"text": "abc"}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    tokenizer = types.SimpleNamespace(
        chat="template", encode=lambda text: list(range(len(text))), encode_chat=lambda m: [7] * 9
    )
    found = load_prompts(tokenizer, path, longest=5)
    assert [prompt.category for prompt in found] == ["c0", "c1"] * 3 + ["all"]
    assert found[0].ids == (7,) * 5 and found[-1].ids == (0, 1, 2)
    spread = load_prompts(tokenizer, path, count=3)
    assert [prompt.category for prompt in spread] == ["c0", "c0", "c0"]
    shipped = load_prompts(tokenizer)
    assert len(shipped) == 12 and len({prompt.category for prompt in shipped}) == 8


class Scripted:
    """Continues with its script at a known speed."""

    def __init__(self, speeds: list[float], ids: list[int]) -> None:
        self.speeds = iter([1.0, *speeds])
        self.ids = ids

    def generate(self, ids, new):
        return Generated(self.ids[:new], 0.1, (new - 1) / next(self.speeds))


def test_contestants_are_compared_on_the_same_prompt_and_round():
    prompts = [BenchPrompt("x", (1, 2)), BenchPrompt("y", (1,)), BenchPrompt("z", (1,) * 40)]
    contestants = {"plain": Scripted([10, 100, 10, 100], [5] * 4), "other": Scripted([20, 200, 30, 300], [5] * 4)}
    run = generate_in_turn(contestants, prompts, 4, 2, Silent(), context_length=42)
    assert len(run.prompts) == 2  # the third leaves no room
    found = {
        entry["category"]: entry["contestants"]["other"]["ratio"]["median"] for entry in summarize(run)["categories"]
    }
    assert found == {"all": 2.5, "x": 2.0, "y": 3.0}


def test_speculation_that_changes_an_id_is_found():
    model = TableModel.random(4, vocab_size=26)
    pair = make_pair(model, NgramDraft())
    contestants = {"plain": PairContestant(pair, 0), "speculative 3": PairContestant(pair, 3)}
    prompts = [BenchPrompt("x", (1, 2, 3)), BenchPrompt("x", (4, 5, 4, 5))]
    run = generate_in_turn(contestants, prompts, 12, 2, Silent(), context_length=4096)
    found = summarize(run)
    assert found["different_prompts"] == {"speculative 3": []}
    entry = found["categories"][0]["contestants"]["speculative 3"]
    assert entry["tokens_per_step"] >= 1 and 0 <= entry["acceptance"] <= 1
    run.outputs["speculative 3"][2].ids[5] += 1  # the second prompt's first round
    assert summarize(run)["different_prompts"] == {"speculative 3": [1]}


def test_memory_as_linux_reports_it():
    text = "VmHWM:\t  2048 kB\nVmRSS:\t 1024 kB\nRssAnon:\t 1000 kB\nRssFile:\t   24 kB\n"
    assert resident(text) == {"peak": 2 << 20, "now": 1 << 20, "own": 1000 << 10, "files": 24 << 10}


def test_memory_of_a_running_pair(bundle):
    found = measure_memory(bundle, 50, 1)
    if found is None:
        pytest.skip("no /proc here")
    layers = Manifest.read(bundle).target.cache.layers
    assert found["cache_bytes"] == sum(map(position_bytes, layers)) * 66
    assert layers[0].kv_num_heads == KV_HEADS
    assert found["libraries_bytes"] < found["peak_bytes"] < 1 << 31
    assert found["beyond_bytes"] == found["peak_bytes"] - found["weights_bytes"] - found["cache_bytes"]


def test_columns_line_up():
    assert align([["name", "x"], ["a", "10"], ["bc", "9"]]) == ["name   x", "a     10", "bc     9"]


def test_the_counter_tells_the_time_left(capsys):
    import sys

    times = iter([0.0, 10.0, 40.0])
    with Counter(sys.stderr, clock=lambda: next(times)).stage("Prefill", 4) as advance:
        advance(1)
    shown = capsys.readouterr().err
    assert "Prefill:  25%, 30 s left" in shown and shown.endswith("Prefill: 40.0 s\x1b[K\n")


def test_the_command_on_a_real_bundle(bundle, tmp_path):
    page = tmp_path / "out" / "bench.html"
    arguments = ["bench", str(bundle), "--context", "20", "--context", "60", "--prompt-length", "16", "--rounds", "2"]
    arguments += ["--step-rounds", "2", "--json", "--report", str(page)]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads(page.with_suffix(".json").read_text())
    assert list(found["verify_ms"]) == [str(width) for width in range(1, 17)]
    assert [entry["tokens"] for entry in found["prefill"]] == [16, 20, 60]
    assert [entry["context"] for entry in found["contexts"]] == [20, 60]
    for entry in found["contexts"]:
        parts = entry["bytes_per_token"]
        assert parts["total"] == parts["weights"] + parts["head"] + parts["cache"]
        assert entry["bandwidth_share"]["median"] > 0 and entry["verify_ratio"]["1"]["median"] == 1
    assert found["memory"]["context"] == 60
    assert found["generation"] is None  # the tiny bundle has no tokenizer
    html = page.read_text()
    assert "Steps at 60 tokens" in html and "http" not in html.replace("http://www.w3.org", "")
    assert CONTEXT == 200


def test_the_page_escapes_what_it_shows(bundle):
    done = CliRunner().invoke(cli, ["bench", str(bundle), "--only", "prefill", "--rounds", "2", "--json"])
    result = json.loads(done.stdout)
    result["model"] = "<script>"
    assert "<script>" not in render_report(result)


def test_a_context_that_leaves_no_room_is_refused(bundle):
    done = CliRunner().invoke(cli, ["bench", str(bundle), "--context", "190", "--only", "steps"])
    assert done.exit_code == 2
    assert "--context is 190" in done.stderr and "at most 184" in done.stderr


def test_one_round_is_refused_where_it_would_be_a_figure(bundle):
    done = CliRunner().invoke(cli, ["bench", str(bundle), "--only", "prefill", "--rounds", "1"])
    assert done.exit_code == 2 and "raise --rounds" in done.stderr


def test_ids_do_not_leave_the_vocabulary():
    from specexport.exporter.bench_steps import some_ids

    ids = some_ids(1000, VOCAB)
    assert ids.shape == (1, 1000) and ids.min() >= 0 and ids.max() < VOCAB
    assert np.array_equal(ids, some_ids(1000, VOCAB))
