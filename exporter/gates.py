"""Accuracy gates: ``kl_mean>0.004`` and the like, checked against a comparison."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specexport.plugins.errors import InputError

#: Fields of one model's comparison that a gate may name.
GATE_FIELDS = (
    "kl_mean",
    "kl_p99",
    "kl_max",
    "top1_agreement",
    "perplexity",
    "perplexity_reference",
    "perplexity_delta",
    "path_max_difference",
    "nonfinite_rows",
)
MODELS = ("target", "draft")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_EXPRESSION = re.compile(
    r"\s*(?:(?P<model>\w+)\.)?(?P<field>\w+)\s*(?P<operator>>=|<=|>|<)\s*(?P<limit>[^\s%]+)\s*(?P<percent>%?)\s*"
)


@dataclasses.dataclass(frozen=True)
class Gate:
    """One condition under which the comparison fails.

    Attributes:
        text: As it was written.
        model: "target" or "draft".
        field: One of ``GATE_FIELDS``.
        operator: ">", ">=", "<" or "<=".
        limit: The number; a percentage is already divided by 100.
    """

    text: str
    model: str
    field: str
    operator: str
    limit: float


@dataclasses.dataclass(frozen=True)
class GateResult:
    """A gate, the value that was measured, and whether it holds."""

    gate: Gate
    value: float
    passed: bool

    def __str__(self) -> str:
        """``target.kl_mean is 0.0051, fails at > 0.004``."""
        name = f"{self.gate.model}.{self.gate.field}"
        verb = "would fail at" if self.passed else "fails at"
        return f"{name} is {self.value:.6g}, {verb} {self.gate.operator} {self.gate.limit:g}"

    def to_json(self) -> dict[str, Any]:
        """JSON-able form; a value that is not finite is null."""
        return {
            "gate": self.gate.text,
            "model": self.gate.model,
            "field": self.gate.field,
            "operator": self.gate.operator,
            "limit": self.gate.limit,
            "value": self.value if math.isfinite(self.value) else None,
            "passed": self.passed,
        }


def parse_gate(text: str) -> Gate:
    """Read one expression: ``[target.|draft.]FIELD OPERATOR NUMBER[%]``; without a prefix it is the target's.

    Raises:
        InputError: The expression is none, or names an unknown model or field.
    """
    known = f"known fields: {', '.join(GATE_FIELDS)}; optional prefix target. or draft.; operators > >= < <="
    match = _EXPRESSION.fullmatch(text)
    if match is None:
        raise InputError(f"gate {text!r} is not FIELD OPERATOR NUMBER, such as 'kl_mean>0.004'; {known}")
    model, field = match["model"] or "target", match["field"]
    if model not in MODELS:
        raise InputError(f"gate {text!r}: unknown prefix {model!r}; {known}")
    if field not in GATE_FIELDS:
        raise InputError(f"gate {text!r}: unknown field {field!r}; {known}")
    try:
        limit = float(match["limit"])
    except ValueError:
        limit = math.nan
    if math.isnan(limit):
        raise InputError(f"gate {text!r}: {match['limit']!r} is not a number; {known}")
    return Gate(text.strip(), model, field, match["operator"], limit / 100 if match["percent"] else limit)


def check_gates(gates: Sequence[Gate], *, has_draft: bool) -> None:
    """Refuse gates that this bundle can never answer, before anything is measured.

    Raises:
        InputError: A gate asks for a draft model, and the bundle has none.
    """
    for gate in gates:
        if gate.model == "draft" and not has_draft:
            raise InputError(f"gate {gate.text!r}: this bundle has no draft model to compare; remove the gate")


def evaluate_gates(gates: Sequence[Gate], comparison: Mapping[str, Any]) -> list[GateResult]:
    """Check gates against ``Comparison.to_json()``; a missing, null or NaN value fails its gate.

    Raises:
        InputError: A gate asks for a draft model, and the bundle has none.
    """
    check_gates(gates, has_draft=comparison.get("draft") is not None)
    results = []
    for gate in gates:
        found = comparison[gate.model].get(gate.field)
        value = math.nan if found is None else float(found)
        failed = math.isnan(value) or _OPERATORS[gate.operator](value, gate.limit)
        results.append(GateResult(gate, value, not failed))
    return results
