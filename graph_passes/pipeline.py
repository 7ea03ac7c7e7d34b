"""The passes in order: what a captured graph goes through, one line each with the reason for its place."""

from __future__ import annotations

from specexport.graph_passes.bind_weights import BindWeightsPass
from specexport.graph_passes.bodies import AttachBodiesPass
from specexport.graph_passes.cached_attention import CachedAttentionPass
from specexport.graph_passes.fold_constants import FoldConstantsPass
from specexport.graph_passes.fold_partial_rotary import FoldPartialRotaryPass
from specexport.graph_passes.fold_rope_tables import FoldRopeTablesPass
from specexport.graph_passes.fuse_activation import FuseActivationPass
from specexport.graph_passes.fuse_bias import FuseBiasPass
from specexport.graph_passes.fuse_gate import FuseGatePass
from specexport.graph_passes.fuse_norm import FuseNormPass
from specexport.graph_passes.fuse_residual import FuseResidualPass
from specexport.graph_passes.heads_apart import SetHeadsApartPass
from specexport.graph_passes.infrastructure import GraphPass, PassRecord, run_passes
from specexport.graph_passes.linear import QuantizeLinearPass
from specexport.graph_passes.logits_rows import GatherLogitsRowsPass
from specexport.graph_passes.merge_linears import MergeLinearsPass
from specexport.graph_passes.plan import PassPlan
from specexport.graph_passes.quantized_embedding import QuantizeEmbeddingPass
from specexport.graph_passes.split_without_sequences import SplitWithoutSequencesPass
from specexport.graph_passes.static_reshapes import StaticReshapesPass
from specexport.graph_passes.tensors import Matrices

__all__ = ["GraphPass", "PassPlan", "PassRecord", "cpu_passes", "portable_passes", "run_passes"]


def portable_passes(plan: PassPlan) -> tuple[GraphPass, ...]:
    """From the captured graph to the portable model."""
    matrices = Matrices(plan.weights)
    return (
        BindWeightsPass(plan.weights),  # first: folded weights are computed from bound ones
        FoldConstantsPass(),  # before all matching: passes look for constants, not for their spelling
        StaticReshapesPass(),  # after the folding has said which targets are constants already
        SplitWithoutSequencesPass(),  # before the heads: q, k and v may be parts of one split
        FoldPartialRotaryPass(),  # before the tables: a whole head must be rotated by one node
        FoldRopeTablesPass(),  # before the attention: it takes tables over, not gathered rows
        GatherLogitsRowsPass(),  # before the norms: the final norm must stand right before the head
        QuantizeLinearPass(plan, matrices),  # before all that fuses into a linear
        QuantizeEmbeddingPass(plan, matrices),  # beside the linears: a tied head shares its tensors
        FuseBiasPass(),  # before linears are merged or reordered: biases go with their matrices
        SetHeadsApartPass(),  # before the attention: it takes q, k and v one after the other
        CachedAttentionPass(plan),  # before merging: it is what joins q, k and v
        MergeLinearsPass(),  # after the attention, before the norm: one prologue for q, k and v
        FuseGatePass(),  # before single activations: a gate's activation belongs to the pair
        FuseActivationPass(),  # after the gates have taken theirs
        FuseNormPass(),  # after merging: a norm whose users are all linears disappears
        FuseResidualPass(),  # last of the fusions: an epilogue's end
        AttachBodiesPass(),  # at the end: a body depends on the final inputs and attributes of its node
    )


def cpu_passes() -> tuple[GraphPass, ...]:
    """From the portable model to the CPU engine's."""
    from specexport.graph_passes.lower_cpu import PackEmbeddingsPass, PackLinearsPass

    return (
        PackLinearsPass(),  # the engine's kernels read packed weights
        PackEmbeddingsPass(),  # after the linears: a tied head's packed tensor is there already
        AttachBodiesPass(),  # drops the bodies of ops that were lowered
    )
