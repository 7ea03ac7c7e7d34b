"""Where token ids come from: windows, files of text and of prompts."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from compare_fakes import FakeTokenizer

from specexport.exporter.compare_text import cut_windows, default_text, load_text, read_prompts
from specexport.plugins.errors import InputError


def cut(count: int, window: int = 20, tokens: int | None = None, bos: int | None = None) -> list[list[int]]:
    ids = ([] if bos is None else [bos]) + list(range(100, 100 + count))
    return [w.tolist() for w in cut_windows(ids, window=window, tokens=tokens, bos_token_id=bos)]


def test_windows_are_consecutive_and_a_short_rest_is_left_out() -> None:
    assert [len(w) for w in cut(40)] == [20, 20]
    assert [len(w) for w in cut(55)] == [20, 20]
    assert [len(w) for w in cut(56)] == [20, 20, 16]
    assert sum(cut(40), []) == list(range(100, 140))  # noqa: RUF017
    assert [len(w) for w in cut(5)] == [5]
    assert [len(w) for w in cut(100, tokens=40)] == [20, 20]
    assert [len(w) for w in cut(100, tokens=7)] == [7]


def test_each_window_begins_with_the_beginning_of_sequence_if_the_text_does() -> None:
    found = cut(38, bos=1)
    assert found == [[1, *range(100, 119)], [1, *range(119, 138)]]
    ids = list(range(100, 140))
    windows = cut_windows(ids, window=20, tokens=None, bos_token_id=1)
    assert [w[0] for w in windows] == [100, 120], "a tokenizer that adds none gets none"


def test_too_little_text_is_refused() -> None:
    with pytest.raises(InputError, match="the text has 1 tokens"):
        cut(1)
    with pytest.raises(InputError, match="--window is 1"):
        cut(10, window=1, bos=1)


def test_the_text_that_ships_is_varied_and_large_enough() -> None:
    text = default_text()
    assert 2200 < len(text.split()) < 3000
    assert "def " in text and '"' in text and "\n- " in text
    loaded = load_text(FakeTokenizer(), window=512, tokens=1024)
    assert [len(w) for w in loaded.windows] == [512, 512]
    assert loaded.tokens == 1024
    assert len(loaded.prompts) == 4


def prompts_file(tmp_path: pathlib.Path, *lines: str) -> pathlib.Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_prompt_fields(tmp_path: pathlib.Path) -> None:
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = prompts_file(
        tmp_path,
        json.dumps({"prompt": "a"}),
        json.dumps({"turns": ["b", "c"], "category": "x"}),
        "",
        json.dumps({"messages": conversation}),
        json.dumps({"text": "d"}),
    )
    assert read_prompts(path) == [
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "b"}],
        conversation,
        "d",
    ]
    loaded = load_text(FakeTokenizer(), prompts=path, window=8, generation_prompts=2)
    rendered = FakeTokenizer().encode("<user>a")
    np.testing.assert_array_equal(loaded.prompts[0], rendered)
    np.testing.assert_array_equal(loaded.windows[0], rendered[:8])
    assert [len(w) for w in loaded.windows] == [7, 7, 8], "the last prompt is a single token, which predicts nothing"
    assert len(loaded.prompts) == 2


def test_a_model_without_template_gets_the_plain_text(tmp_path: pathlib.Path) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.chat = None
    loaded = load_text(tokenizer, prompts=prompts_file(tmp_path, '{"prompt": "hello"}'))
    np.testing.assert_array_equal(loaded.prompts[0], tokenizer.encode("hello"))


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt": 3}', '{"turns": []}', '{"messages": [{"role": "user"}]}', '{"text": ""}']
)
def test_a_bad_line_is_named(tmp_path: pathlib.Path, line: str) -> None:
    path = prompts_file(tmp_path, '{"prompt": "a"}', line)
    with pytest.raises(InputError, match=r"prompts\.jsonl:2: "):
        read_prompts(path)


def test_bad_files_are_named(tmp_path: pathlib.Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    for path, reason in ((empty, "is empty"), (latin, "byte 3 is not UTF-8"), (tmp_path / "no.txt", "No such file")):
        with pytest.raises(InputError, match=reason):
            load_text(FakeTokenizer(), text=path)
    with pytest.raises(InputError, match="exclude each other"):
        load_text(FakeTokenizer(), text=empty, prompts=latin)
    with pytest.raises(InputError, match="no tokenizer"):
        load_text(None)
