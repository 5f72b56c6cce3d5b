"""From committed tokens to what clients see: texts, stop strings, ends. Introduced in phase 4.

It stands outside the scheduler, which knows counts, and behind the commit: it reads the tokens that requests have, from
the first that it has not yet seen, and says which requests have finished. So a step that was broken off between the two
loses nothing: ``catch_up`` makes the outputs, and they come out with those of the next step. Invariant: an output is
given once, and none follows the one that ends its request.
"""

from collections.abc import Iterable

from shared.engine.output import OutputStream, StepOutput
from shared.engine.request import Request
from shared.scheduling.schedule import Schedule
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer


class OutputProcessor:
    """Follows the answers of all requests. ``max_seq_len`` as in ``OutputStream``."""

    def __init__(self, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.streams: dict[Request, OutputStream] = {}  # of the requests whose answers have not ended
        self.ready: list[StepOutput] = []

    def add(self, request: Request) -> None:
        """Follow a request from its first token on."""
        self.streams[request] = OutputStream(request, self.tokenizer, self.max_seq_len)

    def drop(self, request: Request) -> None:
        """Give no further output of a request, whose id may be used again."""
        self.streams.pop(request, None)
        self.ready = [output for output in self.ready if output.request_id != request.request_id]

    def process(self, schedule: Schedule) -> list[Request]:
        """Make outputs of the tokens that the schedule's requests have got; returns the requests that have finished."""
        return self._follow([entry.request for entry in schedule])

    def catch_up(self) -> list[Request]:
        """The same for all requests: after a step that was broken off between its commit and ``process``, or in it."""
        return self._follow(list(self.streams))

    def take(self) -> list[StepOutput]:
        """The outputs that were made since the last call."""
        outputs, self.ready = self.ready, []
        return outputs

    def _follow(self, requests: Iterable[Request]) -> list[Request]:
        finished = []
        for request in requests:
            stream = self.streams.get(request)
            if stream is None:  # it has ended; what a step in flight computed for it is no output
                continue
            if request.error is not None:
                self.ready.append(StepOutput(request.request_id, None, "", FinishReason.ERROR, error=request.error))
                del self.streams[request]
                continue
            for number in range(stream.num_tokens, len(request.output_ids)):
                if stream.has_ended:
                    break
                logprobs = request.output_logprobs[number] if request.output_logprobs else None
                self.ready.append(stream.push(request.output_ids[number], logprobs))
            if stream.has_ended:
                finished.append(request)
        for request in finished:  # at last, so that whatever breaks off this call, the next one returns them
            del self.streams[request]
        return finished
