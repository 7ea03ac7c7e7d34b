"""Streaming: whole characters, stop strings wherever they begin, pieces that join to the text."""

from __future__ import annotations

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.runtime.text import IncrementalText, StopStrings, TextStream


def decode_bytes(ids) -> str:
    """A token a byte, as byte-level tokenizers show unfinished characters."""
    return bytes(ids).decode(errors="replace")


def decode_words(ids) -> str:
    """A decoder that looks back: it drops the space before the first word, as SentencePiece's does."""
    return "".join(f" {'abcdefgh'[i % 8]}" for i in ids if i % 5)[1:]


def pieces_of(decode, ids) -> list[str]:
    text = IncrementalText(decode)
    return [*(text.push(i) for i in ids), text.flush()]


def test_a_character_is_never_split():
    assert pieces_of(decode_bytes, "aé€😀".encode()) == ["a", "", "é", "", "", "€", "", "", "", "😀", ""]


def test_bytes_that_are_no_character_come_out_at_the_end():
    assert pieces_of(decode_bytes, b"a\xf0\x9f") == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text("aé€😀", max_size=30).map(str.encode)))
def test_pieces_of_bytes_join_to_the_text(data):
    pieces = pieces_of(decode_bytes, data)
    if all(byte < 128 for byte in data) or decode_bytes(data).encode() == data:
        assert "".join(pieces) == decode_bytes(data)
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces) or b"\xef\xbf\xbd" in data


def test_long_garbage_is_not_held_for_ever():
    pieces = pieces_of(decode_bytes, b"\xff" * 40)
    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}" * 40
    assert sum(map(bool, pieces)) > 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=30))
def test_a_decoder_that_looks_back_keeps_its_spaces(ids):
    assert "".join(pieces_of(decode_words, ids)) == decode_words(ids)


def test_a_real_byte_level_decoder():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(byte_letters())}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    ids = tokenizer.encode("Grüße, 世界 😀!").ids
    assert len(ids) == len("Grüße, 世界 😀!".encode())
    pieces = pieces_of(tokenizer.decode, ids)
    assert "".join(pieces) == "Grüße, 世界 😀!"
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def byte_letters() -> list[str]:
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def test_a_stop_string_is_held_back_until_it_is_decided():
    stops = StopStrings(["</s>", "END"])
    assert stops.push("a <") == ("a ", False)
    assert stops.push("/") == ("", False)
    assert stops.push("p> E") == ("</p> ", False)
    assert stops.push("NDx") == ("", True)


def test_the_earliest_stop_string_counts_and_the_rest_is_cut():
    assert StopStrings(["cd", "b"]).push("abcd") == ("a", True)
    assert StopStrings(["bcd", "bc"]).push("abcd") == ("a", True)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
)
def test_pieces_before_a_stop_string_are_the_text_before_it(pieces, stops):
    matcher, out, stopped = StopStrings(stops), "", False
    for piece in pieces:
        text, stopped = matcher.push(piece)
        out += text
        if stopped:
            break
    out += matcher.flush()
    whole = "".join(pieces)
    found = [whole.find(stop) for stop in stops if stop in whole]
    assert stopped == bool(found)
    if stopped:
        # A stop string is complete as soon as its last piece came; a longer one that began earlier may not be.
        assert whole.startswith(out) and not any(stop in out for stop in stops)
    else:
        assert out == whole


def test_a_stream_flushes_what_turned_out_to_be_no_stop_string():
    pieces: list[str] = []
    stream = TextStream(decode_bytes, ["zzz"], pieces.append)
    assert not any(stream.push(i) for i in b"azz\xc3")
    stream.finish(stopped=False)
    assert (stream.text, pieces) == ("azz\N{REPLACEMENT CHARACTER}", ["a", "zz\N{REPLACEMENT CHARACTER}"])
