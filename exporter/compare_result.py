"""What a comparison is told and what it gives: frozen dataclasses, their JSON, and the verdicts drawn from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specexport.exporter.compare_generation import GenerationFigures
from specexport.exporter.compare_layers import LayerFigures
from specexport.exporter.compare_paths import PathFigures
from specexport.exporter.compare_statistics import Figures
from specexport.exporter.gates import Gate, GateResult, evaluate_gates
from specexport.plugins.errors import InputError
from specexport.runtime.prefill import PREFILL_CHUNK

SHORT_FIELDS = (
    "kl_mean",
    "kl_p99",
    "kl_max",
    "top1_agreement",
    "perplexity",
    "perplexity_reference",
    "perplexity_delta",
    "perplexity_delta_standard_error",
    "path_max_difference",
    "nonfinite_rows",
    "tokens",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """How to compare.

    Attributes:
        prefill_chunk: Rows a prefill call, as the runtime does it.
        num_assistant_tokens: k; verify is tried with k+1 rows. None takes the bundle's.
        path_tokens: Rows that are computed again token by token and by verify, half of them deep in a window.
        full: Compute every row through every path.
        tie_margin: Top ids that differ where the reference's top-1 minus top-2 logit is under this are a tie. Logits of
            a model at mean KL 0.004 are off by about 0.1, so 0.5 leaves five times that.
        path_tolerance: Largest difference of a logit between paths that can come from the order of additions; this
            project's kernels differ by 0, operators that stayed standard ONNX may not.
        per_layer: Compare each decoder layer's output as well.
        max_new_tokens: Greedy continuation of each prompt; 0 leaves generation out.
    """

    prefill_chunk: int = PREFILL_CHUNK
    num_assistant_tokens: int | None = None
    path_tokens: int = 256
    full: bool = False
    tie_margin: float = 0.5
    path_tolerance: float = 0.05
    per_layer: bool = False
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        """Refuse sizes that no comparison could use."""
        for name, low in (("prefill_chunk", 1), ("path_tokens", 0), ("max_new_tokens", 0)):
            if getattr(self, name) < low:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if not self.tie_margin >= 0 or not self.path_tolerance >= 0:
            raise InputError("tie_margin and path_tolerance are margins of logits; they must be at least 0")


@dataclasses.dataclass(frozen=True)
class EngineComparison:
    """One exported model against its reference.

    Attributes:
        figures: Prefill, over all windows.
        paths: "prefill", "token_by_token" and "verify".
        layers: Layer by layer, where asked for and possible.
        layers_note: Why ``layers`` is None although asked for.
    """

    figures: Figures
    paths: Mapping[str, PathFigures]
    layers: tuple[LayerFigures, ...] | None = None
    layers_note: str | None = None

    @property
    def path_max_difference(self) -> float:
        """Largest difference of a logit between any path and prefill; NaN where one is not finite alone."""
        return float(np.max([path.max_difference for path in self.paths.values()]))

    def to_json(self) -> dict[str, Any]:
        """Figures at the top; ``paths`` and, if there, ``layers`` below. What is not finite is null."""
        data = dataclasses.asdict(self.figures)
        data["paths"] = {name: dataclasses.asdict(path) for name, path in self.paths.items()}
        data["path_max_difference"] = self.path_max_difference
        data["layers"] = None if self.layers is None else [dataclasses.asdict(layer) for layer in self.layers]
        data["layers_note"] = self.layers_note
        return _json_ready(data)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A pair against its references."""

    reference: str
    text: str
    windows: int
    tokens: int
    options: CompareOptions
    target: EngineComparison
    draft: EngineComparison | None
    generation: GenerationFigures | None
    seconds: float
    gates: tuple[GateResult, ...] = ()

    def with_gates(self, gates: Sequence[Gate]) -> Comparison:
        """The same with these gates checked.

        Raises:
            InputError: A gate asks for a draft, and there is none.
        """
        return dataclasses.replace(self, gates=tuple(evaluate_gates(gates, self.to_json())))

    @property
    def failed_gates(self) -> tuple[GateResult, ...]:
        """The gates that do not hold."""
        return tuple(result for result in self.gates if not result.passed)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong whatever the gates: logits that are not finite, paths that differ, broken speculation."""
        return tuple(_faults(self))

    @property
    def passed(self) -> bool:
        """No gate failed and there is no fault."""
        return not self.failed_gates and not self.faults

    def verdicts(self) -> dict[str, Any]:
        """The comparison in words, one an aspect."""
        generation = self.generation
        return {
            "passed": self.passed,
            "faults": list(self.faults),
            "failed_gates": [str(result) for result in self.failed_gates],
            "target_paths": path_verdict(self.target, self.options.path_tolerance),
            "draft_paths": None if self.draft is None else path_verdict(self.draft, self.options.path_tolerance),
            "speculative_equals_plain": None if generation is None else generation.speculative_equals_plain,
        }

    def to_json(self) -> dict[str, Any]:
        """The whole comparison as JSON-able values; what is not finite is null."""
        data = {
            "format_version": 1,
            "reference": {"source": self.reference, "dtype": "float32"},
            "text": self.text,
            "windows": self.windows,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "options": dataclasses.asdict(self.options),
            "target": self.target.to_json(),
            "draft": None if self.draft is None else self.draft.to_json(),
            "generation": None if self.generation is None else dataclasses.asdict(self.generation),
            "gates": [result.to_json() for result in self.gates],
            "verdicts": self.verdicts(),
        }
        return _json_ready(data)  # type: ignore[no-any-return]

    def short(self) -> dict[str, Any]:
        """The figures that belong in a manifest."""
        generation = self.generation
        return _json_ready(  # type: ignore[no-any-return]
            {
                "reference": self.reference,
                "text": self.text,
                "windows": self.windows,
                "tokens": self.tokens,
                "target": _short_figures(self.target),
                "draft": None if self.draft is None else _short_figures(self.draft),
                "generation": None
                if generation is None
                else {
                    "prompts": len(generation.prompts),
                    "max_new_tokens": generation.max_new_tokens,
                    "matched_mean": generation.matched_mean,
                    "ties": generation.ties,
                    "faults": generation.faults,
                },
                "gates": [result.to_json() for result in self.gates],
                "verdicts": self.verdicts(),
            }
        )


def path_verdict(comparison: EngineComparison, tolerance: float) -> str:
    """Say "identical", or by how much the paths differ and whether that is more than ``tolerance``."""
    if all(path.identical for path in comparison.paths.values()):
        return "identical"
    difference = comparison.path_max_difference
    word = "differ within rounding" if difference <= tolerance else "fault"
    return f"{word}: up to {difference:.3g}"


def _faults(comparison: Comparison) -> list[str]:
    faults = []
    for role, engine in (("target", comparison.target), ("draft", comparison.draft)):
        if engine is None:
            continue
        if engine.figures.nonfinite_rows:
            faults.append(f"{role}: {engine.figures.nonfinite_rows} rows have logits that are not finite")
        verdict = path_verdict(engine, comparison.options.path_tolerance)
        if verdict.startswith("fault"):
            worst = next(name for name, path in engine.paths.items() if not path.identical)
            faults.append(f"{role}: {worst} and prefill give different logits ({verdict})")
    for number, prompt in enumerate(comparison.generation.prompts if comparison.generation else (), 1):
        parted = prompt.speculative_difference
        # Speculation must change nothing, so here a near tie is no excuse.
        if parted is not None:
            faults.append(
                f"prompt {number}: speculative ids leave the plain ones at token {parted.position}, "
                f"where the margin is {parted.margin:.3g}"
            )
    return faults


def _short_figures(comparison: EngineComparison) -> dict[str, Any]:
    data = comparison.to_json()
    return {name: data[name] for name in SHORT_FIELDS}


def _json_ready(value: Any) -> Any:
    """Lists for tuples and None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
