"""QuantizedEmbedding: rows of a quantized matrix."""
