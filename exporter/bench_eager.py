"""Eager Transformers as a contestant: the model that a bundle was built from, greedy, with a cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from specexport.exporter.bench_generation import Generated

DTYPES = {"eager-fp32": "float32", "eager-bf16": "bfloat16"}


class EagerContestant:
    """One model in one dtype."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    def generate(self, ids: Sequence[int], new: int) -> Generated:
        """Continue greedily; only the last row's logits are made."""
        import torch

        with torch.inference_mode():
            start = time.perf_counter()
            output = self._model(torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1)
            tokens = [int(output.logits[0, -1].argmax())]
            first = time.perf_counter()
            while len(tokens) < new:
                output = self._model(
                    torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True
                )
                tokens.append(int(output.logits[0, -1].argmax()))
            return Generated(tokens, first - start, time.perf_counter() - first)


def eager_contestants(pair: Any, names: Sequence[str], threads: int, **fetch: Any) -> dict[str, EagerContestant]:
    """The source of ``pair``'s target in each of ``names`` (keys of DTYPES), on as many threads as our kernels use.

    Raises:
        InputError: What the bundle was built from cannot be had.
    """
    import copy

    import torch

    from specexport.exporter.compare_source import built_from, load

    torch.set_num_threads(threads)
    manifest = pair.manifest
    model = load(built_from(manifest.target.model, manifest.build.get("model"), **fetch))
    copies = [model if name == names[-1] else copy.deepcopy(model) for name in names]
    return {name: EagerContestant(one.to(getattr(torch, DTYPES[name]))) for name, one in zip(names, copies)}
