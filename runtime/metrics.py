"""Counters and times of one generation. Counts, not rates: rates follow from them, one way only."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class Metrics:
    """What happened, over the tokens that came out (those cut off behind an end are not counted).

    The first token is the prefill's; every other is exactly one of accepted, recovered, bonus, plain. One *step* is
    one verify pass of the target.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        new_tokens: Tokens that came out.
        prefill_s: From the prompt's ids to the first token, the draft's prefill included.
        decode_s: For the tokens after the first.
        drafts: Steps whose draft proposed something.
        drafted: Tokens proposed.
        accepted: Drafted tokens that came out.
        accepted_per_position: Of the first, second, ... drafted token of a step, how many were accepted.
        recovered: Tokens of the target's own in place of a rejected one.
        bonus: Tokens of the target's own after all drafted ones were accepted.
        plain: Tokens of steps without a proposal.
        draft_ms: Per step, milliseconds spent proposing.
        verify_ms: Per step, milliseconds in the target.
        host_ms: Per step, milliseconds choosing, checking for the end, and streaming.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = dataclasses.field(default_factory=list)
    recovered: int = 0
    bonus: int = 0
    plain: int = 0
    draft_ms: list[float] = dataclasses.field(default_factory=list)
    verify_ms: list[float] = dataclasses.field(default_factory=list)
    host_ms: list[float] = dataclasses.field(default_factory=list)

    @property
    def steps(self) -> int:
        """Verify passes of the target."""
        return len(self.verify_ms)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a verify pass brought on average; 0 without one."""
        return (self.new_tokens - 1) / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, the first token and the prefill left out; 0 if only one token came out."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s else 0.0

    def count_step(self, *, drafted: int, accepted: int, kept: int) -> None:
        """Count a step that proposed ``drafted`` tokens, accepted ``accepted``, and whose first ``kept`` came out."""
        self.new_tokens += kept
        stayed = min(accepted, kept)
        if drafted:
            self.drafts += 1
            self.drafted += drafted
            self.accepted += stayed
            self.accepted_per_position.extend([0] * (drafted - len(self.accepted_per_position)))
            for i in range(stayed):
                self.accepted_per_position[i] += 1
        if kept > accepted:
            if not drafted:
                self.plain += 1
            elif accepted < drafted:
                self.recovered += 1
            else:
                self.bonus += 1

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON, the derived figures included."""
        derived = {k: getattr(self, k) for k in ("steps", "tokens_per_step", "acceptance", "tokens_per_second")}
        return dataclasses.asdict(self) | derived
