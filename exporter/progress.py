"""Progress of long work: bars with an estimate of the time left on a terminal, one line a step elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TextIO

Advance = Callable[[float], None]


class Progress(Protocol):
    """What long-running work reports to."""

    def stage(self, title: str, total: float | None = None) -> contextlib.AbstractContextManager[Advance]:
        """Open a stage of ``total`` units (None: unknown); the value is called with the units done since last time."""
        ...

    def note(self, text: str) -> None:
        """Say one line that must not be missed: a choice that was made, a fallback that was taken."""
        ...


class Silent:
    """Reports nothing."""

    @contextlib.contextmanager
    def stage(self, title: str, total: float | None = None) -> Iterator[Advance]:
        """Do nothing."""
        yield lambda _: None

    def note(self, text: str) -> None:
        """Do nothing."""


class Lines:
    """One line when a stage ends, for logs."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream

    @contextlib.contextmanager
    def stage(self, title: str, total: float | None = None) -> Iterator[Advance]:
        """Print the stage and its seconds when it has ended well."""
        start = time.perf_counter()
        yield lambda _: None
        print(f"{title}: {time.perf_counter() - start:.1f} s", file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Print the line."""
        print(text, file=self._stream, flush=True)


class Bars:
    """rich progress bars with elapsed and remaining time."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)

    @contextlib.contextmanager
    def stage(self, title: str, total: float | None = None) -> Iterator[Advance]:
        """Show one bar; it stays, finished, with the time that it took."""
        from rich import progress

        columns = (
            progress.TextColumn("{task.description:32}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("ETA"),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=self._console) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done: bar.advance(task, done)
            bar.update(task, total=total or 1, completed=total or 1)

    def note(self, text: str) -> None:
        """Print the line above the bars."""
        self._console.print(text, markup=False, highlight=False)


class Counter:
    """One line that counts up, with the time left, for terminals where rich is not installed."""

    def __init__(self, stream: TextIO = sys.stderr, clock: Callable[[], float] = time.perf_counter) -> None:
        self._stream = stream
        self._clock = clock

    @contextlib.contextmanager
    def stage(self, title: str, total: float | None = None) -> Iterator[Advance]:
        """Rewrite the line at every advance; leave the seconds that it took."""
        start = self._clock()
        done = 0.0

        def advance(units: float) -> None:
            nonlocal done
            done += units
            spent = self._clock() - start
            left = (
                f"{min(done / total, 1):4.0%}, {spent * max(total / done - 1, 0):.0f} s left" if total and done else ""
            )
            self._write(f"{title}: {left}", "")

        self._write(f"{title} ...", "")
        yield advance
        self._write(f"{title}: {self._clock() - start:.1f} s", "\n")

    def note(self, text: str) -> None:
        """Print the line."""
        self._write(text, "\n")

    def _write(self, text: str, end: str) -> None:
        # Carriage return, the text, and "erase to the end of the line".
        print(f"\r{text}\x1b[K", end=end, file=self._stream, flush=True)


def console_progress() -> Progress:
    """Bars on a terminal (a counter where rich is missing, as it is in the base install), lines elsewhere."""
    if not sys.stderr.isatty():
        return Lines()
    try:
        return Bars()
    except ModuleNotFoundError:
        return Counter()
