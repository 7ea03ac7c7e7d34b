"""What ``--draft`` may say."""

from __future__ import annotations

import dataclasses
import re

from specexport.plugins.errors import InputError


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Plain decoding only."""


@dataclasses.dataclass(frozen=True)
class NgramDraft:
    """Prompt lookup: the continuation of the latest occurrence of the last tokens; costs nothing.

    Attributes:
        max_ngram_size: Tokens to match at most; shorter matches are tried after.
    """

    max_ngram_size: int = 3


@dataclasses.dataclass(frozen=True)
class LayersDraft:
    """The target's first layers with its own norm and output head, weights shared."""

    layers: int


@dataclasses.dataclass(frozen=True)
class ModelDraft:
    """Another model of the same tokenizer: whatever ``resolve`` takes."""

    model: str


DraftSpecification = NoDraft | NgramDraft | LayersDraft | ModelDraft


def parse_draft(text: str) -> DraftSpecification:
    """Read ``none``, ``ngram``, ``layers:N``, or else a model.

    Raises:
        InputError: Empty, or a number of layers that is none.
    """
    text = text.strip()
    if text in ("none", "ngram"):
        return NoDraft() if text == "none" else NgramDraft()
    if text.startswith("layers:") or text == "layers":
        number = re.fullmatch(r"layers:([1-9][0-9]*)", text)
        if number is None:
            raise InputError(f"--draft {text}: layers:N takes the number of the target's first layers, as in layers:6")
        return LayersDraft(int(number[1]))
    if not text:
        raise InputError("--draft is empty; it can be none, ngram, layers:N, or a model")
    return ModelDraft(text)


def check_layers(draft: LayersDraft, num_hidden_layers: int) -> None:
    """Refuse a draft that is the whole target or more.

    Raises:
        InputError: ``layers`` is not below the target's.
    """
    if not 1 <= draft.layers < num_hidden_layers:
        raise InputError(
            f"--draft layers:{draft.layers}: the target has {num_hidden_layers} layers; "
            f"take 1 to {num_hidden_layers - 1}"
        )
