"""Two vocabularies, compared token by token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specexport.exporter.contract import Contract, ContractError, reconcile

WORDS = ["a", "b", "c", "ab", "abc"]


def _tokenizer(words: list[str], added: dict[int, str] | None = None, **fields: Any) -> str:
    model = {"type": "BPE", "vocab": {word: number for number, word in enumerate(words)}, "merges": ["a b", "ab c"]}
    tokens = [{"id": number, "content": text} for number, text in (added or {}).items()]
    return json.dumps({"model": {**model, **fields.pop("model", {})}, "added_tokens": tokens, **fields})


def test_equal_vocabularies() -> None:
    text = _tokenizer(WORDS, {5: "<end>"})
    assert reconcile(text, text, 6, 6) == Contract(6, 6, 6, 0)


def test_a_draft_made_from_the_target() -> None:
    assert reconcile(_tokenizer(WORDS), None, 5) == Contract(5, 5, 5, 0)


def test_padded_tails_are_masked_whichever_is_larger() -> None:
    text = _tokenizer(WORDS)
    contract = reconcile(text, text, 151936, 152064)
    assert (contract.vocab_size, contract.masked_tail) == (151936, 128)
    assert contract.notes == ("ids 151936 to 152063 are padding of the draft; they are masked",)
    contract = reconcile(text, text, 152064, 151936)
    assert (contract.vocab_size, contract.masked_tail) == (151936, 128)
    assert "of the target" in contract.notes[0]


def test_the_first_mismatch_is_named() -> None:
    with pytest.raises(ContractError, match="id 2 is 'c' in the target and 'C' in the draft"):
        reconcile(_tokenizer(WORDS), _tokenizer(["a", "b", "C", "AB", "abc"]), 5, 5)
    with pytest.raises(ContractError, match="id 5 is '<end>' in the target and '<stop>' in the draft"):
        reconcile(_tokenizer(WORDS, {5: "<end>"}), _tokenizer(WORDS, {5: "<stop>"}), 6, 6)
    with pytest.raises(ContractError, match="id 5 is no token in the target and '<x>' in the draft"):
        reconcile(_tokenizer(WORDS, {6: "<end>"}), _tokenizer(WORDS, {5: "<x>", 6: "<end>"}), 7, 7)


def test_a_unigram_vocabulary_is_a_list() -> None:
    unigram = json.dumps({"model": {"type": "Unigram", "vocab": [[word, 0.0] for word in WORDS]}})
    assert reconcile(_tokenizer(WORDS), unigram, 5, 5).vocab_size == 5


def test_tokens_past_the_others_last_are_noted_if_there_is_a_row() -> None:
    more = _tokenizer(WORDS, {5: "<tool>", 6: "</tool>"})
    contract = reconcile(more, _tokenizer(WORDS), 8, 8)
    assert contract.vocab_size == 8
    assert "only the target has tokens 5 to 6" in contract.notes[0]
    with pytest.raises(ContractError, match=r"id 6 .*'</tool>'.* the draft's output head has only 6 rows"):
        reconcile(more, _tokenizer(WORDS), 8, 6)


def test_a_tokenizer_that_emits_more_than_the_target_knows() -> None:
    with pytest.raises(ContractError, match=r"id 4 .*target's output head has only 4 rows"):
        reconcile(_tokenizer(WORDS), None, 4)


def test_another_way_to_encode_is_noted() -> None:
    other = _tokenizer(WORDS, normalizer={"type": "NFC"}, model={"merges": [["a", "b"], ["b", "c"]]})
    notes = reconcile(_tokenizer(WORDS), other, 5, 5).notes
    assert [note.split(";")[0] for note in notes] == [
        "the draft's tokenizer has another normalizer",
        "the draft's tokenizer has another merges",
    ]
    same = _tokenizer(WORDS, model={"merges": [["a", "b"], ["ab", "c"]]})
    assert reconcile(_tokenizer(WORDS), same, 5, 5).notes == ()


def test_a_tokenizer_without_vocabulary() -> None:
    with pytest.raises(Exception, match="no vocabulary"):
        reconcile("{}", None, 5)
