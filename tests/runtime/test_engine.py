"""Engines in ONNX Runtime with the custom-op library: caches in place, bindings reused, rows independent."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from tiny_bundle import CONTEXT, VOCAB, write_tiny_bundle

from specexport.plugins.errors import InputError
from specexport.runtime import load
from specexport.runtime.cache import CapacityError
from specexport.runtime.drafts.model import ModelDraft
from specexport.runtime.engine import MAX_BINDINGS, Engine, EngineError
from specexport.runtime.manifest import Manifest, TensorEntry
from specexport.runtime.manifest_json import ManifestError
from specexport.runtime.native import num_threads, set_num_threads


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bundle")
    write_tiny_bundle(directory)
    return directory


@pytest.fixture(scope="module")
def pair(bundle):
    return load(bundle, num_threads=1)  # two would fight over cores that other tests keep busy


@pytest.fixture(scope="module")
def engine(pair) -> Engine:
    return pair.target


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (1, count))


def test_one_pass_is_bit_for_bit_many_steps(engine):
    ids = tokens(40)
    whole = engine.forward(ids, engine.new_cache())
    assert whole.shape == (40, VOCAB) and whole.dtype == np.float32 and np.ptp(whole) > 1
    cache = engine.new_cache(capacity=4)
    steps = [engine.forward(ids[:, i : i + 1], cache)[0] for i in range(20)]
    steps += [*engine.forward(ids[:, 20:25], cache), *engine.forward(ids[:, 25:], cache)]
    np.testing.assert_array_equal(np.array(steps), whole)
    assert (cache.length.tolist(), cache.capacity) == ([40], 64)


def test_rewinding_forgets(engine):
    ids, other = tokens(20), tokens(20, seed=1)
    cache = engine.new_cache()
    engine.forward(ids[:, :12], cache)
    engine.forward(other[:, :6], cache)
    cache.rewind(12)
    again = engine.forward(ids[:, 12:], cache)
    np.testing.assert_array_equal(again, engine.forward(ids, engine.new_cache())[12:])


def test_logits_rows_are_chosen_and_a_buffer_may_be_shared(engine):
    ids = tokens(9)
    whole = engine.forward(ids, engine.new_cache())
    cache = engine.new_cache()
    rows = engine.forward(ids, cache, logits_rows=[8, 0])
    np.testing.assert_array_equal(rows, whole[[8, 0]])
    cache.rewind(0)
    first = engine.forward(ids, cache, copy=False)
    cache.rewind(0)
    second = engine.forward(ids[:, ::-1], cache, copy=False)
    assert first is second
    cache.rewind(0)
    kept = engine.forward(ids, cache)
    engine.forward(ids, cache)
    np.testing.assert_array_equal(kept, whole)


def test_a_ragged_batch_equals_single_sequences(engine):
    ids = np.concatenate([tokens(7, 1), tokens(7, 2), tokens(7, 3)])
    cache = engine.new_cache(batch=3)
    counts = np.array([7, 3, 5])
    logits = engine.forward(ids, cache, query_length=counts)
    more = engine.forward(ids[:, :2], cache)
    assert cache.length.tolist() == [9, 5, 7]
    for b, count in enumerate(counts):
        alone = engine.new_cache()
        np.testing.assert_array_equal(engine.forward(ids[b : b + 1, :count], alone), logits[counts[:b].sum() :][:count])
        np.testing.assert_array_equal(engine.forward(ids[b : b + 1, :2], alone), more[2 * b : 2 * b + 2])


def test_bindings_are_made_once_per_shape(engine):
    cache = engine.new_cache(capacity=CONTEXT)
    for _ in range(10):
        engine.forward(tokens(4), cache)
        engine.forward(tokens(1), cache)
    assert set(cache.bindings) == {(1, 4, 4), (1, 1, 1)}
    for width in range(2, MAX_BINDINGS + 10):
        cache.rewind(0)
        engine.forward(tokens(width), cache)
    assert len(cache.bindings) == MAX_BINDINGS


def test_the_context_ends_with_a_clear_error_and_the_cache_stays(engine):
    cache = engine.new_cache()
    engine.forward(tokens(CONTEXT), cache)
    with pytest.raises(CapacityError, match=f"{CONTEXT + 1} positions are needed, the model has {CONTEXT}"):
        engine.forward(tokens(1), cache)
    cache.rewind(CONTEXT - 1)
    engine.forward(tokens(1), cache)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": [1, 2]}, r"input_ids must be \[1, at least 1\], is \[2\]"),
        ({"input_ids": [[1], [2]]}, r"input_ids must be \[1, at least 1\], is \[2, 1\]"),
        ({"input_ids": [[]]}, r"is \[1, 0\]"),
        ({"input_ids": [[1]], "query_length": [2]}, r"query_length must be \[1\] of 0 to 1, is \[2\]"),
        ({"input_ids": [[1]], "logits_rows": [1]}, r"logits_rows must be a list of 0 to 0, is \[1\]"),
    ],
)
def test_wrong_arguments(engine, arguments, message):
    with pytest.raises(InputError, match=message):
        engine.forward(cache=engine.new_cache(), **arguments)


def test_an_id_outside_the_vocabulary_fails_in_one_line_and_the_cache_stays(engine):
    cache = engine.new_cache()
    with pytest.raises(EngineError, match=r"target.onnx") as caught:
        engine.forward([[VOCAB]], cache)
    assert "\n" not in str(caught.value)
    assert cache.length.tolist() == [0]


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 5, "assistant_do_sample": False}])
def test_speculation_equals_plain_decoding(pair, bundle, options):
    assert isinstance(pair.draft, ModelDraft)
    ngram = bundle.parent / "ngram"
    if not ngram.exists():
        ngram.mkdir()
        write_tiny_bundle(ngram, draft="ngram")
    for seed in range(3):
        prompt = np.tile(tokens(10, seed)[0], 3)
        plain = pair.generate(prompt, max_new_tokens=150, num_assistant_tokens=0, ignore_eos=True, **options)
        assert len(plain.token_ids) == 150
        for other in (pair, load(ngram)):
            for k in (1, 4, 7):
                out = other.generate(prompt, max_new_tokens=150, num_assistant_tokens=k, ignore_eos=True, **options)
                assert out.token_ids == plain.token_ids
                assert out.metrics.drafted > 0


def test_decoding_to_the_end_of_the_context(pair):
    out = pair.generate(tokens(CONTEXT - 20)[0], max_new_tokens=500, num_assistant_tokens=5, ignore_eos=True)
    assert (len(out.token_ids), out.finish_reason) == (20, "length")


def test_two_requests_at_once_do_not_meet(pair):
    prompts = [tokens(15, seed)[0] for seed in range(4)]
    alone = [pair.generate(p, max_new_tokens=60, ignore_eos=True).token_ids for p in prompts]
    together: dict[int, list[int]] = {}

    def work(i: int) -> None:
        together[i] = pair.generate(prompts[i], max_new_tokens=60, ignore_eos=True).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(4)] == alone


def test_threads_are_set_for_the_process():
    before = num_threads()
    set_num_threads(None)
    assert num_threads() == before
    set_num_threads(1)
    assert num_threads() == 1
    set_num_threads(before)
    with pytest.raises(InputError, match="num_threads must be at least 1"):
        set_num_threads(0)


def test_a_file_that_is_no_model(bundle, tmp_path):
    entry = Manifest.read(bundle).target
    (tmp_path / "target.onnx").write_bytes(b"junk")
    with pytest.raises(EngineError, match=r"target.onnx: ONNX Runtime cannot load it") as caught:
        Engine(tmp_path / "target.onnx", entry)
    assert "\n" not in str(caught.value)


def layers(entry, found, **changes):
    cache = dataclasses.replace(entry.cache, layers=tuple(dataclasses.replace(layer, **changes) for layer in found))
    return dataclasses.replace(entry, cache=cache)


def swapped(entry, kind: str, index: int, **changes):
    tensors = list(getattr(entry, kind))
    tensors[index] = dataclasses.replace(tensors[index], **changes)
    return dataclasses.replace(entry, **{kind: tuple(tensors)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: swapped(e, "inputs", 0, name="ids"), "its inputs differ from the manifest's: ids, input_ids"),
        (lambda e: swapped(e, "outputs", 0, dtype="float16"), "output logits is tensor\\(float\\), the manifest says"),
        (lambda e: swapped(e, "outputs", 0, shape=("rows", 7)), "output logits has shape .* the manifest says"),
        (lambda e: swapped(e, "inputs", 4, shape=("batch", 2, "capacity", "d")), "input key_cache.0 has shape"),
        (
            lambda e: dataclasses.replace(e, inputs=(*e.inputs, TensorEntry("extra", "int64", ()))),
            "its inputs differ from the manifest's: extra",
        ),
        (lambda e: layers(e, e.cache.layers[:1]), "inputs or outputs do not follow its cache layout: 10 of them"),
        (
            lambda e: layers(e, e.cache.layers[:1] * 2, value_bits=8, value_group_size=16),
            "value_cache_out.0 instead of|value_scale.0",
        ),
        (
            lambda e: layers(e, e.cache.layers, key_group_size=8),
            r"key_scale.0 is float16 \['batch', 2, 'capacity', 1\], its cache layout asks for float16 with 2 heads "
            "and rows of 2",
        ),
        (lambda e: layers(e, e.cache.layers, kv_num_heads=1), "asks for int8 with 1 heads and rows of 16"),
        (lambda e: dataclasses.replace(e, vocab_size=95), "its vocabulary is 95"),
    ],
)
def test_an_engine_that_is_not_the_manifests(bundle, change, message):
    entry = Manifest.read(bundle).target
    with pytest.raises(EngineError, match=message):
        Engine(bundle / "engines" / "cpu" / "target.onnx", change(entry))


def test_a_damaged_bundle_is_refused_before_its_engine_is_loaded(tmp_path):
    write_tiny_bundle(tmp_path, draft="none")
    path = tmp_path / "engines" / "cpu" / "target.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ManifestError, match="sha256 is"):
        load(tmp_path)
    assert load(tmp_path, verify=False).draft is None
