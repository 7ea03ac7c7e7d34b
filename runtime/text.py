"""Token ids to text while they come: whole characters only, stop strings found wherever they begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a decoder shows bytes that are no character (yet)
MAX_HELD_TOKENS = 16  # a character has at most 4 bytes: beyond this the bytes are no character, and go out as they are


class IncrementalText:
    """Text piece by piece; the pieces joined are the text of all tokens."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._known = 0  # tokens whose text is out; those before serve as context, since decoders look back
        self._known_text = ""

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        self._ids.append(token)
        text = self._decode(self._ids)
        waits = text.endswith(UNFINISHED) or len(text) <= len(self._known_text)
        if waits and len(self._ids) - self._known <= MAX_HELD_TOKENS:
            return ""
        return self._take(text)

    def flush(self) -> str:
        """What is still held: the bytes of an unfinished character, as replacement characters."""
        return self._take(self._decode(self._ids)) if self._known < len(self._ids) else ""

    def _take(self, text: str) -> str:
        piece = text[len(self._known_text) :]
        del self._ids[: self._known]
        self._known = len(self._ids)
        self._known_text = self._decode(self._ids)
        return piece


class StopStrings:
    """Holds back text that may begin a stop string, and cuts at the first that is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that may go out, and whether a stop string is complete (then nothing may follow)."""
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0


class TextStream:
    """Tokens in, text out: to a callback, if there is one, and into ``text``."""

    def __init__(self, decode: Decode, stops: Sequence[str], callback: Callable[[str], object] | None) -> None:
        self._incremental = IncrementalText(decode)
        self._stops = StopStrings(stops)
        self._callback = callback
        self.text = ""

    def push(self, token: int) -> bool:
        """Take a token; True if it completes a stop string."""
        piece, stopped = self._stops.push(self._incremental.push(token))
        self._emit(piece)
        return stopped

    def finish(self, *, stopped: bool) -> None:
        """No token follows."""
        if not stopped:
            piece, stopped = self._stops.push(self._incremental.flush())
            self._emit(piece if stopped else piece + self._stops.flush())

    def _emit(self, piece: str) -> None:
        if piece:
            self.text += piece
            if self._callback is not None:
                self._callback(piece)
