"""Chunks from Python: register texts once, ask over any of them, in any order. Introduced in phase 9.1.

    from shared.tracks.segments.llm import ChunkedLLM
    from shared.sampling.params import SamplingParams

    llm = ChunkedLLM("smollm2-135m", max_seq_len=8192)
    manuals = [llm.register(text) for text in texts]
    answer = llm.generate_from_chunks([manuals[3], manuals[0]], "\\nQuestion: ...\\nAnswer:", SamplingParams())
    print(answer.text)

Invariant: when a method returns or raises, the engine holds none of its requests.
"""

from collections.abc import Sequence
from typing import Any

from shared.engine.config import EngineConfig
from shared.engine.llm import Answer
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.tracks.segments.inquiry import ChunkInfo, described


class ChunkedLLM:
    """A loaded model, and the engine of phase 9.1. Arguments and exceptions as of :class:`shared.engine.llm.LLM`."""

    def __init__(self, model: str, **config: Any) -> None:
        self.engine = find_lesson("09.1").engine(EngineConfig(model=model, **config))

    def register(self, content: str | Sequence[int], role: str = "user") -> str:
        """Compute a chunk, unless it is in the cache, and return its id.

        Args:
            content: text, or token ids. A text is encoded as a prompt of its own, with what the model puts first.
            role: part of the id, so that equal texts in different roles are different chunks.

        Raises RequestError for an empty or too long content.
        """
        chunk_id: str = self.engine.register(content, role)
        while self.engine.has_work():
            self.engine.step()
        return chunk_id

    def blend(self, chunk_ids: Sequence[str], fraction: float) -> str:
        """Put chunks together and compute a fraction of their tokens again; the id of the result, a chunk.

        Raises RequestError if an id is unknown, the fraction is not from 0 to 1, or the whole is too long.
        """
        registry = self.engine.chunks
        chunks = [registry.find(chunk_id) for chunk_id in chunk_ids]
        registry.touch(chunks)
        for chunk in chunks:
            registry.want(chunk)
        while self.engine.has_work():
            self.engine.step()
        blended: str = self.engine.blend(chunk_ids, fraction)
        return blended

    def generate_from_chunks(
        self, chunk_ids: Sequence[str], prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Answer:
        """The answer to a prompt that follows these chunks, in this order; chunks that were evicted are computed again.

        Raises RequestError if an id is unknown, or the prompt or the parameters are invalid.
        """
        engine = self.engine
        request_id = engine.add_request(prompt, params or SamplingParams(), chunk_ids=chunk_ids)
        answer = Answer(list(engine.scheduler.waiting[request_id].prompt_ids))
        try:
            while answer.finish_reason is None:
                for output in engine.step():
                    if output.request_id == request_id:
                        answer.add(output)
        finally:
            engine.abort(request_id)
        return answer

    def info(self, chunk_id: str | None = None) -> list[ChunkInfo]:
        """What is known of one chunk, or of all, least recently used first; raises RequestError for an unknown id."""
        registry = self.engine.chunks
        return described(self.engine, registry.chunks.values() if chunk_id is None else [registry.find(chunk_id)])

    def evict(self, chunk_id: str) -> bool:
        """Free a chunk's keys and values; False if they were not in the cache. The id stays known.

        Raises RequestError if the chunk is unknown, or a running request uses it.
        """
        registry = self.engine.chunks
        return registry.drop(registry.find(chunk_id)) > 0
