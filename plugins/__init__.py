"""The fused ops: one folder an op, its meaning, its oracle, its kernels."""
