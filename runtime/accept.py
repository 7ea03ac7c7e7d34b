"""Which tokens of a sampling draft stay, and which token follows them: numbers in, numbers out."""

from __future__ import annotations

import numpy as np

from specexport.runtime.sampling import Doubles, Ints, draw

NO_RESIDUAL = 1e-12  # below this the residual is rounding noise: p and q are equal there, and p is drawn from


def residual(target: Doubles, draft: Doubles) -> Doubles:
    """max(0, p - q), normalized, [..., U]: what the target wants beyond what the draft already gave it."""
    rest = np.maximum(target - draft, 0)
    mass = rest.cumsum(axis=-1)[..., -1:]
    rest = np.where(mass > NO_RESIDUAL, rest, target)
    law: Doubles = rest / rest.cumsum(axis=-1)[..., -1:]
    return law


def accept(
    target: Doubles, draft: Doubles, drafted: Ints, accept_uniforms: Doubles, draw_uniforms: Doubles
) -> tuple[Ints, Ints]:
    """Exact rejection: the output follows the target's distributions whatever the draft's are.

    Args:
        target: p, [..., k+1, U]: row i is the distribution of the token at drafted position i.
        draft: q, [..., k, U]: the law that drafted token i was drawn from.
        drafted: Indices into U, [..., k].
        accept_uniforms: [..., k].
        draw_uniforms: [..., k+1]: number i draws the last token if i drafted ones stay.

    Returns:
        ``accepted`` [...], and the index of the token after them: *recovered*, from the residual, if a drafted token
        was rejected, else *bonus*, from the target's last row.
    """
    count = draft.shape[-2]
    p = np.take_along_axis(target[..., :count, :], drafted[..., None], axis=-1)[..., 0]
    q = np.take_along_axis(draft, drafted[..., None], axis=-1)[..., 0]
    stays = accept_uniforms * q < p  # a product, since q may be tiny, and strict, since p may be 0
    accepted: Ints = np.cumprod(stays, axis=-1, dtype=np.int64).sum(axis=-1)
    row = accepted[..., None, None]
    last = np.take_along_axis(target, row, axis=-2)[..., 0, :]
    # At full acceptance there is no draft row: subtracting nothing leaves the target's own.
    padded = np.concatenate([draft, np.zeros_like(draft[..., :1, :])], axis=-2)
    rest = residual(last, np.take_along_axis(padded, row, axis=-2)[..., 0, :])
    uniform = np.take_along_axis(draw_uniforms, accepted[..., None], axis=-1)[..., 0]
    return accepted, draw(rest, uniform)
