"""What a build gives: for a person and as JSON."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from specexport.runtime.manifest import EngineEntry, Manifest

if TYPE_CHECKING:
    from specexport.exporter.compare import Comparison


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """A finished build.

    Attributes:
        path: The bundle.
        manifest: As written.
        comparison: None if none was asked for.
        notes: Choices that were made on the way.
    """

    path: pathlib.Path
    manifest: Manifest
    comparison: Comparison | None
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """No gate of the closing comparison failed."""
        return self.comparison is None or self.comparison.passed

    def to_json(self) -> dict[str, Any]:
        """Path, status, costs, accuracy and choices."""
        return {
            "path": str(self.path),
            "status": self.manifest.status,
            "target": _engine_json(self.manifest.target),
            "draft": None
            if self.manifest.draft is None
            else {
                "kind": self.manifest.draft.kind,
                "num_assistant_tokens": self.manifest.draft.num_assistant_tokens,
                "engine": self.manifest.draft.engine and _engine_json(self.manifest.draft.engine),
            },
            "measured": dict(self.manifest.measured),
            "accuracy": dict(self.manifest.accuracy),
            "notes": list(self.notes),
        }

    def summary(self) -> str:
        """A few lines for a person."""
        manifest, target = self.manifest, self.manifest.target
        cache = target.cache.layers[0]
        lines = [
            f"{self.path}: {manifest.status}",
            f"  target      {target.model.architecture}, {target.num_hidden_layers} layers, "
            f"{target.model.parameters / 1e6:.0f} M parameters, context {target.context_length}",
            f"  weights     {', '.join(f'{n} x {scheme}' for scheme, n in target.weights.summary.items())}; "
            f"{target.weights.bytes / 1e6:.1f} MB",
            f"  activations {_activations(manifest)}, cache K {cache.key_bits} and V {cache.value_bits} bits",
            f"  draft       {_draft(manifest)}",
        ]
        if verify := manifest.measured.get("verify_ms"):
            lines.append(
                "  verify      " + ", ".join(f"{rows}: {ms:.2f} ms" for rows, ms in verify.items()) + " (rows)"
            )
        lines += [f"  note        {note}" for note in self.notes]
        if self.comparison is not None:
            figures = self.comparison.target.figures
            lines.append(
                f"  accuracy    mean KL {figures.kl_mean:.2e}, top-1 agreement {figures.top1_agreement:.2%}, "
                f"perplexity {figures.perplexity:.3f} (fp32 eager {figures.perplexity_reference:.3f}), "
                f"{figures.tokens} tokens"
            )
            lines += [
                f"  FAILED      {problem}" for problem in (*self.comparison.faults, *self.comparison.failed_gates)
            ]
        return "\n".join(lines)


def _activations(manifest: Manifest) -> str:
    choice = manifest.measured.get("activations")
    name = str(manifest.build["activations"])
    return f"{name} ({choice['summary']})" if choice else name


def break_even(measured: Mapping[str, Any], num_assistant_tokens: int) -> float | None:
    """Tokens that a round of ``num_assistant_tokens`` drafted ones must bring to cost what plain decoding costs.

    Cost of the drafts and of one verify pass over the cost of one row; widths between two measured ones are
    interpolated. None where nothing was measured.
    """
    verify = {int(rows): float(ms) for rows, ms in (measured.get("verify_ms") or {}).items()}
    if 1 not in verify:
        return None
    rows = sorted(verify)
    width = float(np.interp(num_assistant_tokens + 1, rows, [verify[row] for row in rows]))
    return (width + num_assistant_tokens * (measured.get("draft_ms") or 0.0)) / verify[1]


def _draft(manifest: Manifest) -> str:
    draft = manifest.draft
    if draft is None:
        return "none"
    needed = break_even(manifest.measured, draft.num_assistant_tokens)
    pays = "" if needed is None else f"; pays where a round brings more than {needed:.2f} tokens"
    return f"{draft.kind}, {draft.num_assistant_tokens} tokens a round{pays}"


def _engine_json(entry: EngineEntry) -> dict[str, Any]:
    return {
        "model": dataclasses.asdict(entry.model),
        "weights": {"summary": dict(entry.weights.summary), "bytes": entry.weights.bytes},
        "context_length": entry.context_length,
    }
