"""What the C++ kernels share, and where the built library is."""
