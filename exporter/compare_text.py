"""Where the comparison's token ids come from: the text that ships, a text file, or a file of prompts."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np

from specexport.exporter.compare_statistics import Ids
from specexport.plugins.errors import InputError

#: Continued greedily where no file of prompts is given.
DEFAULT_PROMPTS = (
    "Write three sentences about the sea.",
    "Explain in simple words why the sky is blue.",
    "List five uses of an old newspaper.",
    "A train travels 180 km in 2.5 hours. What is its average speed? Show the steps.",
)
#: A shorter rest of a text says little about its positions, and is left out.
MIN_WINDOW = 16


class TokenizerLike(Protocol):
    """What text needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ...

    @property
    def chat(self) -> Any:
        """The chat template, None if the model has none."""
        ...

    def encode_chat(self, messages: Any) -> list[int]:
        """Ids of a conversation, by the model's chat template."""
        ...


@dataclasses.dataclass(frozen=True)
class CompareText:
    """Token ids to compare on.

    Attributes:
        source: Where they come from, for the report.
        windows: int64 [tokens] each; read apart from one another, as the runtime would read that many prompts.
        prompts: int64 [tokens] each; continued greedily.
    """

    source: str
    windows: tuple[Ids, ...]
    prompts: tuple[Ids, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all windows."""
        return sum(len(window) for window in self.windows)


def default_text() -> str:
    """The text that ships: about 3,000 tokens of prose, dialogue, code, lists and figures, written for this."""
    return importlib.resources.files("specexport.exporter").joinpath("compare_text.txt").read_text("utf-8")


def cut_windows(ids: Sequence[int], *, window: int, tokens: int | None, bos_token_id: int | None) -> tuple[Ids, ...]:
    """Cut ids [n] into windows of ``window`` tokens.

    Where the ids begin with the beginning-of-sequence id, every window gets one: models that are trained with it are
    lost without it, and the figures would tell of that alone. A rest under 16 tokens is left out.

    At most ``tokens`` tokens are used, those ids counted; None for all.

    Raises:
        InputError: Fewer than two tokens.
    """
    head = [ids[0]] if len(ids) and bos_token_id is not None and ids[0] == bos_token_id else []
    body = list(ids[len(head) :])
    step = window - len(head)
    if step < 1:
        raise InputError(f"--window is {window}; it must leave room for a token after the beginning of sequence")
    remaining = len(body) + len(head) * (len(body) // step + 1) if tokens is None else tokens
    windows: list[Ids] = []
    for start in range(0, len(body), step):
        taken = (head + body[start : start + step])[:remaining]
        if len(taken) < 2 or (windows and len(taken) < MIN_WINDOW):
            break
        windows.append(np.asarray(taken, np.int64))
        remaining -= len(taken)
    if not windows:
        raise InputError(f"the text has {len(body)} tokens; a comparison needs at least 2")
    return tuple(windows)


def read_text(path: pathlib.Path) -> str:
    """A text file's content.

    Raises:
        InputError: It cannot be read, is no UTF-8, or is empty.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give a text file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from error
    if not text.strip():
        raise InputError(f"{path} is empty; give a text of some thousand words")
    return text


def read_prompts(path: pathlib.Path) -> list[str | list[dict[str, str]]]:
    """The prompts of a JSON-lines file: a conversation (list of messages) or a plain text each.

    A line has ``messages`` (taken whole), ``prompt`` or ``turns`` (one user message: the first turn), or ``text``
    (taken without the chat template), looked for in this order.

    Raises:
        InputError: A line is no JSON object or has none of these fields; the message names file and line.
    """
    prompts: list[str | list[dict[str, str]]] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            prompts.append(_prompt(line, f"{path}:{number}"))
    return prompts


def _prompt(line: str, where: str) -> str | list[dict[str, str]]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: no JSON ({error.msg}); each line must be one JSON object") from error
    if isinstance(record, dict):
        messages, turns = record.get("messages"), record.get("turns")
        if _is_conversation(messages):
            return list(messages)
        first = record.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
        if isinstance(first, str) and first:
            return [{"role": "user", "content": first}]
        text = record.get("text")
        if isinstance(text, str) and text:
            return text
    raise InputError(
        f"{where}: needs 'prompt' or 'text' (text), 'turns' (list of texts) or 'messages' (list of role and content)"
    )


def _is_conversation(messages: object) -> TypeGuard[list[dict[str, str]]]:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)
    )


def encode_prompt(tokenizer: TokenizerLike, prompt: str | list[dict[str, str]]) -> list[int]:
    """Ids of a prompt; a conversation goes through the chat template, or is joined where the model has none."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    if tokenizer.chat is None:
        return list(tokenizer.encode("\n".join(message["content"] for message in prompt)))
    return list(tokenizer.encode_chat(prompt))


def load_text(
    tokenizer: TokenizerLike | None,
    *,
    text: pathlib.Path | None = None,
    prompts: pathlib.Path | None = None,
    window: int = 1024,
    tokens: int | None = None,
    bos_token_id: int | None = None,
    generation_prompts: int = len(DEFAULT_PROMPTS),
) -> CompareText:
    """Windows to compare on and prompts to continue.

    Args:
        tokenizer: The bundle's.
        text: A text file, cut into windows; None for the text that ships, unless ``prompts`` is given.
        prompts: A JSON-lines file; each prompt is a window, cut to ``window`` tokens, and the first are continued.
        window: Tokens a window.
        tokens: Tokens in all; None for everything there is.
        bos_token_id: The beginning-of-sequence id, repeated in each window if the text's ids begin with it.
        generation_prompts: How many prompts to continue.

    Raises:
        InputError: Both files are given, one cannot be used, or there is no tokenizer.
    """
    if text is not None and prompts is not None:
        raise InputError("--text and --prompts exclude each other; give one")
    if tokenizer is None:
        raise InputError("this bundle has no tokenizer, so no text can be compared on; pass token ids in Python")
    if prompts is None:
        content = default_text() if text is None else read_text(text)
        windows = cut_windows(tokenizer.encode(content), window=window, tokens=tokens, bos_token_id=bos_token_id)
        source = "the text that ships with specexport" if text is None else str(text)
        texts: list[str | list[dict[str, str]]] = [[{"role": "user", "content": p}] for p in DEFAULT_PROMPTS]
    else:
        texts = read_prompts(prompts)
        source = str(prompts)
        windows = _prompt_windows(tokenizer, texts, window, tokens)
        if not windows:
            raise InputError(f"{prompts}: no prompt has 2 tokens or more; a comparison needs some")
    chosen = texts[: max(0, generation_prompts)]
    encoded = (np.asarray(encode_prompt(tokenizer, prompt), np.int64) for prompt in chosen)
    return CompareText(source, windows, tuple(ids for ids in encoded if len(ids)))


def _prompt_windows(
    tokenizer: TokenizerLike, texts: Sequence[str | list[dict[str, str]]], window: int, tokens: int | None
) -> tuple[Ids, ...]:
    windows: list[Ids] = []
    total = 0
    for prompt in texts:
        left = window if tokens is None else min(window, tokens - total)
        ids = np.asarray(encode_prompt(tokenizer, prompt)[:left], np.int64)
        if left < 2:
            break
        if len(ids) >= 2:
            windows.append(ids)
            total += len(ids)
    return tuple(windows)
