"""From committed tokens to what clients see: texts, stop strings, ends. Introduced in phase 4.

It stands outside the scheduler, which knows counts, and behind the commit: it reads the tokens that requests have, from
the first that it has not yet seen, and says which requests have finished. So a step that was broken off between the two
loses nothing; its tokens come out with the next. Invariant: an output is given once, and none follows the one that ends
its request.
"""

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
        """Give no further output of a request."""
        self.streams.pop(request, None)

    def process(self, schedule: Schedule) -> list[Request]:
        """Make outputs of the tokens that the schedule's requests have got; returns the requests that have finished."""
        finished = []
        for entry in schedule:
            request = entry.request
            stream = self.streams.get(request)
            if stream is None:  # it has ended; what a step in flight computed for it is no output
                continue
            if request.error is not None:
                self.ready.append(StepOutput(request.request_id, None, "", FinishReason.ERROR, error=request.error))
                self.drop(request)
                continue
            for number in range(stream.num_tokens, len(request.output_ids)):
                logprobs = request.output_logprobs[number] if request.output_logprobs else None
                output = stream.push(request.output_ids[number], logprobs)
                self.ready.append(output)
                if output.finish_reason is not None:
                    self.drop(request)
                    finished.append(request)
                    break
        return finished

    def take(self) -> list[StepOutput]:
        """The outputs that were made since the last call."""
        outputs, self.ready = self.ready, []
        return outputs
