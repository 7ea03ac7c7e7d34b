"""What QuantizedEmbedding is called, and where its kernels are."""

from __future__ import annotations

from specexport.plugins.op import OpSpec

SPEC = OpSpec(
    name="QuantizedEmbedding",
    version=1,
    reference="specexport.plugins.quantized_embedding.reference",
    kernels={"cpu": "plugins/quantized_embedding/cpu.cc"},
)

INPUTS = ("input_ids", "weight", "scale", "minimum")
OUTPUTS = ("y",)
CPU_INPUTS = ("input_ids", "packed")
