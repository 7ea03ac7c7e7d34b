"""What a caller asks for, checked, over the defaults of generation_config.json."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from specexport.plugins.errors import InputError
from specexport.runtime.noise import fresh_seed
from specexport.runtime.sampling import SamplingSettings

logger = logging.getLogger(__name__)

DEFAULT_MAX_NEW_TOKENS = 256

# What Transformers takes where neither the model nor the caller says otherwise.
TRANSFORMERS_DEFAULTS: Mapping[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p")

# Keys of generation_config.json that change the output and are not implemented, with the values that switch them off.
NOT_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "top_h": (None,),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1, 1.0),
    "sequence_bias": (None, []),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "exponential_decay_length_penalty": (None,),
}


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json sets: values of TRANSFORMERS_DEFAULTS' keys, and the two limits."""

    values: Mapping[str, Any]
    max_new_tokens: int | None = None
    max_length: int | None = None

    @classmethod
    def read(cls, path: pathlib.Path | None) -> GenerationDefaults:
        """From the file, or Transformers' own defaults without one.

        Raises:
            InputError: It is no JSON object, or a value has the wrong type.
        """
        if path is None:
            return cls(TRANSFORMERS_DEFAULTS)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read as JSON: {error}") from None
        if not isinstance(data, dict):
            raise InputError(f"{path}: holds no JSON object")
        ignored = [key for key, off in NOT_IMPLEMENTED.items() if data.get(key) not in off]
        if ignored:
            logger.warning("%s: not implemented and ignored: %s", path, ", ".join(ignored))
        values = {key: data[key] for key in TRANSFORMERS_DEFAULTS if data.get(key) is not None}
        limits = {key: data.get(key) for key in ("max_new_tokens", "max_length")}
        for key, value in {**values, **limits}.items():
            if isinstance(value, str | list | dict):
                raise InputError(f"{path}: {key} is {value!r}, expected a number")
        return cls({**TRANSFORMERS_DEFAULTS, **values}, **limits)


@dataclasses.dataclass(frozen=True)
class Request:
    """One generation, every choice made.

    Attributes:
        prompt: Token ids, at least one.
        limit: New tokens at most: what was asked for, or less where the context ends.
        sampling: How tokens are chosen.
        seed: Fixes every random number.
        num_assistant_tokens: Drafted tokens per step; 0 decodes plainly.
        assistant_do_sample: Whether a model draft draws from its distributions or proposes its likeliest tokens.
        eos_token_ids: Ids that end the output; empty under ignore_eos.
        stop: Strings that end the output.
        stream: Called with each piece of text.
    """

    prompt: tuple[int, ...]
    limit: int
    sampling: SamplingSettings
    seed: int
    num_assistant_tokens: int
    assistant_do_sample: bool
    eos_token_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    stream: Callable[[str], object] | None = None


def sampling_settings(defaults: GenerationDefaults, **given: Any) -> SamplingSettings:
    """Settings from what was given (None: not given) over the defaults.

    Raises:
        InputError: A value is out of range, or is given but has no effect on greedy decoding.
    """
    explicit = {key: value for key, value in given.items() if value is not None}
    values = {**defaults.values, **explicit}
    if not values["do_sample"]:
        idle = [key for key in SAMPLING_ONLY if explicit.get(key) not in (None, TRANSFORMERS_DEFAULTS[key])]
        if idle:
            raise InputError(f"{', '.join(idle)} has no effect on greedy decoding; pass do_sample=True as well")
        values.update({key: TRANSFORMERS_DEFAULTS[key] for key in SAMPLING_ONLY})
    for key in values.keys() - {"do_sample"}:
        number = values[key]
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise InputError(f"{key} must be a number; got {number!r}")
    if values["top_k"] != int(values["top_k"]):
        raise InputError(f"top_k must be a whole number; got {values['top_k']}")
    return SamplingSettings(**{**values, "top_k": int(values["top_k"]), "do_sample": bool(values["do_sample"])})


def token_limit(defaults: GenerationDefaults, max_new_tokens: int | None, prompt: int, context_length: int) -> int:
    """New tokens at most.

    Raises:
        InputError: ``max_new_tokens`` is negative, or the prompt leaves no room in the context.
    """
    if max_new_tokens is None:
        max_new_tokens = defaults.max_new_tokens
    if max_new_tokens is None and defaults.max_length:
        max_new_tokens = max(defaults.max_length - prompt, 0)
    if max_new_tokens is None:
        max_new_tokens = DEFAULT_MAX_NEW_TOKENS
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens must be at least 0; got {max_new_tokens}")
    if prompt >= context_length:
        raise InputError(
            f"the prompt has {prompt} tokens; the model's context of {context_length} has no room for it and a new "
            "token: shorten the prompt"
        )
    return min(max_new_tokens, context_length - prompt)


def stop_strings(stop: str | list[str] | tuple[str, ...] | None) -> tuple[str, ...]:
    """The stop strings as a tuple.

    Raises:
        InputError: One is empty or no string.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not isinstance(text, str) or not text:
            raise InputError(f"stop must be strings of at least one character; got {text!r}")
    return stops


def seed_of(seed: int | None) -> int:
    """The seed itself, or a fresh one.

    Raises:
        InputError: It is not within 0 and 2**64 - 1.
    """
    if seed is None:
        return fresh_seed()
    if not 0 <= seed < 2**64:
        raise InputError(f"seed must be from 0 to 2**64 - 1; got {seed}")
    return int(seed)
