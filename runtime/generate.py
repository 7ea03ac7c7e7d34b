"""The generation loop: rounds until an end-of-sequence id, a stop string, or the limit."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from specexport.plugins.errors import InputError
from specexport.runtime.cache_pool import CachePool
from specexport.runtime.decode import Decoder
from specexport.runtime.drafts.base import Draft
from specexport.runtime.engine import Model
from specexport.runtime.metrics import Metrics
from specexport.runtime.request import Request
from specexport.runtime.sampler import Sampler
from specexport.runtime.text import Decode, TextStream


@dataclasses.dataclass(frozen=True)
class Output:
    """One generation.

    Attributes:
        text: The new tokens' text without special tokens; ends before a stop string.
        token_ids: The new tokens, an end-of-sequence id or those of a stop string included.
        finish_reason: "eos" (an end-of-sequence id), "stop" (a stop string) or "length" (max_new_tokens, or the
            end of the context).
        metrics: Counters and times.
        seed: What was, or could be, passed as ``seed`` to repeat a sampled output.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    metrics: Metrics
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON."""
        return {**dataclasses.asdict(self), "metrics": self.metrics.to_json()}


class Generator:
    """Runs requests on a target, and on a draft if there is one."""

    def __init__(self, target: Model, draft: Draft | None, vocab_size: int, decode: Decode | None) -> None:
        """``vocab_size`` bounds the ids that may come out; ``decode`` gives their text (None: no text)."""
        self._target = target
        self._draft = draft
        self._vocab_size = vocab_size
        self._decode = decode
        self._caches = CachePool(target)

    def run(self, request: Request) -> Output:
        """Generate; afterwards, even after an error, the next request may follow."""
        if self._decode is None and (request.stop or request.stream):
            raise InputError("stop and stream need a tokenizer, and this bundle has none")
        metrics = Metrics(prompt_tokens=len(request.prompt))
        if request.limit == 0:
            return Output("", [], "length", metrics, request.seed)
        stream = None
        if self._decode is not None and (request.stop or request.stream):
            stream = TextStream(self._decode, request.stop, request.stream)
        with self._decoder(request) as (decoder, sampler):
            sequence = _Sequence(request, sampler, stream)
            start = time.perf_counter()
            first = decoder.prefill(request.prompt)
            sequence.commit((first,))
            metrics.new_tokens = 1
            metrics.prefill_s = time.perf_counter() - start
            begin = now = time.perf_counter()
            while sequence.finish_reason is None:
                result = decoder.round(sequence.tokens, min(request.num_assistant_tokens, sequence.room - 1))
                kept = sequence.commit(result.tokens)
                metrics.count_step(drafted=result.drafted, accepted=result.accepted, kept=kept)
                before, now = now, time.perf_counter()
                metrics.draft_ms.append(result.draft_s * 1e3)
                metrics.verify_ms.append(result.verify_s * 1e3)
                metrics.host_ms.append((now - before - result.draft_s - result.verify_s) * 1e3)
            metrics.decode_s = now - begin
        return self._output(request, sequence, stream, metrics)

    @contextlib.contextmanager
    def _decoder(self, request: Request) -> Iterator[tuple[Decoder, Sampler]]:
        """Sampler, caches and draft of one sequence; the caches go back whatever happens."""
        sampler = Sampler(request.sampling, request.seed, self._vocab_size)
        cache = self._caches.acquire()
        proposer = None
        try:
            if self._draft is not None and request.num_assistant_tokens:
                proposer = self._draft.start(sampler, do_sample=request.assistant_do_sample)
            yield Decoder(self._target, cache, sampler, proposer), sampler
        finally:
            if proposer is not None:
                proposer.close()
            self._caches.release(cache)

    def _output(self, request: Request, sequence: _Sequence, stream: TextStream | None, metrics: Metrics) -> Output:
        new = sequence.tokens[len(request.prompt) :]
        assert sequence.finish_reason is not None
        if stream is not None:
            stream.finish(stopped=sequence.finish_reason == "stop")
            text = stream.text
        else:
            text = self._decode(new) if self._decode is not None else ""
        return Output(text, new, sequence.finish_reason, metrics, request.seed)


class _Sequence:
    """The committed tokens, and whether they have come to an end."""

    def __init__(self, request: Request, sampler: Sampler, stream: TextStream | None) -> None:
        self.tokens = list(request.prompt)
        self.room = request.limit
        self.finish_reason: str | None = None
        self._eos = request.eos_token_ids
        self._sampler = sampler
        self._stream = stream

    def commit(self, tokens: tuple[int, ...]) -> int:
        """Take tokens up to the first that ends the output; how many were taken."""
        kept = 0
        for token in tokens:
            kept += 1
            self.tokens.append(token)
            if self._stream is not None and self._stream.push(token):
                self.finish_reason = "stop"
            elif token in self._eos:
                self.finish_reason = "eos"
            elif kept == self.room:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        self.room -= kept
        self._sampler.commit(tokens[:kept])
        return kept
