"""The tool calls in an answer, as OpenAI's clients read them: as deltas of a stream, or in one message.

Introduced in phase 12. Invariant: the deltas of a stream, joined, give the same message as the non-streamed answer.
"""

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.engine.output import StepOutput
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer
from shared.text.tool_format import ToolFormat
from shared.text.tools import CallArguments, CallStart, Content, Delta, ToolParser

_SPECIAL = "\udfff"
"""Begins the mark of a special token. No text from a model contains it, so a mark that is written out in a text is not
one."""


@dataclass(frozen=True)
class ToolReading:
    """How the calls of an answer are read.

    Attributes:
        names: the functions that may be called.
        shown: the marks of the special tokens around calls and thoughts, by id; their outputs have no text.
        has_several, is_spelled, is_first: as for :class:`ToolParser`.
    """

    form: ToolFormat
    names: Collection[str]
    shown: Mapping[int, str]
    has_several: bool
    is_spelled: bool
    is_first: bool

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        form: ToolFormat,
        tools: Sequence[Mapping[str, Any]],
        *,
        has_several: bool,
        is_spelled: bool = False,
        is_first: bool = False,
    ) -> "ToolReading":
        marks = {mark: tokenizer.token_id(mark) for mark in (form.opening, form.closing, *(form.thought or ()))}
        special = {mark: token_id for mark, token_id in marks.items() if token_id in tokenizer.special_ids}
        shown = {token_id: _SPECIAL + mark for mark, token_id in special.items() if token_id is not None}

        def marked(mark: str) -> str:
            return _SPECIAL + mark if mark in special else mark

        thought = form.thought and (marked(form.thought[0]), marked(form.thought[1]))
        form = replace(form, opening=marked(form.opening), closing=marked(form.closing), thought=thought)
        return cls(form, [tool["function"]["name"] for tool in tools], shown, has_several, is_spelled, is_first)

    def parser(self) -> ToolParser:
        return ToolParser(
            self.form, self.names, has_several=self.has_several, is_spelled=self.is_spelled, is_first=self.is_first
        )


class ToolAnswer:
    """Reads the outputs of one choice."""

    def __init__(self, reading: ToolReading) -> None:
        self._shown = reading.shown
        self._parser = reading.parser()

    @property
    def has_calls(self) -> bool:
        return self._parser.num_calls > 0

    def deltas(self, output: StepOutput) -> list[dict[str, Any]]:
        """The ``delta`` objects for one more output."""
        mark = "" if output.token_id is None else self._shown.get(output.token_id, "")
        return list(map(_delta, self._parser.push(mark + output.text)))

    def last_deltas(self, reason: FinishReason | None) -> list[dict[str, Any]]:
        """The deltas at the end of the output, which a limit may have caused."""
        return list(map(_delta, self._parser.flush(is_cut=reason is FinishReason.LENGTH)))


def whole_message(reading: ToolReading, outputs: Sequence[StepOutput]) -> dict[str, Any]:
    """The fields of the message of a whole answer: ``content``, which is None if there are only calls, and the
    calls."""
    answer = ToolAnswer(reading)
    content, calls = "", []
    reason = outputs[-1].finish_reason if outputs else None
    for delta in [*(delta for output in outputs for delta in answer.deltas(output)), *answer.last_deltas(reason)]:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({"id": call["id"], "type": "function", "function": call["function"]})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}


def _delta(delta: Delta) -> dict[str, Any]:
    match delta:
        case Content(text):
            return {"content": text.replace(_SPECIAL, "")}
        case CallStart(index, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
