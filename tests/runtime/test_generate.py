"""The generation loop over tables of logits: greedy and seeded speculation equal plain decoding, and every end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import LetterTokenizer, TableModel, make_pair

from specexport.plugins.errors import InputError
from specexport.runtime.drafts.base import Context, Proposal
from specexport.runtime.drafts.model import ModelDraft
from specexport.runtime.drafts.ngram import NgramDraft
from specexport.runtime.sampler import LogitsError

SAMPLING = (
    {},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "temperature": 0.7, "top_k": 3},
    {"do_sample": True, "top_p": 0.8, "top_k": 0},
    {"do_sample": True, "min_p": 0.2, "temperature": 1.3},
    {"do_sample": True, "repetition_penalty": 1.4, "top_k": 4, "top_p": 0.9},
    {"repetition_penalty": 1.7},
)


class Parrot:
    """A draft that proposes a fixed chain, right or wrong."""

    def __init__(self, chain):
        self.chain = tuple(chain)

    def start(self, sampler, *, do_sample):
        return self

    def prefill(self, tokens):
        pass

    def propose(self, context: Context) -> Proposal:
        return Proposal(self.chain[: context.count])

    def close(self):
        pass


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    options=st.sampled_from(SAMPLING),
    draft=st.sampled_from(["ngram", "model", "other", "parrot"]),
    k=st.integers(1, 6),
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    new=st.integers(1, 40),
)
def test_one_hot_speculation_is_token_for_token_plain_decoding(seed, options, draft, k, prompt, new):
    target = TableModel.random(seed)
    drafts = {
        "ngram": NgramDraft(3),
        "model": ModelDraft(target.near(seed + 1, 0.3)),
        "other": ModelDraft(TableModel.random(seed + 2)),
        "parrot": Parrot([1, 2, 3, 4, 5, 0]),
    }
    pair = make_pair(target, drafts[draft], eos=[5])
    common = dict(max_new_tokens=new, seed=seed, assistant_do_sample=False, **options)
    plain = pair.generate(prompt, num_assistant_tokens=0, **common)
    speculative = pair.generate(prompt, num_assistant_tokens=k, **common)
    assert speculative.token_ids == plain.token_ids
    assert speculative.text == plain.text
    assert speculative.finish_reason == plain.finish_reason


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 5), options=st.sampled_from(SAMPLING[1:6]))
def test_a_seed_repeats_a_sampled_model_draft(seed, k, options):
    target = TableModel.random(seed)
    pair = make_pair(target, ModelDraft(target.near(seed, 0.5)))
    runs = [
        pair.generate([0, 1], max_new_tokens=20, seed=seed, num_assistant_tokens=k, **options).token_ids
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_other_seeds_give_other_texts_and_the_seed_comes_back():
    pair = make_pair(TableModel.random(3), NgramDraft())
    runs = [pair.generate([0], max_new_tokens=20, do_sample=True) for _ in range(5)]
    assert len({tuple(run.token_ids) for run in runs}) > 1
    again = pair.generate([0], max_new_tokens=20, do_sample=True, seed=runs[0].seed)
    assert again.token_ids == runs[0].token_ids


def test_a_draft_equal_to_the_target_is_always_accepted():
    target = TableModel.random(5)
    for options in SAMPLING:
        pair = make_pair(target, ModelDraft(TableModel(target.table)))
        metrics = pair.generate([0, 1], max_new_tokens=41, num_assistant_tokens=4, seed=1, **options).metrics
        assert metrics.accepted == metrics.drafted == 32
        assert metrics.accepted_per_position == [8, 8, 8, 8]
        assert (metrics.bonus, metrics.recovered, metrics.plain, metrics.steps) == (8, 0, 0, 8)
        assert metrics.tokens_per_step == 5


def test_metrics_add_up_and_time_is_split():
    target = TableModel.random(11)
    out = make_pair(target, ModelDraft(target.near(2, 0.8))).generate([0], max_new_tokens=50, do_sample=True, seed=3)
    m = out.metrics
    assert m.new_tokens == len(out.token_ids) == 50
    assert m.new_tokens == 1 + m.accepted + m.recovered + m.bonus + m.plain
    assert sum(m.accepted_per_position) == m.accepted < m.drafted
    assert m.accepted_per_position == sorted(m.accepted_per_position, reverse=True)
    assert m.steps == len(m.draft_ms) == len(m.host_ms) == m.recovered + m.bonus + m.plain
    assert sum(m.draft_ms) + sum(m.verify_ms) + sum(m.host_ms) == pytest.approx(m.decode_s * 1e3)
    assert m.prefill_s > 0


def test_a_verify_pass_feeds_the_last_token_and_the_drafted_ones():
    target = TableModel.random(0)
    make_pair(target, Parrot([1, 1, 1])).generate([0, 1, 2], max_new_tokens=2, num_assistant_tokens=3)
    assert target.widths == [3, 1]  # only one token is wanted after the first: nothing to draft
    target.widths.clear()
    make_pair(target, Parrot([1, 1, 1])).generate([0, 1, 2], max_new_tokens=5, num_assistant_tokens=3)
    assert target.widths[:2] == [3, 4]


def test_prefill_goes_in_chunks():
    target = TableModel.random(0)
    pair = make_pair(target)
    prompt = np.random.default_rng(0).integers(0, 6, 1200)
    whole = pair.generate(prompt, max_new_tokens=1)
    assert target.widths == [512, 512, 176]
    tail = target.table[prompt[-2], prompt[-1]].argmax()
    assert whole.token_ids == [tail]


def ring(size: int = 6, **more) -> TableModel:
    """A model that counts: the next token is the last plus one, modulo ``size``."""
    table = np.zeros((size, size, size))
    for last in range(size):
        table[:, last, (last + 1) % size] = 5
    return TableModel(table, **more)


@pytest.mark.parametrize("draft", [None, NgramDraft(), ModelDraft(ring()), Parrot([4, 5, 0, 1])])
def test_eos_inside_accepted_tokens_ends_the_output(draft):
    pair = make_pair(ring(), draft, eos=[1, 5])
    out = pair.generate([2], max_new_tokens=30)
    assert (out.token_ids, out.finish_reason, out.text) == ([3, 4, 5], "eos", "def")
    on = pair.generate([2], max_new_tokens=30, ignore_eos=True)
    assert (len(on.token_ids), on.finish_reason) == (30, "length")


@pytest.mark.parametrize("draft", [None, ModelDraft(ring()), Parrot([4, 5, 0, 1])])
def test_stop_strings_end_the_output_before_them(draft):
    pieces: list[str] = []
    pair = make_pair(ring(), draft)
    out = pair.generate([2], max_new_tokens=30, stop=["zz", "fab"], stream=pieces.append)
    assert (out.text, out.finish_reason) == ("de", "stop")
    assert out.token_ids == [3, 4, 5, 0, 1]
    assert "".join(pieces) == "de"
    kept = pair.generate([2], max_new_tokens=4, stop="abcdefab")
    assert (kept.text, kept.finish_reason) == ("defa", "length")


def test_the_stream_is_the_text():
    pieces: list[str] = []
    out = make_pair(TableModel.random(2), NgramDraft()).generate("abc", max_new_tokens=30, stream=pieces.append)
    assert "".join(pieces) == out.text == LetterTokenizer().decode(out.token_ids)
    assert len(pieces) == 30


@pytest.mark.parametrize("context", [8, 9, 10, 13])
@pytest.mark.parametrize("draft", ["none", "same", "shorter"])
def test_the_end_of_the_context_ends_the_output(context, draft):
    target = ring(context_length=context)
    drafts = {
        "none": None,
        "same": ModelDraft(ring(context_length=context)),
        "shorter": ModelDraft(ring(context_length=7)),
    }
    out = make_pair(target, drafts[draft]).generate([0, 1, 2], max_new_tokens=100)
    expected = [(3 + i) % 6 for i in range(context - 3)]
    assert (out.token_ids, out.finish_reason) == (expected, "length")


def test_a_draft_shorter_than_the_prompt_falls_silent():
    out = make_pair(ring(), ModelDraft(ring(context_length=4))).generate([0, 1, 2, 3, 4, 5], max_new_tokens=5)
    assert out.token_ids == [0, 1, 2, 3, 4]
    assert (out.metrics.drafted, out.metrics.plain) == (0, 4)


def test_a_padded_tail_of_the_vocabulary_never_comes_out():
    table = np.zeros((8, 8, 8))
    table[:, :, 6:] = 50
    for options in ({}, {"do_sample": True, "seed": 1}, {"do_sample": True, "seed": 1, "top_k": 0, "top_p": 0.9}):
        out = make_pair(TableModel(table), NgramDraft(), vocab_size=6).generate([0], max_new_tokens=60, **options)
        assert max(out.token_ids) < 6


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ("", {}, "the prompt is empty"),
        ([0, 6], {}, "token 1 is 6; ids go from 0 to 5"),
        ([-1], {}, "token 0 is -1"),
        ([0.5], {}, "flat list of token ids"),
        ([[0]], {}, "flat list of token ids"),
        ([0] * 4096, {}, "has 4096 tokens; the model's context of 4096 has no room"),
        ([0], {"max_new_tokens": -1}, "max_new_tokens must be at least 0; got -1"),
        ([0], {"num_assistant_tokens": -1}, "num_assistant_tokens must be at least 0"),
        ([0], {"num_assistant_tokens": 2}, "built without a draft"),
        ([0], {"temperature": 0.5}, "temperature has no effect on greedy decoding"),
        ([0], {"do_sample": True, "temperature": 0.0}, "temperature must be above 0"),
        ([0], {"do_sample": True, "temperature": float("nan")}, "temperature must be a number"),
        ([0], {"do_sample": True, "top_p": 1.5}, "top_p must be above 0 and at most 1; got 1.5"),
        ([0], {"do_sample": True, "top_k": -1}, "top_k must be"),
        ([0], {"do_sample": True, "min_p": -0.1}, "min_p must be between 0 and 1"),
        ([0], {"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ([0], {"seed": -1}, "seed must be from 0"),
        ([0], {"stop": ""}, "stop must be strings of at least one character"),
    ],
)
def test_each_wrong_request_has_its_one_message_and_the_pair_goes_on(prompt, options, message):
    pair = make_pair(ring())
    with pytest.raises(InputError, match=message) as caught:
        pair.generate(prompt, **options)
    assert "\n" not in str(caught.value)
    assert pair.generate([0], max_new_tokens=3).token_ids == [1, 2, 3]


def test_without_a_tokenizer_ids_work_and_text_is_refused():
    pair = make_pair(ring(), tokenizer=None)
    assert pair.generate([0], max_new_tokens=2).token_ids == [1, 2]
    with pytest.raises(InputError, match="pass the prompt as token ids"):
        pair.generate("abc")
    with pytest.raises(InputError, match="need a tokenizer"):
        pair.generate([0], stop="a")


def test_max_new_tokens_0_gives_an_empty_output():
    out = make_pair(ring()).generate([0, 1], max_new_tokens=0)
    assert (out.text, out.token_ids, out.finish_reason) == ("", [], "length")


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 0}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_in_the_logits_names_the_position_and_the_pair_goes_on(options, value):
    model = ring()
    if np.isneginf(value):
        model.table[:, 4] = value  # one such logit is a mask, a row of them is none
    else:
        model.table[3, 4, 2] = value
    pair = make_pair(model, Parrot([3, 4, 5]))
    with pytest.raises(LogitsError, match="the target's logits for position 5 hold NaN or infinity"):
        pair.generate([0, 1], max_new_tokens=9, top_k=1 if "do_sample" in options else None, **options)
    assert pair.generate([0, 1], max_new_tokens=2).token_ids == [2, 3]


def test_nan_in_the_drafts_logits_names_the_draft():
    broken = ring()
    broken.table[:, 3] = np.nan
    with pytest.raises(LogitsError, match="the draft's logits for position 4"):
        make_pair(ring(), ModelDraft(broken)).generate([0, 1], max_new_tokens=9)


def test_an_error_in_the_stream_callback_leaves_the_pair_usable():
    pair = make_pair(ring(), ModelDraft(ring()))

    def fail(piece: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pair.generate([0], max_new_tokens=9, stream=fail)
    assert pair.generate([0], max_new_tokens=4).token_ids == [1, 2, 3, 4]
