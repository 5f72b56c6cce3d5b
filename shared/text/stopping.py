"""Finish reasons, and the search for stop strings in streamed text.

A stop string rarely coincides with a token: it may begin in the middle of one piece of text and end three pieces later.
So text that may begin a stop string is held back until later pieces decide. Introduced in phase 2.

Invariant: released text never contains any part of the match, and depends only on the whole text, never on how it is
divided into pieces. The buffer is shorter than the longest stop string plus one piece.
"""

from collections.abc import Sequence
from enum import StrEnum

from shared.errors import RequestError


class FinishReason(StrEnum):
    """EOS: an end-of-sequence id was sampled. STOP: a stop string matched. LENGTH: the token limit was reached. ABORT:
    the client cancelled the request. ERROR: it failed.
    """

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class StopChecker:
    """Finds the earliest stop string in a text that arrives in pieces.

    Earliest means: smallest start in the text, and among equal starts the string listed first. A complete match is
    deferred while an earlier one is still possible: with stops ("abcd", "bc"), the next character decides "abc".
    `matched` is the stop string that matched, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises RequestError for an empty stop string, which would match everywhere."""
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError(f"The stop strings are {stops!r}; pass a list of strings, each of at least 1 character.")
        self._stops = tuple(stops)
        self._max_length = max(map(len, self._stops), default=0)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Append a piece of text; return the text that may be released now. After a match nothing more is released."""
        if self.matched is not None:
            return ""
        self._held += piece
        if self._stops and self._first_characters.isdisjoint(self._held):
            return self._release(len(self._held))  # no stop string begins here
        complete = self._earliest_complete()
        partial = self._earliest_partial()
        if complete is not None and (partial is None or complete < partial):
            return self._finish(*complete)
        return self._release(len(self._held) if partial is None else partial[0])

    def flush(self) -> str:
        """End of the text: release the held text, up to a match."""
        if self.matched is not None:
            return ""
        complete = self._earliest_complete()
        return self._release(len(self._held)) if complete is None else self._finish(*complete)

    def _earliest_complete(self) -> tuple[int, int] | None:
        """(start, rank) of the earliest stop string that is complete in the held text."""
        found = ((self._held.find(stop), rank) for rank, stop in enumerate(self._stops))
        return min((match for match in found if match[0] >= 0), default=None)

    def _earliest_partial(self) -> tuple[int, int] | None:
        """(start, rank) of the earliest stop string that begins in the held text and is incomplete."""
        # exercise 02x5: where the held text may begin a stop string
        # hint: find a suffix of the held text that is a proper prefix of a stop string; the earliest suffix wins
        for start in range(max(0, len(self._held) - self._max_length + 1), len(self._held)):
            tail = self._held[start:]
            for rank, stop in enumerate(self._stops):
                if len(stop) > len(tail) and stop.startswith(tail):
                    return start, rank
        return None
        # end exercise

    def _finish(self, start: int, rank: int) -> str:
        self.matched = self._stops[rank]
        released, self._held = self._held[:start], ""
        return released

    def _release(self, end: int) -> str:
        released, self._held = self._held[:end], self._held[end:]
        return released
