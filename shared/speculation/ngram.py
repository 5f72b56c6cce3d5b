"""Drafts without a model: the tokens that followed the same tokens earlier. Introduced in phase 11.

An answer often repeats parts of its prompt, or of itself: names, quotations, code. So the last tokens are looked up in
the text before them, and the tokens that followed there are proposed (prompt lookup decoding: Saxena 2023; LLMA: Yang
et al., arXiv 2304.04487). The match is the position with the longest common suffix; the latest one wins ties.

The search is zlib's LZ77: a table holds the last position of each pair of tokens, and each position links to the
previous one with the same pair. A new token costs one entry, and a search visits at most ``MOST_VISITED`` positions, so
neither cost grows with the text.

A request may bring a prediction of its answer (``SamplingParams.prediction_ids``). The index then treats the prediction
as an earlier answer to the same prompt, so a lookup finds it once the first token of the answer is known.

Invariant: the index has every pair of known tokens except the newest, which is looked up.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from shared.engine.request import Request, RequestStatus
from shared.scheduling.schedule import Schedule
from shared.speculation.drafter import Drafter

MOST_VISITED = 32
"""Maximum number of positions that a search compares, starting with the latest."""
LONGEST = 32
"""Maximum length of a suffix that is compared."""


class NGramIndex:
    """The tokens of one request, and where each pair of them occurs."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        # where a request's tokens begin in `ids`; with a prediction, only its last prompt token is there
        self.offset = 0
        self.last: dict[tuple[int, int], int] = {}  # the end of the latest indexed occurrence of a pair
        self.before = [0, 0]  # by the end of an occurrence: the end of the one before it, or 0; no pair ends at 0 or 1

    def extend(self, new_ids: Sequence[int]) -> None:
        """Append tokens; pairs that are no longer the newest enter the index."""
        self.ids += new_ids
        ids, last = self.ids, self.last
        for end in range(len(self.before), len(ids)):
            pair = ids[end - 2], ids[end - 1]
            self.before.append(last.get(pair, 0))
            last[pair] = end

    def following(self, count: int) -> list[int]:
        """Up to ``count`` tokens that followed the longest earlier occurrence of the suffix; empty if not even a pair
        occurs again.

        If a suffix overlaps its own repetition, it is continued periodically.
        """
        ids, size = self.ids, len(self.ids)
        # exercise 11x1: find the suffix
        # hint: self.last has where the newest pair occurred last, and self.before[end] where before that; 0: nowhere
        # hint: from each such end count back while the tokens equal the text's last ones, up to LONGEST tokens
        # hint: keep the longest, and of equals the one that was found first; compare at most MOST_VISITED of them
        # hint: the tokens from `end` on followed; where they run out, the first of them are next again
        if size < 3:
            return []
        best, best_length = 0, 1
        end = self.last.get((ids[-2], ids[-1]), 0)
        for _ in range(MOST_VISITED):
            if end == 0:
                break
            length = 2
            while length < min(end, LONGEST) and ids[end - 1 - length] == ids[size - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = end, length
                if length == LONGEST:
                    break
            end = self.before[end]
        if best == 0:
            return []
        period = size - best
        return [ids[best + n % period] for n in range(count)]
        # end exercise


class NGramDrafter(Drafter):
    """Looks up the newest tokens of each request in its own text. The q of its drafts is one-hot, and they cost no
    forward."""

    def __init__(self) -> None:
        self.indices: WeakKeyDictionary[Request, NGramIndex] = WeakKeyDictionary()

    def propose(self, schedule: Schedule) -> None:
        for request, *_, num_drafts, _, _ in schedule:
            if num_drafts:
                is_running = request.status is RequestStatus.RUNNING
                request.draft_ids = self._index(request).following(num_drafts) if is_running else []

    def _index(self, request: Request) -> NGramIndex:
        """The index of all known tokens of a request."""
        index = self.indices.get(request)
        if index is None:
            index = self.indices[request] = NGramIndex()
            if request.params.prediction_ids:
                index.extend([*request.prompt_ids, *request.params.prediction_ids])
                index.offset = len(index.ids) - (request.num_prompt_tokens - 1)
        index.extend(request.ids(len(index.ids) - index.offset, request.num_tokens))
        return index
