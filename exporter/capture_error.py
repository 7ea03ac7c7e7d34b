"""The error of a model that cannot be captured."""

from __future__ import annotations

from specexport.plugins.errors import InputError


class CaptureError(InputError):
    """A model has a part that no graph of ours can express; the message names the architecture and the part."""
