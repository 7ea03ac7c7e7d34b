"""Do target and draft speak of the same tokens? Compared id by id; a padded tail is masked, all else refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from specexport.exporter.tokenizer_files import vocabulary
from specexport.plugins.errors import InputError

_ENCODING_PARTS = ("normalizer", "pre_tokenizer", "merges")


class ContractError(InputError):
    """Target and draft do not fit each other."""


@dataclasses.dataclass(frozen=True)
class Contract:
    """What a pair agrees on.

    Attributes:
        vocab_size: Ids below it are known to both engines and may be emitted.
        target_vocab_size: Rows of the target's logits.
        draft_vocab_size: Rows of the draft's logits; the target's where the draft has no model of its own.
        masked_tail: Ids that only the larger of the two has: padding rows, never emitted.
        notes: Differences that are allowed, for people.
    """

    vocab_size: int
    target_vocab_size: int
    draft_vocab_size: int
    masked_tail: int
    notes: tuple[str, ...] = ()


def reconcile(
    target_tokenizer: str,
    draft_tokenizer: str | None,
    target_vocab_size: int,
    draft_vocab_size: int | None = None,
) -> Contract:
    """Compare two tokenizers and the sizes of two output heads.

    Args:
        target_tokenizer: Text of the target's ``tokenizer.json``.
        draft_tokenizer: Text of the draft's; None where the draft is made from the target or needs no model.
        target_vocab_size: Rows of the target's output head.
        draft_vocab_size: Rows of the draft's; None like ``draft_tokenizer``.

    Raises:
        ContractError: An id means different tokens, or an engine has no row for a token; names the first such id.
    """
    target = json.loads(target_tokenizer)
    tokens = vocabulary(target)
    _within("target", tokens, target_vocab_size)
    if draft_tokenizer is None or draft_vocab_size is None:
        return Contract(target_vocab_size, target_vocab_size, target_vocab_size, 0)
    draft = json.loads(draft_tokenizer)
    drafted = vocabulary(draft)
    notes = compare_vocabularies(tokens, drafted)
    _within("draft", tokens, draft_vocab_size)
    size = min(target_vocab_size, draft_vocab_size)
    masked = max(target_vocab_size, draft_vocab_size) - size
    if masked:
        larger = "target" if target_vocab_size > draft_vocab_size else "draft"
        notes.append(f"ids {size} to {size + masked - 1} are padding of the {larger}; they are masked")
    for part in _ENCODING_PARTS:
        if _part(target, part) != _part(draft, part):
            notes.append(f"the draft's tokenizer has another {part}; text is always encoded with the target's")
    return Contract(size, target_vocab_size, draft_vocab_size, masked, tuple(notes))


def compare_vocabularies(target: Mapping[int, str], draft: Mapping[int, str]) -> list[str]:
    """Compare token by token; returns notes on tokens that only one of them has, past the other's last.

    Raises:
        ContractError: The first id that differs, with both tokens.
    """
    last = min(max(target, default=-1), max(draft, default=-1))
    for number in range(last + 1):
        ours, theirs = target.get(number), draft.get(number)
        if ours != theirs:
            raise ContractError(
                f"target and draft have different vocabularies: id {number} is {_shown(ours)} in the target and "
                f"{_shown(theirs)} in the draft; a draft must have the target's tokenizer"
            )
    notes = []
    for more, name, other in ((target, "target", "draft"), (draft, "draft", "target")):
        if extra := sorted(number for number in more if number > last):
            notes.append(f"only the {name} has tokens {extra[0]} to {extra[-1]}; the {other} knows them as padding")
    return notes


def _within(name: str, tokens: Mapping[int, str], rows: int) -> None:
    if outside := sorted(number for number in tokens if number >= rows):
        raise ContractError(
            f"the tokenizer has id {outside[0]} ({_shown(tokens[outside[0]])}), but the {name}'s output head has only "
            f"{rows} rows; take the tokenizer or the {name} that belongs to it"
        )


def _part(tokenizer: dict[str, Any], part: str) -> Any:
    if part != "merges":
        return tokenizer.get(part)
    # Older files write a merge as one text, newer ones as a pair.
    merges = tokenizer.get("model", {}).get("merges") or []
    return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
