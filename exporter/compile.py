"""One model to one engine: captured, rewritten, written in its portable and its lowered form."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specexport.exporter.activations import ActivationChoice
from specexport.exporter.artifact import WeightsFiles, weight_bytes, write_graph
from specexport.exporter.config import BuildConfig
from specexport.exporter.entries import describe_engine, identify, op_versions
from specexport.exporter.progress import Progress
from specexport.exporter.staging import BuildError
from specexport.graph_passes.infrastructure import GraphPass, PassFailure, PassRecord, run_passes
from specexport.graph_passes.pipeline import cpu_passes, portable_passes
from specexport.graph_passes.plan import PassPlan
from specexport.plugins.errors import InputError
from specexport.plugins.quantized_linear.format import QuantizationScheme
from specexport.runtime.manifest import BackendFiles, EngineEntry, ModelIdentity

if TYPE_CHECKING:
    import onnx_ir as ir
    import transformers

    from specexport.exporter.source import Source
    from specexport.exporter.weights import WeightStore

DEFAULT_CONTEXT = 8192
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
PORTABLE = "portable"
ENGINE = "engines/cpu"


@dataclasses.dataclass
class CapturedModel:
    """A graph without weights, and what it was captured from.

    Attributes:
        role: ``target`` or ``draft``.
        source_config: The source's configuration.
        config: That of what was captured, which may be less deep.
        weights_file: Name of the data file; engines that name the same one share tensors of equal names.
    """

    role: str
    weights_file: str
    source: Source
    source_config: transformers.PretrainedConfig
    config: transformers.PretrainedConfig
    identity: ModelIdentity
    context_length: int
    graph: ir.Model
    notes: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return int(self.graph.graph.outputs[0].shape[-1])  # type: ignore[index, arg-type]


@dataclasses.dataclass(frozen=True)
class CompiledEngine:
    """What was written for one role.

    Attributes:
        entry: For the manifest.
        records: What each pass did.
        ops: Our ops in the lowered graph, with versions.
    """

    entry: EngineEntry
    records: tuple[PassRecord, ...]
    ops: dict[str, int]


def choose_context_length(wanted: int | None, config: Any) -> int:
    """The hard maximum of positions: what was asked for, else the model's own up to 8192.

    Raises:
        InputError: More than the model has positions for.
    """
    own = int(getattr(config.get_text_config(), "max_position_embeddings", None) or DEFAULT_CONTEXT)
    if wanted is not None and wanted > own:
        raise InputError(f"--context-length is {wanted}; the model has positions for {own} (max_position_embeddings)")
    return wanted if wanted is not None else min(own, DEFAULT_CONTEXT)


def capture_model(
    role: str,
    source: Source,
    config: transformers.PretrainedConfig,
    *,
    context_length: int,
    progress: Progress,
    layers: int | None = None,
    weights_file: str = "weights.bin",
) -> CapturedModel:
    """Capture a model from its configuration alone, or its first ``layers`` layers; reads no weights.

    Raises:
        CaptureError: What the architecture has that cannot be captured.
    """
    from specexport.exporter.capture import LAYER_STEPS, NOTES_KEY, capture, skeleton
    from specexport.exporter.draft.layers import cut_layers

    module = skeleton(config)
    if layers is not None:
        module = cut_layers(module, layers)
    depth: Any = module.config
    with progress.stage(f"Capturing the {role}", LAYER_STEPS * depth.get_text_config().num_hidden_layers) as advance:
        graph = capture(module, context_length=context_length, on_layer=lambda: advance(1))
    return CapturedModel(
        role=role,
        weights_file=weights_file,
        source=source,
        source_config=config,
        config=depth,
        identity=identify(source, depth, module),
        context_length=context_length,
        graph=graph,
        notes=tuple(json.loads(graph.metadata_props.get(NOTES_KEY, "[]"))),
    )


def compile_engine(
    captured: CapturedModel,
    weights: WeightStore,
    config: BuildConfig,
    activations: ActivationChoice,
    files: WeightsFiles,
    progress: Progress,
) -> CompiledEngine:
    """Rewrite the captured graph and write its portable and its lowered form.

    Args:
        captured: Its graph is used up.
        weights: Of the same model.
        config: The build's.
        activations: How precise they are at each matrix.
        files: The bundle's data files.
        progress: Told of each stage.

    Raises:
        BuildError: A pass broke the graph; names it.
    """
    role = captured.role
    dump = None if config.dump_passes is None else config.dump_passes / role
    plan = _plan(captured, config, activations, weights)
    records = _rewrite(captured, portable_passes(plan), dump and dump / "portable", progress)
    _write(captured, PORTABLE, files, progress)
    records += _rewrite(captured, cpu_passes(), dump and dump / "cpu", progress)
    _write(captured, ENGINE, files, progress)
    engine_file, data_file = f"{ENGINE}/{role}.onnx", f"{ENGINE}/{captured.weights_file}"
    entry = describe_engine(
        captured.graph,
        identity=captured.identity,
        config=captured.config.get_text_config(),
        context_length=captured.context_length,
        files={"cpu": BackendFiles(file=engine_file, weights=data_file)},
    )
    return CompiledEngine(entry=entry, records=tuple(records), ops=op_versions(captured.graph))


def _rewrite(
    captured: CapturedModel, passes: Sequence[GraphPass], dump: pathlib.Path | None, progress: Progress
) -> list[PassRecord]:
    with progress.stage(f"Rewriting the {captured.role}", len(passes)) as advance:
        try:
            return run_passes(captured.graph, passes, dump, on_pass=lambda _: advance(1))
        except PassFailure as error:
            raise BuildError(f"{captured.source.identity}, {captured.role}: {error}") from error


def _write(captured: CapturedModel, folder: str, files: WeightsFiles, progress: Progress) -> None:
    name = f"{folder}/{captured.role}.onnx"
    with progress.stage(f"Writing {name}", weight_bytes(captured.graph)) as advance:
        weights = files.open(f"{folder}/{captured.weights_file}")
        write_graph(captured.graph, files.root / name, weights, advance)


def _plan(
    captured: CapturedModel, config: BuildConfig, activations: ActivationChoice, weights: WeightStore
) -> PassPlan:
    # A router has one row an expert: next to no bytes, and its rounding sends tokens to other experts.
    model_config = captured.config.get_text_config()
    routers = {getattr(model_config, name, None) for name in EXPERT_COUNTS} - {None}
    return PassPlan(
        weights=weights,
        scheme=lambda name, shape: None if shape[0] in routers else _scheme(config, weights, name, shape),
        activation_bits=activations,
        key_bits=config.key_bits,
        value_bits=config.value_bits,
        key_group_size=config.cache_group_size,
        value_group_size=config.cache_group_size,
    )


def _scheme(config: BuildConfig, weights: WeightStore, name: str, shape: tuple[int, int]) -> QuantizationScheme | None:
    """The source's own blocks with ``auto``; else what was asked for, or fp32 where the columns do not divide."""
    if config.weights == "fp32":
        return None
    if config.weights == "auto" and (native := weights.native_scheme(name)) is not None:
        return native
    if shape[1] % config.group_size:
        return None
    if config.weights == "int4":
        return QuantizationScheme(bits=4, group_size=config.group_size, has_minimum=True)
    return QuantizationScheme(bits=8, group_size=config.group_size, has_minimum=False)
