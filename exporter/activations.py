"""How precise activations are: what ``--activations`` says, and what was chosen matrix by matrix."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from specexport.plugins.errors import InputError

UNIFORM = {"int8": 8, "int16": 16, "fp32": 32}
DEFAULT_TARGET_KL = 0.0005
FORMS = "int8, int16, fp32, auto or auto:KL, as auto:0.0005"


@dataclasses.dataclass(frozen=True)
class ActivationPrecision:
    """What was asked for.

    Attributes:
        bits: Of every matrix; None to choose for each.
        target_kl: The mean KL in nats that int8 activations may cost, where they are chosen for each matrix.
    """

    bits: int | None
    target_kl: float | None = None


def parse_activations(text: str) -> ActivationPrecision:
    """What ``text`` asks for.

    Raises:
        InputError: It is none of the forms.
    """
    if text in UNIFORM:
        return ActivationPrecision(UNIFORM[text])
    name, _, target = text.partition(":")
    try:
        target_kl = float(target) if target else DEFAULT_TARGET_KL
    except ValueError:
        target_kl = math.nan
    if name != "auto" or text.endswith(":") or not 0 < target_kl < math.inf:
        raise InputError(f"--activations is {text!r}; it can be {FORMS}")
    return ActivationPrecision(None, target_kl)


@dataclasses.dataclass(frozen=True)
class ActivationChoice:
    """The bits of each matrix's activations.

    Attributes:
        bits: Of every matrix that is not in ``int8``.
        int8: State-dict names of the matrices that get 8 bits; empty where one precision was asked for.
        record: How the choice was made and what it measured, for the manifest; empty where none was to be made.
    """

    bits: int
    int8: frozenset[str] = frozenset()
    record: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, name: str) -> int:
        """Bits of the activations that the matrix ``name`` is applied to."""
        return 8 if name in self.int8 else self.bits

    def measured(self) -> dict[str, Any]:
        """What goes to the manifest's ``measured``."""
        return {"activations": {**self.record, "summary": self.summary()}} if self.record else {}

    def summary(self) -> str | None:
        """One line for a person; None where nothing was chosen."""
        if not self.record:
            return None
        return (
            f"int8 in {self.record['int8_linears']} of {self.record['linears']} linears, int16 in the others: "
            f"mean KL {self.record['kl']:.1e} against int16 everywhere (target {self.record['target_kl']:g}, "
            f"int8 everywhere {self.record['kl_int8_everywhere']:.1e}; {self.record['tokens']} tokens)"
        )
