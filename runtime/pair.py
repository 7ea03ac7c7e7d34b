"""A loaded bundle: target, draft, tokenizer, and `generate`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from specexport.plugins.errors import InputError
from specexport.runtime.bundle import Bundle, open_bundle
from specexport.runtime.drafts.base import Draft
from specexport.runtime.drafts.model import ModelDraft
from specexport.runtime.drafts.ngram import NgramDraft
from specexport.runtime.engine import Engine, Model
from specexport.runtime.generate import Generator, Output
from specexport.runtime.manifest import DraftEntry, EngineEntry, Manifest
from specexport.runtime.native import set_num_threads
from specexport.runtime.request import (
    GenerationDefaults,
    Request,
    sampling_settings,
    seed_of,
    stop_strings,
    token_limit,
)
from specexport.runtime.tokenizer import Messages, Tokenizer

Prompt = str | Sequence[int] | Messages

BACKEND = "cpu"


class Pair:
    """Target and draft that fit each other.

    Attributes:
        target: The engine whose distribution the output follows.
        draft: A ModelDraft (its engine: ``draft.engine``), an NgramDraft, or None.
        tokenizer: None if the bundle has none.
        manifest: What the bundle says of itself.
    """

    def __init__(
        self,
        target: Model,
        draft: Draft | None,
        manifest: Manifest,
        *,
        tokenizer: Tokenizer | None = None,
        defaults: GenerationDefaults | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.tokenizer = tokenizer
        self.manifest = manifest
        self._defaults = defaults or GenerationDefaults.read(None)
        decode = tokenizer.decode if tokenizer is not None else None
        self._generator = Generator(target, draft, manifest.contract.vocab_size, decode)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        num_assistant_tokens: int | None = None,
        assistant_do_sample: bool | None = None,
        ignore_eos: bool = False,
        stop: str | list[str] | tuple[str, ...] | None = None,
        stream: Callable[[str], object] | None = None,
    ) -> Output:
        """Continue ``prompt``. What is None comes from generation_config.json, else as in Transformers.

        The output follows the target's distribution exactly whatever the draft; greedy output, and output sampled
        with one-hot drafts, is token for token what ``num_assistant_tokens=0`` gives for the same seed.

        Args:
            prompt: Text, token ids, or chat messages ({"role": ..., "content": ...}).
            max_new_tokens: 0 gives an empty output. Default 256. The end of the context ends the output, too.
            do_sample: Draw from the distribution, else take the likeliest token.
            temperature: As in Transformers, like ``top_k`` (default 50; 0: off), ``top_p`` and ``min_p``.
            top_k: See ``temperature``.
            top_p: See ``temperature``.
            min_p: See ``temperature``.
            repetition_penalty: As in Transformers; acts on greedy decoding as well.
            seed: 0 to 2**64 - 1. Default: a fresh one, given back in the output.
            num_assistant_tokens: Drafted tokens per step; 0 decodes plainly. Default: the bundle's.
            assistant_do_sample: A model draft draws its tokens (the default when sampling) or takes the likeliest.
            ignore_eos: Go on after an end-of-sequence id.
            stop: Strings that end the output; the text ends before them.
            stream: Called with each new piece of text; the pieces joined are ``text``.

        Raises:
            InputError: The prompt is empty, too long or has unknown ids, or an option is out of range.
            LogitsError: A model returned NaN or infinity.
        """
        ids = self._prompt_ids(prompt)
        sampling = sampling_settings(
            self._defaults,
            do_sample=do_sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )
        return self._generator.run(
            Request(
                prompt=ids,
                limit=token_limit(self._defaults, max_new_tokens, len(ids), self.target.context_length),
                sampling=sampling,
                seed=seed_of(seed),
                num_assistant_tokens=self._assistant_tokens(num_assistant_tokens),
                assistant_do_sample=sampling.do_sample and assistant_do_sample is not False,
                eos_token_ids=frozenset() if ignore_eos else frozenset(self.manifest.tokens.eos_token_ids),
                stop=stop_strings(stop),
                stream=stream,
            )
        )

    def _assistant_tokens(self, count: int | None) -> int:
        if count is None:
            return self.manifest.draft.num_assistant_tokens if self.manifest.draft is not None else 0
        if count < 0:
            raise InputError(f"num_assistant_tokens must be at least 0; got {count}")
        if count and self.draft is None:
            raise InputError(f"num_assistant_tokens is {count}, but this bundle was built without a draft")
        return count

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of any kind of prompt."""
        if isinstance(prompt, str):
            ids = self._need_tokenizer().encode(prompt)
        elif len(prompt) and isinstance(prompt[0], Mapping):
            ids = self._need_tokenizer().encode_chat(cast(Messages, prompt))
        else:
            ids = _integers(prompt)
        if not ids:
            raise InputError("the prompt is empty; it needs at least one token")
        size = self.manifest.contract.vocab_size
        for at, token in enumerate(ids):
            if not 0 <= token < size:
                raise InputError(f"the prompt's token {at} is {token}; ids go from 0 to {size - 1}")
        return tuple(ids)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError("this bundle has no tokenizer; pass the prompt as token ids")
        return self.tokenizer


def _integers(prompt: object) -> list[int]:
    array = np.asarray(prompt)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError("the prompt must be text, a flat list of token ids, or a list of chat messages")
    ids: list[int] = array.tolist()
    return ids


def load(
    directory: str | os.PathLike[str],
    *,
    num_threads: int | None = None,
    verify: bool = True,
    allow_failed: bool = False,
) -> Pair:
    """Load the bundle that `specexport build` made.

    Args:
        directory: The bundle.
        num_threads: Threads of the kernels, for the whole process. Default: all that the process may use.
        verify: Hash every file first.
        allow_failed: Load a bundle whose accuracy gate failed.

    Raises:
        ManifestError: The directory is not what its manifest says.
        EngineError: ONNX Runtime refuses an engine.
        NativeLibraryError: The custom-op library is missing.
        TokenizerError, ChatTemplateError: Those files cannot be used.
    """
    bundle = open_bundle(directory, verify=verify, allow_failed=allow_failed, backend=BACKEND)
    manifest = bundle.manifest
    set_num_threads(num_threads)
    defaults = bundle.path("generation_config.json") if bundle.has("generation_config.json") else None
    return Pair(
        _open_engine(bundle, manifest.target),
        _open_draft(bundle, manifest.draft),
        manifest,
        tokenizer=Tokenizer.load(bundle),
        defaults=GenerationDefaults.read(defaults),
    )


def _open_engine(bundle: Bundle, entry: EngineEntry) -> Engine:
    return Engine(bundle.path(entry.engines[BACKEND].file), entry)


def _open_draft(bundle: Bundle, entry: DraftEntry | None) -> Draft | None:
    if entry is None:
        return None
    if entry.engine is not None:
        return ModelDraft(_open_engine(bundle, entry.engine))
    return NgramDraft(entry.max_ngram_size or 3)
