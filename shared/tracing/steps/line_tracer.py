"""Follows the lines of chosen functions while a step runs, with ``sys.settrace``. Introduced in phase 4.

An event is one executed statement of a shown function. It ends where the next one begins, or where control returns to
the caller's line, which has a second event if it then does something more. Functions that are not shown run as part of
the line that calls them. A few of them are *watched*: they determine the kind of a line, and their results are kept.

Invariants: nothing is traced outside of ``watch``; times are those of the engine, without the time that recording
takes.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Protocol

from shared.errors import ConfigError
from shared.tracing.steps.patches import State, difference
from shared.tracing.steps.shown import Function

MOST_EVENTS = 50_000
"""Maximum events of a recording: a page cannot show more, and a loop in a learner's code may never end."""


@dataclass(frozen=True)
class Watched:
    """``kind`` is the kind of the line that calls the function, if the function is not shown; ``note`` gets its frame
    and result."""

    kind: str = ""
    note: Callable[[FrameType, Any], None] | None = None


class Read(Protocol):
    """Reads the state; ``frames`` are those of the shown functions that are running, the step's first."""

    def __call__(self, frames: Sequence[FrameType]) -> State: ...


@dataclass
class Event:
    """An executed statement: its function, line and depth, its kind, its time, and what it changed."""

    function: Function
    line: int
    depth: int
    kind: str = ""
    nanoseconds: int = 0
    patch: State = field(default_factory=dict)


class LineTracer:
    """Records events of ``shown`` functions; ``clock`` is in nanoseconds."""

    def __init__(
        self,
        shown: Mapping[CodeType, Function],
        watched: Mapping[CodeType, Watched],
        read: Read,
        clock: Callable[[], int],
    ) -> None:
        self.shown, self.watched, self.read, self.clock = shown, watched, read, clock
        self.events: list[Event] = []
        self.state = read(())
        self.frames: list[FrameType] = []
        self.open: Event | None = None
        self.has_returned = False  # whether the open event is a line to which a function has returned
        self.began = 0  # when the open event, or the part of it after the last recording, began

    @contextmanager
    def watch(self, first: CodeType) -> Iterator[None]:
        """Trace what runs in this context, starting with the call of the function ``first``."""
        self.first = first
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)
            self.frames.clear()
            self.open = None

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        """The trace function of all new frames."""
        code = frame.f_code
        if code in self.shown:
            if not self.frames and code is not self.first:
                return None
            is_first = not self.frames
            self.frames.append(frame)
            if is_first:
                self.began = self.clock()
                self.open = self._event(frame, self.shown[code].start)
                self.has_returned = False
            return self._ran
        if code in self.watched and self.frames:
            watched = self.watched[code]
            if self.open is not None and watched.kind:
                self.open.kind = watched.kind
            if watched.note is not None:
                frame.f_trace_lines = False
                return self._watching(watched.note)
        return None

    def _ran(self, frame: FrameType, event: str, argument: Any) -> Any:
        """The trace function of shown frames."""
        if event == "line":
            line = self.shown[frame.f_code].statement(frame.f_lineno)
            opened = self.open
            is_same = opened is not None and (opened.line, opened.depth) == (line, self.frames.index(frame))
            if not is_same:
                self._close()
                self.open, self.has_returned = self._event(frame, line), False
        elif event == "return" and frame in self.frames:
            del self.frames[self.frames.index(frame) :]
            watched = self.watched.get(frame.f_code)
            if watched is not None and watched.note is not None:
                watched.note(frame, argument)
            self._close()
            self.open = None
            if self.frames:
                caller = self.frames[-1]
                self.open = self._event(caller, self.shown[caller.f_code].statement(caller.f_lineno))
                self.has_returned = True
        return self._ran

    def _watching(self, note: Callable[[FrameType, Any], None]) -> Any:
        def ended(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "return":
                began = self.clock()
                note(frame, argument)
                self.began += self.clock() - began
            return ended

        return ended

    def _event(self, frame: FrameType, line: int) -> Event:
        return Event(self.shown[frame.f_code], line, self.frames.index(frame))

    def _close(self) -> None:
        """End the open event: note its time and what it changed."""
        now = self.clock()
        if self.open is not None:
            state = self.read(self.frames)
            self.open.nanoseconds = now - self.began
            self.open.patch = difference(self.state, state)
            self.state = state
            if self.has_returned and not self.open.patch and not self.open.kind and self.events:
                self.events[-1].nanoseconds += self.open.nanoseconds
            else:
                self.events.append(self.open)
                if len(self.events) > MOST_EVENTS:
                    raise ConfigError(f"A recording shows at most {MOST_EVENTS} lines; use fewer or shorter requests.")
        self.began = self.clock()
