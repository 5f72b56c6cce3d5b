"""The literal part of an answer that may, or must, call tools: thinking, free text, and the text around arguments.

Free text is a few states that read any byte and look for the opening of a call; thinking, likewise, looks for its end
(Knuth, Morris and Pratt, SIAM J. Comput. 1977); after the opening only the rest of a call can follow. So an answer with
calls is a grammar like any other, and masks, drafts and preemption need no special cases for tools. Introduced in phase
12.

Special tokens have no text. A grammar that names one (by ``SPECIAL_MARK`` and its name) allows it only there, since its
bytes begin with a byte that UTF-8 does not have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shared.grammar.automata.joining import Graph, document
from shared.grammar.tokens.vocabulary import SPECIAL_BYTE

SPECIAL_MARK = "\uffff"
"""Represents the byte with which special tokens begin, which is not a character."""
_BLANKS = b" \n"


class CallMode(StrEnum):
    """The form of an answer: free text that may contain calls, calls alone, or free text without calls."""

    AUTO = "auto"
    REQUIRED = "required"
    NONE = "none"


@dataclass(frozen=True)
class CallSpelling:
    """How calls are written: trigger, head, name, middle, arguments, closing.

    Attributes:
        trigger: ends free text; "" if a call is the whole answer. Then free text may begin like a call, up to the
            arguments.
        separator: between two calls; None: one call at most.
        hidden: marked special token that may precede a call without a trigger; None without it.
        thought: opens and closes thinking, which may come first; None: no thinking. The opening is "" if the prompt
            already contains it; then thinking does come first.
    """

    trigger: str
    head: str
    middle: str
    closing: str
    separator: str | None = None
    hidden: str | None = None
    thought: tuple[str, str] | None = None


class AnswerGraph:
    """The graph of an answer; ``has_format``: text outside calls follows a grammar instead of being free.

    Attributes:
        graph: leads into document i after the name of function i.
        behind: the state after arguments.
        beginnings: the states from which the answer may also continue with the format.
    """

    def __init__(
        self, mode: CallMode, spelling: CallSpelling, names: Sequence[str], *, has_format: bool = False
    ) -> None:
        self.has_format = has_format
        self.beginnings: list[int] = []
        self.graph, self.mode, self.spelling, self.names = Graph(), mode, spelling, names
        graph = self.graph
        start = graph.state()
        end = graph.state(is_final=True)
        self.behind = graph.state()
        self.called = graph.state()  # after the trigger
        graph.word(self.behind, encoded(spelling.closing), end)
        if mode is not CallMode.NONE:
            self._heads(self.called)
            if spelling.separator is not None:
                graph.word(end, encoded(spelling.separator + spelling.trigger), self.called)
        if mode is CallMode.REQUIRED or has_format:
            self._required(start)
        elif spelling.trigger:
            self._free(start)
        else:
            self._free_or_call(start)

    def _heads(self, state: int) -> None:
        """From a state into the documents."""
        for number, head in enumerate(self._texts()):
            self.graph.word(state, head, document(number))

    def _texts(self) -> list[bytes]:
        spelling = self.spelling
        return [encoded(spelling.head + name + spelling.middle) for name in self.names]

    def _call(self, state: int) -> None:
        """From a state into a call, which must follow, or into the format."""
        if self.has_format:
            self.beginnings.append(state)
        if self.mode is CallMode.NONE:
            return
        if self.spelling.trigger:
            self.graph.word(state, encoded(self.spelling.trigger), self.called)
            return
        self._heads(state)
        if self.spelling.hidden is not None:
            self.graph.word(state, encoded(self.spelling.hidden), self.called)

    def _required(self, start: int) -> None:
        """A call or the format, optionally preceded by thinking and up to two line breaks."""
        if not self._is_thinking:
            self._call(start)
        if self.spelling.thought is None:
            return
        lines = [self.graph.state() for _ in range(3)]
        for number, state in enumerate(lines):
            self._call(state)
            if number:
                self.graph.rows[lines[number - 1]][ord("\n")] = state
        self._think(self.spelling.thought, start, lines[0], is_final=False)

    @property
    def _is_thinking(self) -> bool:
        """Whether the answer begins inside thoughts."""
        return self.spelling.thought is not None and not self.spelling.thought[0]

    def _think(self, thought: tuple[str, str], start: int, after: int, *, is_final: bool) -> None:
        """Thinking from the state ``start`` on, followed by the state ``after``."""
        opening, closing = map(encoded, thought)
        (thinking, *_) = self._search(closing, after, is_final=is_final)
        if opening:
            self.graph.word(start, opening, thinking)
        else:
            self.graph.rows[start] = dict(self.graph.rows[thinking])
            self.graph.final |= {start} if is_final else set()

    def _free(self, start: int) -> None:
        """Free text up to the trigger, optionally preceded by thinking."""
        graph, trigger = self.graph, encoded(self.spelling.trigger)
        states = self._search(trigger, self.called if self.mode is CallMode.AUTO else None, is_final=True)
        thought = self.spelling.thought
        graph.final.add(start)
        graph.rows[start] |= graph.rows[states[0]]
        if thought is None:
            return
        graph.rows[start] |= dict.fromkeys(_BLANKS, start)
        if thought[0][:1] in ("", SPECIAL_MARK):  # no text begins like it
            self._think(thought, start, states[0], is_final=True)
            return
        opening, closing = map(encoded, thought)
        (thinking, *_) = self._search(closing, states[0], is_final=True)
        free, state = states[0], start
        for index, byte in enumerate(opening):  # either as free text or as the beginning of thinking
            free = graph.rows[free][byte]
            following = thinking if index == len(opening) - 1 else graph.state(is_final=True)
            graph.rows[state][byte] = following
            if following != thinking:
                graph.rows[following] |= graph.rows[free]
            state = following

    def _free_or_call(self, start: int) -> None:
        """An answer that is a call from its first byte on, or free text."""
        graph = self.graph
        if self.spelling.thought is not None:  # opened by the prompt: these models never open thinking themselves
            answer = graph.state()
            self._think(self.spelling.thought, start, answer, is_final=True)
            start = answer
        free = graph.state(is_final=True)
        self._read_text(free)
        first = len(graph.rows)
        refused = set()
        if self.mode is CallMode.AUTO:
            self._heads(start)
        else:
            refused = {(graph.word(start, head[:-1]), head[-1]) for head in self._texts()}
        graph.rows[start] |= dict.fromkeys(_BLANKS, start)
        for state in [start, *range(first, len(graph.rows))]:
            others = {byte: to for byte, to in graph.rows[free].items() if (state, byte) not in refused}
            graph.rows[state] = others | graph.rows[state]
            graph.final.add(state)
        if self.mode is CallMode.AUTO and self.spelling.hidden is not None:
            graph.word(start, encoded(self.spelling.hidden), self.called)

    def _search(self, mark: bytes, found: int | None, *, is_final: bool) -> list[int]:
        """States that read text up to a mark; each state represents how much of the mark has been read. None: the mark
        is refused."""
        graph = self.graph
        states = [graph.state(is_final=is_final)]
        self._read_text(states[0])
        if mark[0] == SPECIAL_BYTE:  # one token, so no text begins like it
            if found is not None:
                graph.word(states[0], mark, found)
            return states
        states += [graph.state(is_final=is_final) for _ in mark[1:]]
        shorter = states[0]  # the state if the mark began later
        for index, (state, byte) in enumerate(zip(states, mark, strict=True)):
            if index:
                graph.rows[state] = dict(graph.rows[shorter])
                shorter = graph.rows[shorter].get(byte, states[0])
            following = found if index == len(mark) - 1 else states[index + 1]
            if following is None:
                graph.rows[state].pop(byte, None)
            else:
                graph.rows[state][byte] = following
        return states

    def _read_text(self, state: int) -> None:
        """A state that reads any text, one whole character at a time, so that a special token never splits a
        character."""
        graph, following = self.graph, state
        graph.rows[state] = dict.fromkeys(range(0x80), state)
        for first, last in ((0xC2, 0xDF), (0xE0, 0xEF), (0xF0, 0xF4)):
            inside = graph.state()
            graph.rows[inside] = dict.fromkeys(range(0x80, 0xC0), following)
            graph.rows[state] |= dict.fromkeys(range(first, last + 1), inside)
            following = inside


def encoded(text: str) -> bytes:
    """The bytes of a literal with marked special tokens."""
    return bytes([SPECIAL_BYTE]).join(part.encode() for part in text.split(SPECIAL_MARK))
