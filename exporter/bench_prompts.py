"""The prompts that a benchmark continues, each with its category."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import pathlib
from typing import Any

from specexport.exporter.compare_text import encode_prompt, read_prompts
from specexport.plugins.errors import InputError


@dataclasses.dataclass(frozen=True)
class BenchPrompt:
    """Token ids, and what kind of prompt they are."""

    category: str
    ids: tuple[int, ...]


def load_prompts(
    tokenizer: Any, path: pathlib.Path | None = None, *, count: int | None = None, longest: int = 1024
) -> list[BenchPrompt]:
    """Prompts of a JSON-lines file, or those that ship.

    Args:
        tokenizer: The bundle's.
        path: A file as `specexport compare --prompts` takes it; a line's ``category`` groups the figures.
        count: How many, spread over the file; None for all.
        longest: Tokens of a prompt; of a longer one the last are taken.

    Raises:
        InputError: The file cannot be used.
    """
    if path is None:
        shipped = importlib.resources.files("specexport.exporter").joinpath("bench_prompts.jsonl")
        with importlib.resources.as_file(shipped) as file:
            return load_prompts(tokenizer, file, count=count, longest=longest)
    texts = read_prompts(path)
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    if not texts:
        raise InputError(f"{path}: holds no prompt")
    every = list(zip(texts, (str(line.get("category", "all")) for line in lines)))
    if count is not None and count < len(every):
        every = [every[index * len(every) // count] for index in range(count)]
    prompts = [BenchPrompt(category, tuple(encode_prompt(tokenizer, text)[-longest:])) for text, category in every]
    return [prompt for prompt in prompts if prompt.ids]
