"""The ONNX function body of QuantizedKVAttention, put together for one set of attributes and inputs."""

from __future__ import annotations

import typing
from collections.abc import Collection, Mapping

from specexport.plugins.quantized_kv_attention import body_text as pieces
from specexport.plugins.quantized_kv_attention.spec import INPUTS, OUTPUTS, SPEC, QuantizedKVAttentionAttributes

if typing.TYPE_CHECKING:
    import onnx

OPSET = 23
OPTIONAL_INPUTS = ("key_scale", "value_scale", "cos", "sin", "q_norm_weight", "k_norm_weight", "sinks")


def _rope(x: str, source: str, attributes: QuantizedKVAttentionAttributes) -> str:
    text = pieces.ROPE_INTERLEAVED if attributes.rotary_interleaved else pieces.ROPE_HALVES
    return text.format(x=x, source=source, turn=pieces.TURN.format(x=x))


def _rows(x: str, attributes: QuantizedKVAttentionAttributes, present: Collection[str]) -> str:
    """From ``{x}_plain`` to ``{x}_rows`` (x is q or k): norm and RoPE, as far as their inputs are there."""
    text, source = "", f"{x}_plain"
    if f"{x}_norm_weight" in present:
        text += pieces.NORM.format(x=x, norm_epsilon=_number(attributes.norm_epsilon))
        source = f"{x}_normed"
    if "cos" in present:
        return text + _rope(x, source, attributes)
    return text + f"{x}_rows = Identity({source})\n"


def _cache(x: str, rows: str, bits: int, group_size: int) -> str:
    """The new rows into the cache of ``x`` (key or value), and the whole cache as float ``{x}_values``."""
    text = f"{x}_rows = Identity({rows})\n" if rows != f"{x}_rows" else ""
    text += pieces.CACHE_INDEX.format(x=x)
    if bits == 8:
        text += pieces.QUANTIZE.format(x=x, group_size=group_size)
        text += pieces.UPDATE.format(out=f"{x}_cache_out", rows=f"{x}_stored", cache=f"{x}_cache")
        text += pieces.UPDATE.format(out=f"{x}_scale_out", rows=f"{x}_stored_scale", cache=f"{x}_scale")
        return text + pieces.DEQUANTIZE.format(x=x)
    text += pieces.HALF.format(x=x)
    text += pieces.UPDATE.format(out=f"{x}_cache_out", rows=f"{x}_stored", cache=f"{x}_cache")
    # The function has its outputs by position, so an absent one in the middle still needs a value.
    text += f"{x}_scale_out = Constant<value = float16 {{0}}>()\n"
    return text + f"{x}_values = Cast<to = 1>({x}_cache_out)\n"


def _number(value: float) -> str:
    """A float literal of ONNX text, exact for the float32 that an attribute holds."""
    return f"{value:.9e}"


def _scores(attributes: QuantizedKVAttentionAttributes) -> str:
    if attributes.softcap:
        return pieces.SOFTCAP.format(softcap=_number(attributes.softcap))
    return "scores = Identity(scores_0)\n"


def body_text(attributes: QuantizedKVAttentionAttributes, present: Collection[str]) -> str:
    """The statements of the function body, one a line."""
    sizes = {
        "q_num_heads": attributes.q_num_heads,
        "kv_num_heads": attributes.kv_num_heads,
        "repeats": attributes.q_num_heads // attributes.kv_num_heads,
        "all_heads": attributes.q_num_heads + 2 * attributes.kv_num_heads,
    }
    has_sinks = "sinks" in present
    parts = [
        pieces.SHAPES.format(**sizes),
        pieces.ROPE_TABLES if "cos" in present else "",
        _rows("q", attributes, present),
        _rows("k", attributes, present),
        pieces.UPDATE_INDEX,
        _cache("key", "k_rows", attributes.key_bits, attributes.key_group_size),
        _cache("value", "v_rows", attributes.value_bits, attributes.value_group_size),
        pieces.SCORES.format(scale=_number(attributes.scale)),
        _scores(attributes),
        pieces.MASK,
        pieces.WINDOW.format(window=attributes.window) if attributes.window else "is_attended = Identity(is_past)\n",
        pieces.SOFTMAX.format(
            maximum=pieces.SINKS[0].format(**sizes) if has_sinks else "maximum = Identity(masked_maximum)",
            denominator=pieces.SINKS[1] if has_sinks else "denominator = Identity(weight_sum)",
        ),
        pieces.OUTPUT.format(),
    ]
    return "\n".join(line.strip() for line in "".join(parts).splitlines() if line.strip())


def overload(attributes: QuantizedKVAttentionAttributes, present: Collection[str]) -> str:
    """A key of the attribute values and the optional inputs present: equal keys have equal bodies."""
    values = "_".join(f"{value:.9g}" for value in attributes.as_dict().values())
    return f"{values}__{'_'.join(name for name in OPTIONAL_INPUTS if name in present)}"


def function(attributes: Mapping[str, int | float], present: Collection[str]) -> onnx.FunctionProto:
    """The op as a model-local ONNX function, specialised for these attributes and optional inputs.

    Args:
        attributes: As ``QuantizedKVAttentionAttributes``; absent ones get their defaults.
        present: Names among ``INPUTS`` that the node has; those that every node has may be left out.

    Raises:
        ValueError: The inputs do not go together, such as cos without sin or 8 bits without a scale.
    """
    import onnx

    checked = QuantizedKVAttentionAttributes.of(attributes)
    check_present(checked, present)
    # The formal lists end with the last input and output that a node has: shape inference and the reference evaluator
    # compare the lengths.
    inputs = INPUTS[: 1 + max(i for i, name in enumerate(INPUTS) if name in present or name not in OPTIONAL_INPUTS)]
    outputs = OUTPUTS if checked.value_bits == 8 else OUTPUTS[:-1]
    header = f'<domain: "{SPEC.domain}", opset_import: ["": {OPSET}]>'
    signature = f"{SPEC.name} ({', '.join(inputs)}) => ({', '.join(outputs)})"
    proto = onnx.parser.parse_function(f"{header}\n{signature}\n{{\n{body_text(checked, present)}\n}}")
    proto.overload = overload(checked, present)
    for name, value in checked.as_dict().items():
        proto.attribute_proto.append(onnx.helper.make_attribute(name, value))
    return proto


def check_present(attributes: QuantizedKVAttentionAttributes, present: Collection[str]) -> None:
    """Raise ValueError where the optional inputs present contradict the attributes or each other."""
    unknown = sorted(set(present) - set(INPUTS))
    if unknown:
        raise ValueError(f"{SPEC.name} has no inputs {unknown}; it has {list(INPUTS)}")
    if ("cos" in present) != ("sin" in present):
        raise ValueError(f"{SPEC.name} takes cos and sin together")
    for side, bits in (("key", attributes.key_bits), ("value", attributes.value_bits)):
        if (bits == 8) != (f"{side}_scale" in present):
            raise ValueError(f"{SPEC.name} takes {side}_scale exactly at 8 {side} bits, which are {bits}")
