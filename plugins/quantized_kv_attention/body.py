"""The ONNX function body of QuantizedKVAttention: the op's specification, as ONNX text."""

from __future__ import annotations

import typing
from collections.abc import Collection, Mapping

from specexport.plugins.quantized_kv_attention.spec import INPUTS, OUTPUTS, SPEC, QuantizedKVAttentionAttributes

if typing.TYPE_CHECKING:
    import onnx

OPSET = 23
OPTIONAL_INPUTS = ("key_scale", "value_scale", "cos", "sin", "q_norm_weight", "k_norm_weight", "sinks")

# Names that end in _axes, _index or _shape are int64 vectors; comments give the shape of what stands on the left.
_SHAPES = """
    one = Constant<value_ints = [1]>()
    two = Constant<value_ints = [2]>()
    last_axis = Constant<value_ints = [-1]>()
    zero_float = Constant<value_float = 0.0>()
    levels = Constant<value_float = 127.0>()
    minus_levels = Constant<value_float = -127.0>()
    q_heads = Constant<value_ints = [{q_num_heads}]>()
    kv_heads = Constant<value_ints = [{kv_num_heads}]>()
    repeats = Constant<value_ints = [{repeats}]>()
    batch_index = Shape<start = 0, end = 1>(qkv)
    rows_index = Shape<start = 1, end = 2>(qkv)
    head_dim = Shape<start = 3, end = 4>(key_cache)
    capacity = Shape<start = 2, end = 3>(key_cache)
    start_index = Constant<value_int = 0>()
    step_index = Constant<value_int = 1>()
    rows_scalar = Squeeze(rows_index)
    capacity_scalar = Squeeze(capacity)
    row_numbers = Range(start_index, rows_scalar, step_index)
    cache_positions = Range(start_index, capacity_scalar, step_index)
    past_column = Unsqueeze(past_length, one)
    query_column = Unsqueeze(query_length, one)
    positions = Add(past_column, row_numbers)
    row_counts = Less(row_numbers, query_column)
    all_heads = Constant<value_ints = [{all_heads}]>()
    heads_shape = Concat<axis = 0>(batch_index, rows_index, all_heads, head_dim)
    qkv_heads = Reshape<allowzero = 1>(qkv, heads_shape)
    head_counts = Constant<value_ints = [{q_num_heads}, {kv_num_heads}, {kv_num_heads}]>()
    q_plain, k_plain, v_rows = Split<axis = 2>(qkv_heads, head_counts)
"""

_NORM = """
    {x}_normed = RMSNormalization<axis = -1, epsilon = {norm_epsilon}>({x}_plain, {x}_norm_weight)
"""

_ROPE_TABLES = """
    table_rows = Shape<start = 0, end = 1>(cos)
    last_table_row = Sub(table_rows, one)
    table_positions = Min(positions, last_table_row)
    cos_rows = Gather<axis = 0>(cos, table_positions)
    sin_rows = Gather<axis = 0>(sin, table_positions)
    row_cos = Unsqueeze(cos_rows, two)
    row_sin = Unsqueeze(sin_rows, two)
    rotary_half = Shape<start = 1, end = 2>(cos)
    rotary_dim = Mul(rotary_half, two)
    zero = Constant<value_ints = [0]>()
    three = Constant<value_ints = [3]>()
"""

_ROPE_HALVES = """
    {x}_first = Slice({source}, zero, rotary_half, three)
    {x}_second = Slice({source}, rotary_half, rotary_dim, three)
    {x}_rest = Slice({source}, rotary_dim, head_dim, three)
    {turn}
    {x}_rows = Concat<axis = 3>({x}_turned_first, {x}_turned_second, {x}_rest)
"""

_ROPE_INTERLEAVED = """
    {x}_first = Slice({source}, zero, rotary_dim, three, two)
    {x}_second = Slice({source}, one, rotary_dim, three, two)
    {x}_rest = Slice({source}, rotary_dim, head_dim, three)
    {turn}
    {x}_pair_first = Unsqueeze({x}_turned_first, last_axis)
    {x}_pair_second = Unsqueeze({x}_turned_second, last_axis)
    {x}_pairs = Concat<axis = -1>({x}_pair_first, {x}_pair_second)
    {x}_lead_shape = Shape<start = 0, end = 3>({source})
    {x}_rotated_shape = Concat<axis = 0>({x}_lead_shape, rotary_dim)
    {x}_rotated = Reshape<allowzero = 1>({x}_pairs, {x}_rotated_shape)
    {x}_rows = Concat<axis = 3>({x}_rotated, {x}_rest)
"""

