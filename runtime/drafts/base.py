"""What a draft is: it starts once per sequence, and proposes a chain of tokens each round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from specexport.runtime.sampler import Sampler
from specexport.runtime.sampling import Distributions


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A chain of drafted tokens, at most as many as were asked for.

    Attributes:
        tokens: Token ids; may be empty.
        rows: Row i is the exact law that token i was drawn from. None: each token had probability 1 (one-hot).

    How long the chain is may depend on the context and on tokens kept in it, never on a token drawn and thrown away:
    that would bend the output's distribution.
    """

    tokens: tuple[int, ...] = ()
    rows: Distributions | None = None


@dataclasses.dataclass(frozen=True)
class Context:
    """What a round starts from. Drafts that need more of the target (hidden states) find it here.

    Attributes:
        tokens: All committed tokens, prompt included; the caller's own list, not to be changed.
        count: Tokens wanted, at least 1.
    """

    tokens: Sequence[int]
    count: int


class Proposer(Protocol):
    """A draft at work on one sequence."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """See the prompt."""

    def propose(self, context: Context) -> Proposal:
        """A chain that continues ``context.tokens``, which extend those of every earlier call."""

    def close(self) -> None:
        """The sequence is over; give buffers back."""


class Draft(Protocol):
    """A draft of a pair, chosen when the bundle is built."""

    def start(self, sampler: Sampler, *, do_sample: bool) -> Proposer:
        """Begin a sequence.

        Args:
            sampler: The request's; the target uses the same one.
            do_sample: Draw from the draft's distributions (else propose its likeliest tokens, one-hot).
        """
