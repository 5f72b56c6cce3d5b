"""Segments in Python: register texts once, then ask about any of them, in any order. Introduced in phase 9.1.

    from shared.tracks.segments.llm import SegmentLLM
    from shared.sampling.params import SamplingParams

    llm = SegmentLLM("smollm2-135m", max_seq_len=8192)
    manuals = [llm.register(text) for text in texts]
    answer = llm.generate_from_segments([manuals[3], manuals[0]], "\\nQuestion: ...\\nAnswer:", SamplingParams())
    print(answer.text)

Invariant: when a method returns or raises, no request of it is left in the engine.
"""

from collections.abc import Sequence
from typing import Any

from shared.engine.config import EngineConfig
from shared.engine.llm import Answer
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.tracks.segments.inquiry import SegmentInfo, described


class SegmentLLM:
    """A loaded model and phase 9.1's engine. Arguments and exceptions as for :class:`shared.engine.llm.LLM`."""

    def __init__(self, model: str, **config: Any) -> None:
        self.engine = find_lesson("09.1").engine(EngineConfig(model=model, **config))

    def register(self, content: str | Sequence[int], role: str = "user") -> str:
        """Compute a segment unless it is cached, and return its id.

        Args:
            content: text, or token ids. A text is encoded as a separate prompt, with the model's leading tokens.
            role: part of the id, so that equal texts in different roles are different segments.

        Raises RequestError for an empty or too long content.
        """
        segment_id: str = self.engine.register(content, role)
        while self.engine.has_work():
            self.engine.step()
        return segment_id

    def blend(self, segment_ids: Sequence[str], fraction: float) -> str:
        """Join segments and recompute a fraction of their tokens; returns the id of the resulting segment.

        Raises RequestError if an id is unknown, the fraction is not from 0 to 1, or the whole is too long.
        """
        registry = self.engine.segments
        segments = [registry.find(segment_id) for segment_id in segment_ids]
        registry.touch(segments)
        for segment in segments:
            registry.want(segment)
        while self.engine.has_work():
            self.engine.step()
        blended: str = self.engine.blend(segment_ids, fraction)
        return blended

    def generate_from_segments(
        self, segment_ids: Sequence[str], prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Answer:
        """The answer to a prompt after these segments, in this order; evicted segments are recomputed.

        Raises RequestError if an id is unknown, or the prompt or the parameters are invalid.
        """
        engine = self.engine
        request_id = engine.add_request(prompt, params or SamplingParams(), segment_ids=segment_ids)
        answer = Answer(list(engine.scheduler.waiting[request_id].prompt_ids))
        try:
            while answer.finish_reason is None:
                for output in engine.step():
                    if output.request_id == request_id:
                        answer.add(output)
        finally:
            engine.abort(request_id)
        return answer

    def info(self, segment_id: str | None = None) -> list[SegmentInfo]:
        """The facts about one segment, or about all, least recently used first; raises RequestError for an unknown
        id."""
        registry = self.engine.segments
        return described(self.engine, registry.segments.values() if segment_id is None else [registry.find(segment_id)])

    def evict(self, segment_id: str) -> bool:
        """Free a segment's keys and values; False if they were not cached. The id stays registered.

        Raises RequestError if the segment is unknown, or a running request uses it.
        """
        registry = self.engine.segments
        return registry.drop(registry.find(segment_id)) > 0
