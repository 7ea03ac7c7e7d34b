"""QuantizedKVAttention: attention over a growing, quantized key and value cache that it appends to itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from specexport.plugins.op import OpSpec

SPEC = OpSpec(
    name="QuantizedKVAttention",
    version=1,
    reference="specexport.plugins.quantized_kv_attention.reference",
    kernels={"cpu": "plugins/quantized_kv_attention/cpu.cc"},
)

INPUTS = (
    "qkv",  # float [B, S, (Hq + 2 Hkv) D]: q heads, k heads, v heads, before norm and RoPE
    "key_cache",  # float16 [B, Hkv, C, D], or int8 with key_scale
    "key_scale",  # optional, float16 [B, Hkv, C, D / key_group_size]
    "value_cache",  # as key_cache
    "value_scale",  # optional, as key_scale
    "past_length",  # int64 [B]: cache rows that hold tokens already
    "query_length",  # int64 [B]: of the S rows, how many count
    "cos",  # optional, float [P, R / 2], R <= D even: RoPE turns the first R channels of a head
    "sin",  # optional, as cos
    "q_norm_weight",  # optional, float [D]: per-head RMS norm of q
    "k_norm_weight",  # optional, float [D]
    "sinks",  # optional, float [Hq]: one further logit in the softmax's denominator
)
"""Names of the inputs by position."""

OUTPUTS = (
    "y",  # float [B, S, Hq D]; rows s >= query_length are 0
    "key_cache_out",
    "key_scale_out",  # optional: absent at 16 bits
    "value_cache_out",
    "value_scale_out",  # optional: absent at 16 bits
)
"""Names of the outputs by position. The cache outputs may be the input buffers themselves."""

CACHE_BITS = (16, 8)
MAX_HEAD_DIM = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedKVAttentionAttributes:
    """The attributes of one node, checked.

    Attributes:
        q_num_heads: Hq, a multiple of kv_num_heads.
        kv_num_heads: Hkv.
        scale: Factor on q k before the softmax.
        softcap: Scores become tanh(score / softcap) softcap; 0 is none.
        window: A row at position p attends positions p - window + 1 to p; 0 is all.
        rotary_interleaved: 0 turns channels d and d + R / 2 together, 1 turns 2 i and 2 i + 1.
        norm_epsilon: Of the q and k norms.
        key_bits: 16 (float16) or 8 (int8 and one float16 scale a group).
        value_bits: As key_bits.
        key_group_size: Channels that share a scale, a multiple of 8 that divides D; 0 at 16 bits.
        value_group_size: As key_group_size.

    Raises:
        ValueError: A value that the op does not have.
    """

    q_num_heads: int
    kv_num_heads: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    rotary_interleaved: int = 0
    norm_epsilon: float = 1e-6
    key_bits: int = 8
    value_bits: int = 8
    key_group_size: int = 64
    value_group_size: int = 64

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            bits, group_size = getattr(self, f"{name}_bits"), getattr(self, f"{name}_group_size")
            if bits not in CACHE_BITS:
                raise ValueError(f"{name}_bits must be one of {CACHE_BITS}, is {bits}")
            if bits == 8 and (group_size < 8 or group_size % 8):
                raise ValueError(f"{name}_group_size must be a positive multiple of 8, is {group_size}")
        if self.kv_num_heads < 1 or self.q_num_heads < 1 or self.q_num_heads % self.kv_num_heads:
            raise ValueError(
                f"q_num_heads must be a multiple of kv_num_heads, is {self.q_num_heads} of {self.kv_num_heads}"
            )
        if self.window < 0 or self.softcap < 0:
            raise ValueError(f"window and softcap must not be negative, are {self.window} and {self.softcap}")
        if self.rotary_interleaved not in (0, 1):
            raise ValueError(f"rotary_interleaved must be 0 or 1, is {self.rotary_interleaved}")

    @classmethod
    def of(cls, attributes: Mapping[str, int | float]) -> QuantizedKVAttentionAttributes:
        """From a node's attributes; absent ones get their defaults, unknown ones are a TypeError."""
        return cls(**attributes)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, int | float]:
        """Every attribute by name, as they stand on a node: all of them, none left to a default."""
        return dataclasses.asdict(self)


def supports_head_dim(head_dim: int) -> bool:
    """Whether the op has kernels for this head dimension."""
    return 0 < head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0