_TURN = """
    {x}_first_cos = Mul({x}_first, row_cos)
    {x}_second_sin = Mul({x}_second, row_sin)
    {x}_turned_first = Sub({x}_first_cos, {x}_second_sin)
    {x}_second_cos = Mul({x}_second, row_cos)
    {x}_first_sin = Mul({x}_first, row_sin)
    {x}_turned_second = Add({x}_second_cos, {x}_first_sin)
"""

# [B, S, Hkv, D] -> int8 of the same shape and float16 [B, S, Hkv, D / G].
# A group with NaN or infinity adds NaN to amax: 0 times either is NaN.
_QUANTIZE = """
    {x}_group = Constant<value_ints = [{group_size}]>()
    {x}_groups = Div(head_dim, {x}_group)
    {x}_grouped_shape = Concat<axis = 0>(batch_index, rows_index, kv_heads, {x}_groups, {x}_group)
    {x}_grouped = Reshape<allowzero = 1>({x}_rows, {x}_grouped_shape)
    {x}_magnitude = Abs({x}_grouped)
    {x}_amax = ReduceMax<keepdims = 1>({x}_magnitude, last_axis)
    {x}_times_zero = Mul({x}_grouped, zero_float)
    {x}_poison = ReduceSum<keepdims = 1>({x}_times_zero, last_axis)
    {x}_known_amax = Add({x}_amax, {x}_poison)
    {x}_exact_scale = Div({x}_known_amax, levels)
    {x}_grouped_scale = Cast<to = 10>({x}_exact_scale)
    {x}_float_scale = Cast<to = 1>({x}_grouped_scale)
    {x}_has_scale = Greater({x}_float_scale, zero_float)
    {x}_ratio = Div({x}_grouped, {x}_float_scale)
    {x}_level = Round({x}_ratio)
    {x}_clamped = Clip({x}_level, minus_levels, levels)
    {x}_kept = Where({x}_has_scale, {x}_clamped, zero_float)
    {x}_levels = Cast<to = 3>({x}_kept)
    {x}_stored = Reshape<allowzero = 1>({x}_levels, {x}_rows_shape)
    {x}_stored_scale = Squeeze({x}_grouped_scale, last_axis)
"""

# [B, S, Hkv, D] -> float16. What float16 has no number for becomes infinity by the cast, then NaN: an infinite key
# might get a weight of 0, silently.
_HALF = """
    {x}_half = Cast<to = 10>({x}_rows)
    {x}_half_float = Cast<to = 1>({x}_half)
    {x}_half_poison = Mul({x}_half_float, zero_float)
    {x}_held = Add({x}_rows, {x}_half_poison)
    {x}_stored = Cast<to = 10>({x}_held)
"""

_CACHE_INDEX = """
    {x}_rows_shape = Shape({x}_rows)
"""

# Which new row, if any, a cache position gets.
_UPDATE_INDEX = """
    row_of_position = Sub(cache_positions, past_column)
    zero_index = Constant<value_int = 0>()
    not_before = GreaterOrEqual(row_of_position, zero_index)
    not_after = Less(row_of_position, query_column)
    is_new = And(not_before, not_after)
    update_axes = Constant<value_ints = [1, 3]>()
    is_new_cache = Unsqueeze(is_new, update_axes)
    last_row = Sub(rows_scalar, step_index)
    clipped_row = Clip(row_of_position, zero_index, last_row)
    row_index = Unsqueeze(clipped_row, two)
"""

_UPDATE = """
    {out}_by_position = GatherND<batch_dims = 1>({rows}, row_index)
    {out}_new = Transpose<perm = [0, 2, 1, 3]>({out}_by_position)
    {out} = Where(is_new_cache, {out}_new, {cache})
"""

