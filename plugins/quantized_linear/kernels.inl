// QuantizedLinear of one instruction set.
#include "quantized_linear/prepare.inl"
#include "quantized_linear/integer_dots.inl"
#include "quantized_linear/real_dots.inl"
#include "quantized_linear/multiply.inl"
