"""The errors that a user can meet: one base, and one subclass for bad input."""

from __future__ import annotations


class SpecexportError(Exception):
    """Anything that this project refuses or fails at, in one line: what, where, what was found, what to do.

    Attributes:
        exit_code: What the command line exits with.
    """

    exit_code = 1


class InputError(SpecexportError):
    """What the caller gave cannot be used: a file, an option, a prompt."""

    exit_code = 2
