"""Function calls in a model's text: how a chat format writes them, and a parser for a stream.

A model trained on tools writes its calls as text, in its own form, in which a trigger opens a call. The parser
separates the text into content and calls: for a call, first the name, then pieces of its arguments exactly as
generated. Text that looks like a call but is not one is returned as content. Introduced in phase 12.

Invariants: the result depends only on the whole text, never on how it is divided into pieces; no part of a trigger is
content unless no call follows it; if a grammar spells calls, exactly what the grammar allows as a call counts as one.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from shared.text.call_reader import BrokenCallError, CallReader
from shared.text.tool_format import ToolFormat


@dataclass(frozen=True)
class Content:
    """A piece of text outside calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; ``index`` counts the calls of an answer."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = Content | CallStart | CallArguments
_BLANKS = " \n"


class _Mode(Enum):
    BEGIN = auto()  # nothing but whitespace so far
    THINKING = auto()
    FIRST = auto()  # a call may begin here, but nowhere later
    FREE = auto()
    CALL = auto()
    AFTER = auto()  # after a call's object, before its closing
    PLAIN = auto()  # no call can follow


class ToolParser:
    """Reads one answer. ``num_calls`` is the number of calls so far.

    Args:
        names: the functions that may be called; an object with another name is content.
        has_several: False: only the first call is read as one.
        is_spelled: a grammar spells the answer's calls; otherwise the model writes them freely.
        is_first: no text except thoughts precedes a call, as when the grammar allows only calls, or calls or a format.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        *,
        has_several: bool = True,
        is_spelled: bool = False,
        is_first: bool = False,
    ) -> None:
        self.form, self.names = form, frozenset(names)
        self.num_calls = 0
        self._spelling = (form.head, form.middle) if is_spelled else None
        self._is_first = is_first or not form.opening
        self._blanks = "" if is_first else _BLANKS  # text that may precede the first call
        self._is_cut = False
        self._after_call = _Mode.FREE if has_several and form.has_several else _Mode.PLAIN
        self._mode = _Mode.BEGIN
        self._text = ""  # undecided text; in the mode CALL, the part that the reader has not read yet
        self._reader = CallReader(())
        self._opened = self._read = ""  # of a call that is not known yet: its opening, and what the reader has read

    def push(self, piece: str) -> list[Delta]:
        """The results that one more piece of text settles."""
        return self._steps(self._text + piece, is_end=False)

    def flush(self, *, is_cut: bool = False) -> list[Delta]:
        """The end of the text: undecided text is content, except for whitespace and a partial closing after a call.

        If a limit has truncated the text, a possible beginning of a call is not content: before its name is complete,
        it is dropped; afterwards it is a call, whose arguments may be truncated.
        """
        self._is_cut = is_cut
        return self._steps(self._text, is_end=True)

    def _steps(self, text: str, *, is_end: bool) -> list[Delta]:
        deltas: list[Delta] = []
        before: tuple[_Mode, str] | None = None
        self._text = text
        while before != (self._mode, self._text):
            before = self._mode, self._text
            deltas += self._step(is_end)
        return deltas

    def _step(self, is_end: bool) -> Iterator[Delta]:
        match self._mode:
            case _Mode.BEGIN:
                self._begin(is_end)
            case _Mode.THINKING:
                assert self.form.thought is not None
                thought, end, after = self._text.partition(self.form.thought[1])
                if end:
                    self._mode = _Mode.FIRST if self._is_first else _Mode.FREE
                    self._text, self._blanks = after, self._blanks or "\n"
                    yield Content(thought + end)
                else:
                    yield from self._content(_overlap(self._text, self.form.thought[1]), is_end)
            case _Mode.FIRST:
                self._first(is_end)
            case _Mode.FREE:
                before, opening, after = self._text.partition(self.form.opening)
                if opening:
                    content = before.rstrip()
                    self._open(before[len(content) :] + opening, after)
                    yield from [Content(content)] if content else []
                else:
                    num_undecided = _overlap(self._text, self.form.opening)
                    yield from self._content(num_undecided, is_end and not (self._is_cut and num_undecided))
                    if is_end:
                        self._text = ""
            case _Mode.CALL:
                yield from self._call(is_end)
            case _Mode.AFTER:
                self._behind(is_end)
            case _Mode.PLAIN:
                yield from self._content(0, is_end)

    def _begin(self, is_end: bool) -> None:
        text = self._text.lstrip(self._blanks)
        thinks = _begins(text, self.form.thought[0]) if self.form.thought else False
        if not is_end and (thinks is None or not text):
            return
        if thinks:
            self._mode = _Mode.THINKING
        else:
            self._mode = _Mode.FIRST if self._is_first else _Mode.FREE

    def _first(self, is_end: bool) -> None:
        opening = self.form.opening
        text = self._text.lstrip(self._blanks)
        calls = _begins(text, opening or "{")
        if calls:
            self._open(self._text[: len(self._text) - len(text)] + opening, text[len(opening) :])
        elif calls is False or is_end:
            self._mode = _Mode.PLAIN
            self._text = "" if text and calls is None and self._is_cut else self._text

    def _open(self, opened: str, after: str) -> None:
        self._mode, self._reader = _Mode.CALL, CallReader(self.names, self._spelling)
        self._opened, self._read, self._text = opened, "", after

    def _call(self, is_end: bool) -> Iterator[Delta]:
        """Run the reader; if the text turns out not to be a call, it is read again, as content."""
        reader, count, is_broken = self._reader, 0, False
        was_known = reader.name is not None
        while count < len(self._text) and not (reader.is_done or is_broken):
            try:
                reader.read(self._text[count])
                count += 1
            except BrokenCallError:
                is_broken = True
        is_over = reader.is_done or is_broken or is_end
        self._read += self._text[:count]
        self._text = self._text[count:]
        if reader.name is None:
            if is_end and self._is_cut and not is_broken and (self.form.opening or not reader.has_others):
                self._mode = _Mode.PLAIN
                if reader.named is not None:
                    self.num_calls += 1
                    yield CallStart(self.num_calls - 1, reader.named)
            elif is_over:
                self._mode = _Mode.FREE if self.form.opening else _Mode.PLAIN
                self._text = self._read + self._text
                yield from [Content(self._opened)] if self._opened else []
            return
        if not was_known:
            self.num_calls += 1
            yield CallStart(self.num_calls - 1, reader.name)
        if arguments := reader.take():
            yield CallArguments(self.num_calls - 1, arguments)
        if is_over:
            self._mode = _Mode.AFTER if self.form.closing else self._after_call

    def _behind(self, is_end: bool) -> None:
        text = self._text.lstrip()
        is_closed = _begins(text, self.form.closing)
        if is_closed is None and not is_end:
            return
        if is_closed is not False:
            self._text = text[len(self.form.closing) :]
        self._mode = self._after_call

    def _content(self, num_undecided: int, is_end: bool) -> Iterator[Delta]:
        """Release the text except for its end: whitespace, which is dropped before and after a call, and the beginning
        of a trigger."""
        decided = self._text if is_end else self._text[: len(self._text) - num_undecided].rstrip()
        self._text = self._text[len(decided) :]
        if decided.strip() or (decided and not self.num_calls):
            yield Content(decided)


def _begins(text: str, mark: str) -> bool | None:
    """Whether a text begins with a mark; None if that is still undecided."""
    if text.startswith(mark):
        return True
    return None if mark.startswith(text) else False


def _overlap(text: str, mark: str) -> int:
    """The length of the longest suffix of a text that is a proper prefix of a mark."""
    longest = min(len(text), len(mark) - 1)
    return next((count for count in range(longest, 0, -1) if mark.startswith(text[-count:])), 0)
