"""QuantizedKVAttention: RoPE, cache update and attention over a quantized cache."""
