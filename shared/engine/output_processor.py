"""From committed tokens to client outputs: text, stop strings, finish reasons. Introduced in phase 4.

The output processor runs after the commit. It reads each request's tokens from the first that it has not processed, and
returns the requests that have finished. So a step that is interrupted between commit and processing loses nothing:
``catch_up`` produces the missing outputs, and the next step returns them. Invariants: an output is returned once; a
request's last output is followed by no other; a finished request is returned until it is retired.
"""

from collections.abc import Iterable

from shared.engine.output import OutputStream, StepOutput, make_output
from shared.engine.request import Request, RequestStatus
from shared.scheduling.schedule import Schedule
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer


class OutputProcessor:
    """Processes the outputs of all requests. ``max_seq_len`` as in ``OutputStream``."""

    def __init__(self, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.streams: dict[Request, OutputStream] = {}  # of the unfinished requests
        self.ready: list[StepOutput] = []
        self.finished: list[Request] = []  # as last returned

    def add(self, request: Request) -> None:
        """Start processing a request, before its first output token."""
        self.streams[request] = OutputStream(request, self.tokenizer, self.max_seq_len)

    def drop(self, request: Request) -> None:
        """Discard a request and its pending outputs; its id may be reused."""
        self.streams.pop(request, None)
        self.ready = [output for output in self.ready if output.request_id != request.request_id]

    def process(self, schedule: Schedule) -> list[Request]:
        """Make the outputs of the schedule's new tokens; return the requests that have finished."""
        return self._follow(schedule.requests)

    def catch_up(self) -> list[Request]:
        """Do the same for all requests, after a step that was interrupted between the commit and the end of
        ``process``."""
        return self._follow(list(self.streams))

    def take(self) -> list[StepOutput]:
        """Return the outputs made since the last call."""
        outputs, self.ready = self.ready, []
        return outputs

    def _follow(self, requests: Iterable[Request]) -> list[Request]:
        finished = [request for request in self.finished if request.status is not RequestStatus.FINISHED]
        streams, ready, texts = self.streams, self.ready, self.tokenizer.token_texts
        for request in requests:
            stream = streams.get(request)
            if (  # its next token adds whole characters and nothing else, as most do: what `push` returns then
                stream is not None
                and 0 < (number := stream.num_tokens) < stream.num_plain
                and not stream.has_ended
                and len(ids := request.output_ids) == number + 1
                and (token_id := ids[number]) not in stream.end_ids
                and stream.decoder.holds_nothing
                and (piece := texts[token_id]) is not None
                and request.error is None
            ):
                stream.num_tokens = number + 1
                ready.append(make_output((request.request_id, token_id, piece, None, None, None, None, 0, 0, 0, None)))
                continue
            if stream is None:  # the request has finished; drop the token that a step in flight computed for it
                continue
            if request.error is not None:
                ready.append(StepOutput(request.request_id, None, "", FinishReason.ERROR, error=request.error))
                del streams[request]
                continue
            ids, all_logprobs = request.output_ids, request.output_logprobs
            while (number := stream.num_tokens) < len(ids) and not stream.has_ended:
                output = stream.push(ids[number], all_logprobs[number] if all_logprobs else None)
                if stream.has_ended:
                    output = _last(output, request, stream.num_tokens)
                ready.append(_first(output, request) if number == 0 else output)
            if stream.limit == 0 and request.num_computed_tokens == request.num_prompt_tokens:
                ready.append(_first(stream.end(), request))
            if stream.has_ended:
                finished.append(request)
        self.finished = finished
        for request in finished:  # last, so that the next call returns them if this one is interrupted
            self.streams.pop(request, None)
        return finished


def _first(output: StepOutput, request: Request) -> StepOutput:
    """The first output of a request, with facts known about its prompt."""
    logprobs = tuple(request.prompt_logprobs) or None
    return output._replace(prompt_logprobs=logprobs, num_cached_tokens=request.num_cached_tokens)


def _last(output: StepOutput, request: Request, num_tokens: int) -> StepOutput:
    """The last output of a request, its ``num_tokens``-th, with its draft counts."""
    num_dropped = max(0, len(request.output_ids) - num_tokens - 1)  # accepted drafts: the last token is not a draft
    return output._replace(
        num_accepted_drafts=request.num_accepted_drafts - num_dropped,
        num_rejected_drafts=request.num_rejected_drafts + num_dropped,
    )
