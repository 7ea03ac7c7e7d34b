"""QuantizedLinear: one weight matrix, with the norm before it and what follows it."""