_DEQUANTIZE = """
    {x}_cache_shape = Shape({x}_cache_out)
    {x}_cache_lead = Shape<start = 0, end = 3>({x}_cache_out)
    {x}_cache_groups = Concat<axis = 0>({x}_cache_lead, {x}_groups, {x}_group)
    {x}_cache_float = Cast<to = 1>({x}_cache_out)
    {x}_cache_grouped = Reshape<allowzero = 1>({x}_cache_float, {x}_cache_groups)
    {x}_cache_scale = Cast<to = 1>({x}_scale_out)
    {x}_cache_scale_column = Unsqueeze({x}_cache_scale, last_axis)
    {x}_cache_scaled = Mul({x}_cache_grouped, {x}_cache_scale_column)
    {x}_values = Reshape<allowzero = 1>({x}_cache_scaled, {x}_cache_shape)
"""

# Query heads of one key head lie side by side, so [B, Hq, S, D] is [B, Hkv, Hq / Hkv * S, D].
_SCORES = """
    q_by_head = Transpose<perm = [0, 2, 1, 3]>(q_rows)
    repeated_rows = Mul(repeats, rows_index)
    q_folded_shape = Concat<axis = 0>(batch_index, kv_heads, repeated_rows, head_dim)
    q_folded = Reshape<allowzero = 1>(q_by_head, q_folded_shape)
    keys_transposed = Transpose<perm = [0, 1, 3, 2]>(key_values)
    products = MatMul(q_folded, keys_transposed)
    scores_shape = Concat<axis = 0>(batch_index, kv_heads, repeats, rows_index, capacity)
    products_by_head = Reshape<allowzero = 1>(products, scores_shape)
    softmax_scale = Constant<value_float = {scale}>()
    scores_0 = Mul(products_by_head, softmax_scale)
"""

_SOFTCAP = """
    softcap = Constant<value_float = {softcap}>()
    capped_ratio = Div(scores_0, softcap)
    capped = Tanh(capped_ratio)
    scores = Mul(capped, softcap)
"""

_MASK = """
    position_column = Unsqueeze(positions, two)
    is_past = LessOrEqual(cache_positions, position_column)
"""

_WINDOW = """
    window = Constant<value_int = {window}>()
    window_start = Sub(position_column, window)
    is_near = Greater(cache_positions, window_start)
    is_attended = And(is_past, is_near)
"""

_SOFTMAX = """
    mask_axes = Constant<value_ints = [1, 2]>()
    attended = Unsqueeze(is_attended, mask_axes)
    minus_infinity = Constant<value = float {{-inf}}>()
    masked = Where(attended, scores, minus_infinity)
    masked_maximum = ReduceMax<keepdims = 1>(masked, last_axis)
    {maximum}
    shifted = Sub(masked, maximum)
    powers = Exp(shifted)
    weights = Where(attended, powers, zero_float)
    weight_sum = ReduceSum<keepdims = 1>(weights, last_axis)
    {denominator}
    probabilities = Div(weights, denominator)
"""

_SINKS = (
    """
    sinks_shape = Constant<value_ints = [1, {kv_num_heads}, {repeats}, 1, 1]>()
    sink_logits = Reshape(sinks, sinks_shape)
    maximum = Max(masked_maximum, sink_logits)
""",
    """
    sink_shifted = Sub(sink_logits, maximum)
    sink_power = Exp(sink_shifted)
    denominator = Add(weight_sum, sink_power)
""",
)

