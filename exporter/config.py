"""What a build is told: one frozen dataclass, kept whole in the manifest."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

from specexport.exporter.activations import ActivationPrecision, parse_activations
from specexport.exporter.draft.specification import DraftSpecification, parse_draft
from specexport.plugins.errors import InputError

if TYPE_CHECKING:
    from specexport.exporter.recipe import Recipe

WEIGHTS = ("auto", "fp32", "int8", "int4")
CACHE_DTYPES = ("auto", "int8", "f16")
WEIGHT_GROUPS = (32, 64, 128)
DEFAULT_CACHE_GROUP = 64
DEFAULT_DRAFT = "ngram"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """The whole configuration of one build.

    Attributes:
        model: Hub id, local directory, GGUF file or recipe name.
        output: Directory of the bundle; must not exist unless ``force``.
        draft: ``none``, ``ngram``, ``layers:N`` or another model; None is the recipe's, else ``ngram``.
        weights: ``auto`` keeps blocks that the source has quantized already exactly as they are, and takes int8
            in symmetric groups for everything else; ``int4`` has a minimum in each group.
        group_size: Input channels that share one scale, where we quantize.
        activations: Inside the kernels: ``int8`` in groups of 32, ``int16`` (two int8 planes in groups of 32, about 15
            bits), or ``fp32``. ``auto:KL`` measures what int8 costs in each matrix and keeps int16 where it costs most,
            so that the mean KL against int16 everywhere is at most this; ``auto`` is ``auto:0.0005``.
        key_cache_dtype: Keys in the cache; ``auto`` is int8 with int8 activations and f16 otherwise, None is the
            recipe's, else ``auto``.
        value_cache_dtype: Values in the cache, likewise.
        kv_group_size: Channels of a head that share one scale in the cache, at most; what does not divide the head is
            cut to what does. None is the recipe's, else 64.
        context_length: Hard maximum of positions; None is the model's own, but at most 8192.
        num_assistant_tokens: Tokens to draft a round unless a request says otherwise.
        compare_tokens: Tokens of the comparison that ends the build; 0 leaves it out, and the manifest says so.
        fail_if: Gates of that comparison, in place of the recipe's.
    """

    model: str
    output: pathlib.Path
    draft: str | None = None
    weights: str = "auto"
    group_size: int = 32
    activations: str = "int8"
    key_cache_dtype: str | None = None
    value_cache_dtype: str | None = None
    kv_group_size: int | None = None
    context_length: int | None = None
    num_assistant_tokens: int = 4
    compare_tokens: int = 1024
    fail_if: tuple[str, ...] = ()
    revision: str | None = None
    cache_dir: pathlib.Path | None = None
    offline: bool = False
    trust_remote_code: bool = False
    force: bool = False
    dump_passes: pathlib.Path | None = None

    def __post_init__(self) -> None:
        """Refuse what no build could honour, before anything is read."""
        _one_of("--weights", self.weights, WEIGHTS)
        parse_activations(self.activations)
        _one_of("--key-cache-dtype", self.key_cache_dtype, (None, *CACHE_DTYPES))
        _one_of("--value-cache-dtype", self.value_cache_dtype, (None, *CACHE_DTYPES))
        _one_of("--group-size", self.group_size, WEIGHT_GROUPS)
        _within("--kv-group-size", self.kv_group_size, 8, 256)
        _within("--context-length", self.context_length, 2, None)
        _within("--num-assistant-tokens", self.num_assistant_tokens, 0, 64)
        _within("--compare-tokens", self.compare_tokens, 0, None)

    def resolved(self, recipe: Recipe | None) -> BuildConfig:
        """The same with everything that was left open filled in: from the recipe where it says, else the defaults."""
        return dataclasses.replace(
            self,
            draft=self.draft or (recipe and recipe.draft) or DEFAULT_DRAFT,
            key_cache_dtype=self.key_cache_dtype or (recipe and recipe.key_cache_dtype) or "auto",
            value_cache_dtype=self.value_cache_dtype or (recipe and recipe.value_cache_dtype) or "auto",
            kv_group_size=self.kv_group_size or (recipe and recipe.kv_group_size) or DEFAULT_CACHE_GROUP,
            fail_if=self.fail_if or (recipe.gates if recipe else ()),
        )

    @property
    def activation_precision(self) -> ActivationPrecision:
        """What ``activations`` says."""
        return parse_activations(self.activations)

    @property
    def key_bits(self) -> int:
        """Bits of a key in the cache: 8 or 16."""
        return self._cache_bits(self.key_cache_dtype)

    @property
    def value_bits(self) -> int:
        """Bits of a value in the cache: 8 or 16."""
        return self._cache_bits(self.value_cache_dtype)

    @property
    def draft_specification(self) -> DraftSpecification:
        """What ``draft`` says.

        Raises:
            InputError: It says nothing that can be.
        """
        return parse_draft(self.draft or DEFAULT_DRAFT)

    @property
    def cache_group_size(self) -> int:
        """Channels of a head that share one scale in the cache, at most."""
        return self.kv_group_size or DEFAULT_CACHE_GROUP

    def to_json(self) -> dict[str, Any]:
        """The configuration for the manifest, paths as text."""
        fields = dataclasses.asdict(self)
        return {
            name: str(value) if isinstance(value, pathlib.Path) else list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
        }

    def _cache_bits(self, dtype: str | None) -> int:
        if dtype in (None, "auto"):
            return 8 if self.activations == "int8" else 16
        return 8 if dtype == "int8" else 16


def _one_of(option: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{option} is {value!r}; it can be {', '.join(map(str, allowed))}")


def _within(option: str, value: int | None, low: int, high: int | None) -> None:
    if value is not None and (value < low or (high is not None and value > high)):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InputError(f"{option} is {value}; it must be {limit}")
