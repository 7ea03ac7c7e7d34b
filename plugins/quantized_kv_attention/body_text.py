"""The specification of QuantizedKVAttention in pieces of ONNX text, opset 23; braces are filled in by ``body``."""

# Names that end in _axes, _index or _shape are int64 vectors; comments give the shape of what stands on the left.
SHAPES = """
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

NORM = """
    {x}_normed = RMSNormalization<axis = -1, epsilon = {norm_epsilon}>({x}_plain, {x}_norm_weight)
"""

ROPE_TABLES = """
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

ROPE_HALVES = """
    {x}_first = Slice({source}, zero, rotary_half, three)
    {x}_second = Slice({source}, rotary_half, rotary_dim, three)
    {x}_rest = Slice({source}, rotary_dim, head_dim, three)
    {turn}
    {x}_rows = Concat<axis = 3>({x}_turned_first, {x}_turned_second, {x}_rest)
"""

ROPE_INTERLEAVED = """
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

TURN = """
    {x}_first_cos = Mul({x}_first, row_cos)
    {x}_second_sin = Mul({x}_second, row_sin)
    {x}_turned_first = Sub({x}_first_cos, {x}_second_sin)
    {x}_second_cos = Mul({x}_second, row_cos)
    {x}_first_sin = Mul({x}_first, row_sin)
    {x}_turned_second = Add({x}_second_cos, {x}_first_sin)
"""

# [B, S, Hkv, D] -> int8 of the same shape and float16 [B, S, Hkv, D / G].
# A group with NaN or infinity adds NaN to amax: 0 times either is NaN.
QUANTIZE = """
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
HALF = """
    {x}_half = Cast<to = 10>({x}_rows)
    {x}_half_float = Cast<to = 1>({x}_half)
    {x}_half_poison = Mul({x}_half_float, zero_float)
    {x}_held = Add({x}_rows, {x}_half_poison)
    {x}_stored = Cast<to = 10>({x}_held)
"""

CACHE_INDEX = """
    {x}_rows_shape = Shape({x}_rows)
"""

# Which new row, if any, a cache position gets.
UPDATE_INDEX = """
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

UPDATE = """
    {out}_by_position = GatherND<batch_dims = 1>({rows}, row_index)
    {out}_new = Transpose<perm = [0, 2, 1, 3]>({out}_by_position)
    {out} = Where(is_new_cache, {out}_new, {cache})
"""

DEQUANTIZE = """
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
SCORES = """
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

SOFTCAP = """
    softcap = Constant<value_float = {softcap}>()
    capped_ratio = Div(scores_0, softcap)
    capped = Tanh(capped_ratio)
    scores = Mul(capped, softcap)
"""

MASK = """
    position_column = Unsqueeze(positions, two)
    is_past = LessOrEqual(cache_positions, position_column)
"""

WINDOW = """
    window = Constant<value_int = {window}>()
    window_start = Sub(position_column, window)
    is_near = Greater(cache_positions, window_start)
    is_attended = And(is_past, is_near)
"""

SOFTMAX = """
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

SINKS = (
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
OUTPUT = """
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