# A probability of 0 times NaN is NaN, so NaN of rows that are not attended is taken out of the product, and NaN of
# rows that are is put back.
_OUTPUT = """
    value_is_nan = IsNaN(value_values)
    value_known = Where(value_is_nan, zero_float, value_values)
    probabilities_shape = Concat<axis = 0>(batch_index, kv_heads, repeated_rows, capacity)
    probabilities_folded = Reshape<allowzero = 1>(probabilities, probabilities_shape)
    y_folded = MatMul(probabilities_folded, value_known)
    y_shape = Concat<axis = 0>(batch_index, kv_heads, repeats, rows_index, head_dim)
    y_by_head = Reshape<allowzero = 1>(y_folded, y_shape)
    attended_number = Cast<to = 1>(is_attended)
    attended_rows = Unsqueeze(attended_number, one)
    nan_number = Cast<to = 1>(value_is_nan)
    nan_count = MatMul(attended_rows, nan_number)
    has_nan = Greater(nan_count, zero_float)
    has_nan_by_head = Unsqueeze(has_nan, two)
    nan = Constant<value = float {{nan}}>()
    y_told = Where(has_nan_by_head, nan, y_by_head)
    counts_axes = Constant<value_ints = [1, 2, 4]>()
    counts = Unsqueeze(row_counts, counts_axes)
    y_counted = Where(counts, y_told, zero_float)
    y_by_row = Transpose<perm = [0, 3, 1, 2, 4]>(y_counted)
    hidden = Mul(q_heads, head_dim)
    hidden_shape = Concat<axis = 0>(batch_index, rows_index, hidden)
    y = Reshape<allowzero = 1>(y_by_row, hidden_shape)
"""


def _rope(x: str, source: str, attributes: QuantizedKVAttentionAttributes) -> str:
    text = _ROPE_INTERLEAVED if attributes.rotary_interleaved else _ROPE_HALVES
    return text.format(x=x, source=source, turn=_TURN.format(x=x))


def _rows(x: str, attributes: QuantizedKVAttentionAttributes, present: Collection[str]) -> str:
    """From ``{x}_plain`` to ``{x}_rows`` (x is q or k): norm and RoPE, as far as their inputs are there."""
    text, source = "", f"{x}_plain"
    if f"{x}_norm_weight" in present:
        text += _NORM.format(x=x, norm_epsilon=_number(attributes.norm_epsilon))
        source = f"{x}_normed"
    if "cos" in present:
        return text + _rope(x, source, attributes)
    return text + f"{x}_rows = Identity({source})\n"


def _cache(x: str, rows: str, bits: int, group_size: int) -> str:
    """The new rows into the cache of ``x`` (key or value), and the whole cache as float ``{x}_values``."""
    text = f"{x}_rows = Identity({rows})\n" if rows != f"{x}_rows" else ""
    text += _CACHE_INDEX.format(x=x)
    if bits == 8:
        text += _QUANTIZE.format(x=x, group_size=group_size)
        text += _UPDATE.format(out=f"{x}_cache_out", rows=f"{x}_stored", cache=f"{x}_cache")
        text += _UPDATE.format(out=f"{x}_scale_out", rows=f"{x}_stored_scale", cache=f"{x}_scale")
        return text + _DEQUANTIZE.format(x=x)
    text += _HALF.format(x=x)
    text += _UPDATE.format(out=f"{x}_cache_out", rows=f"{x}_stored", cache=f"{x}_cache")
    # The function has its outputs by position, so an absent one in the middle still needs a value.
    text += f"{x}_scale_out = Constant<value = float16 {{0}}>()\n"
    return text + f"{x}_values = Cast<to = 1>({x}_cache_out)\n"


def _number(value: float) -> str:
    """A float literal of ONNX text, exact for the float32 that an attribute holds."""
    return f"{value:.9e}"


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
        _SHAPES.format(**sizes),
        _ROPE_TABLES if "cos" in present else "",
        _rows("q", attributes, present),
        _rows("k", attributes, present),
        _UPDATE_INDEX,
        _cache("key", "k_rows", attributes.key_bits, attributes.key_group_size),
        _cache("value", "v_rows", attributes.value_bits, attributes.value_group_size),
        _SCORES.format(scale=_number(attributes.scale)),
        _SOFTCAP.format(softcap=_number(attributes.softcap)) if attributes.softcap else "scores = Identity(scores_0)\n",
        _MASK,
        _WINDOW.format(window=attributes.window) if attributes.window else "is_attended = Identity(is_past)\n",
        _SOFTMAX.format(
            maximum=_SINKS[0].format(**sizes) if has_sinks else "maximum = Identity(masked_maximum)",
            denominator=_SINKS[1] if has_sinks else "denominator = Identity(weight_sum)",
        ),
        _OUTPUT.format(),
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
