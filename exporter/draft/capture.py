"""The draft's own graph and weights, for the kinds of draft that have an engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from specexport.exporter.activations import ActivationChoice
from specexport.exporter.artifact import WeightsFiles
from specexport.exporter.compile import CapturedModel, CompiledEngine, capture_model, compile_engine
from specexport.exporter.config import BuildConfig
from specexport.exporter.draft.specification import (
    DraftSpecification,
    LayersDraft,
    ModelDraft,
    NgramDraft,
    NoDraft,
    check_layers,
)
from specexport.exporter.loading import load_config, load_reference, open_weights
from specexport.exporter.progress import Progress
from specexport.exporter.source import resolve
from specexport.exporter.tokenizer_files import collect_tokenizer
from specexport.runtime.manifest import DraftEntry

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class CapturedDraft:
    """A draft before it is compiled.

    Attributes:
        specification: What was asked for.
        model: Its graph; None for a draft without an engine.
        tokenizer_json: Text of its own tokenizer; None where it speaks the target's by construction.
    """

    specification: DraftSpecification
    model: CapturedModel | None = None
    tokenizer_json: str | None = None

    @property
    def vocab_size(self) -> int | None:
        """Rows of its output head; None where it has none."""
        return None if self.model is None else self.model.vocab_size

    def compile(
        self, config: BuildConfig, activations: ActivationChoice, files: WeightsFiles, progress: Progress
    ) -> CompiledEngine | None:
        """Write its engine, if it has one; ``activations`` are the target's."""
        if self.model is None:
            return None
        if isinstance(self.specification, ModelDraft):
            # Matrices of its own; where the target's were chosen, int8: its errors cost acceptance, never accuracy.
            activations = ActivationChoice(config.activation_precision.bits or 8)
        weights = open_weights(self.model.source, self.model.source_config)
        return compile_engine(self.model, weights, config, activations, files, progress)

    def entry(self, engine: CompiledEngine | None, num_assistant_tokens: int) -> DraftEntry | None:
        """What the manifest says of it."""
        specification = self.specification
        if isinstance(specification, NoDraft):
            return None
        if isinstance(specification, NgramDraft):
            return DraftEntry("ngram", num_assistant_tokens, max_ngram_size=specification.max_ngram_size)
        if engine is None:
            raise ValueError(f"{specification} needs its engine")
        if isinstance(specification, LayersDraft):
            return DraftEntry("layers", num_assistant_tokens, layers=specification.layers, engine=engine.entry)
        return DraftEntry("model", num_assistant_tokens, engine=engine.entry)

    def reference(self) -> torch.nn.Module | None:
        """The fp32 eager model of a draft from elsewhere; one made from the target needs none of its own."""
        if self.model is None or not isinstance(self.specification, ModelDraft):
            return None
        return load_reference(self.model.source, self.model.source_config)


def capture_draft(
    specification: DraftSpecification, target: CapturedModel, config: BuildConfig, progress: Progress
) -> CapturedDraft:
    """Capture the draft, reading no weights.

    Raises:
        InputError: As many layers as the target, or a model that cannot be had or captured.
    """
    common: dict[str, Any] = {"context_length": target.context_length, "progress": progress}
    match specification:
        case LayersDraft(layers):
            check_layers(specification, target.source_config.get_text_config().num_hidden_layers)
            model = capture_model("draft", target.source, target.source_config, layers=layers, **common)
            return CapturedDraft(specification, model)
        case ModelDraft(name):
            source = resolve(
                name,
                cache_dir=config.cache_dir,
                offline=config.offline,
                trust_remote_code=config.trust_remote_code,
            )
            progress.note(f"Draft: {source}" + "".join(f"\n  not taken: {place}" for place in source.tried))
            draft_config = load_config(source)
            tokenizer = collect_tokenizer(source, draft_config)
            model = capture_model("draft", source, draft_config, weights_file="draft_weights.bin", **common)
            return CapturedDraft(specification, model, tokenizer.tokenizer_json)
        case _:
            return CapturedDraft(specification)
