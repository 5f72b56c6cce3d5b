"""Segments from Python: ids, answers, what is known of a segment, and eviction."""

from pathlib import Path
from typing import Any

import pytest

from shared.errors import QueueFullError, RequestError, UnknownSegmentError
from shared.sampling.params import SamplingParams
from shared.text.stopping import FinishReason
from shared.tracks.segments.inquiry import Blend, Content, Page, Use
from shared.tracks.segments.llm import SegmentLLM

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=6)
TEXTS = ["The capital of France is Paris.", "Zwölf Boxkämpfer jagen Viktor."]


@pytest.fixture
def llm(tiny_checkpoints: dict[str, Path]) -> SegmentLLM:
    return SegmentLLM(str(tiny_checkpoints["llama"]), max_seq_len=256, max_batch_size=2, prefill_chunk_size=8)


def test_the_same_text_is_registered_and_computed_once(llm: SegmentLLM, tiny_checkpoints: dict[str, Path]) -> None:
    assert llm.engine.config.model == str(tiny_checkpoints["llama"])
    name = llm.register(TEXTS[0])
    computed = llm.engine.runner.num_tokens_computed
    assert llm.register(TEXTS[0]) == name
    assert llm.engine.runner.num_tokens_computed == computed
    assert llm.register(TEXTS[0], "system") != name


def test_what_is_known_of_segments_and_eviction(llm: SegmentLLM) -> None:
    assert llm.info() == []
    names = [llm.register(text) for text in TEXTS]
    known = llm.info()
    assert [one.segment_id for one in known] == names
    num_tokens = len(llm.engine.tokenizer.encode(TEXTS[0]))
    model = llm.engine.model.config
    token_bytes = 2 * 4 * model.num_layers * model.num_kv_heads * model.head_dim
    assert (known[0].role, known[0].num_tokens, known[0].num_users) == ("user", num_tokens, 0)
    assert known[0].num_bytes == -(-num_tokens // 16) * 16 * token_bytes
    first = llm.generate_from_segments(names, [1, 2], PARAMS).token_ids
    assert llm.evict(names[0])
    assert not llm.evict(names[0])
    assert [one.num_bytes > 0 for one in llm.info()] == [False, True]
    assert llm.generate_from_segments(names, [1, 2], PARAMS).token_ids == first
    assert llm.info(names[0])[0].num_bytes > 0
    assert llm.evict(names[1])
    assert llm.info(llm.blend(names, 0.5))[0].num_bytes > 0


def test_an_interrupted_call_leaves_no_request(llm: SegmentLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    name = llm.register(TEXTS[0])
    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate_from_segments([name], [1, 2], PARAMS)
    assert not llm.engine.has_work()


def test_what_is_joined_stays_while_what_is_missing_of_it_is_computed(tiny_checkpoints: dict[str, Path]) -> None:
    """Of nine blocks, the last one registered has six; one of the others is evicted for it."""
    llm = SegmentLLM(str(tiny_checkpoints["llama"]), max_seq_len=128, block_size=16, num_gpu_blocks=9)
    names = [llm.register([n] * count) for n, count in ((1, 32), (2, 32), (3, 96))]
    assert [llm.info(name)[0].num_bytes > 0 for name in names] == [False, True, True]
    assert llm.info(llm.blend(names[:2], 0.5))[0].num_tokens == 64
    assert [llm.info(name)[0].num_bytes > 0 for name in names] == [True, True, False]


def test_contents_that_wait_to_be_computed_count_as_waiting_requests(tiny_checkpoints: dict[str, Path]) -> None:
    """So a client that registers without end is refused, as one that asks without end."""
    engine = SegmentLLM(str(tiny_checkpoints["llama"]), max_seq_len=256, max_waiting_requests=2).engine
    contents = [Content("user", (n, n + 1)) for n in range(4)]
    with pytest.raises(RequestError, match="3 requests come together and max_waiting_requests is 2"):
        Use(tuple(contents[:3])).answer(engine)
    assert not engine.segments.segments
    found = Use((contents[0], contents[1], contents[0])).answer(engine)
    assert [one.num_tokens for one in found] == [2, 2, 2]
    with pytest.raises(QueueFullError, match="2 requests wait"):
        Use((contents[2],)).answer(engine)
    while engine.has_work():
        engine.step()
    for one in found[:2]:
        engine.segments.drop(engine.segments.find(one.segment_id))
    with pytest.raises(RequestError, match="3 requests come together"):
        Use(tuple(contents[:3])).answer(engine)  # two of them are known and were evicted
    Use((contents[1], contents[0])).answer(engine)
    while engine.has_work():
        engine.step()
    again = Use((found[0].segment_id, contents[2])).answer(engine)
    assert [one.num_bytes > 0 for one in again] == [True, False]
    with pytest.raises(UnknownSegmentError):
        Use((contents[3], "ab")).answer(engine)
    assert len(engine.segments.segments) == 3, "an unknown id is found before anything is registered"
    engine.segments.max_bytes = engine.segments.num_bytes
    kept = Use((contents[3], found[1].segment_id)).answer(engine)[1]
    assert kept.segment_id == found[1].segment_id, "it is not forgotten for another one of its message"


def test_pages_of_segments_go_from_the_least_recently_used_to_the_last(llm: SegmentLLM) -> None:
    engine = llm.engine
    a, b, c, d = (engine.register([n, n]) for n in range(4))
    engine.segments.touch([engine.segments.find(a)])

    def page(*options: Any) -> tuple[list[str], bool]:
        found, has_more = Page(*options).answer(engine)
        return [one.segment_id for one in found], has_more

    assert page(2) == ([b, c], True)
    assert page(2, c) == ([d, a], False)
    assert page(4) == ([b, c, d, a], False)


def test_to_put_segments_together_ends_when_one_of_them_cannot_be_computed(
    llm: SegmentLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first message has a segment tried again that failed before; a message that is sent again does not. A request
    that waits for it ends too."""
    engine, names = llm.engine, tuple(llm.register(text) for text in TEXTS)
    forward, (first, second) = engine.model.forward, map(engine.segments.find, names)

    def failing(*args: Any) -> Any:
        raise RuntimeError("no memory")

    def ask(*, is_again: bool) -> Any:
        answer = Blend(names, 0.5, is_again).answer(engine)
        while engine.has_work():
            engine.step()
        return answer

    engine.segments.drop(second)
    monkeypatch.setattr(engine.model, "forward", failing)
    for _ in range(2):
        assert ask(is_again=False) is None
        with pytest.raises(RuntimeError, match=f"^segment {second.segment_id} could not be computed: .*RuntimeError"):
            ask(is_again=True)
    waiting, outputs = engine.add_request([1], PARAMS, segment_ids=names), list[Any]()
    while engine.has_work():
        outputs += engine.step()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [(waiting, FinishReason.ERROR)]
    monkeypatch.setattr(engine.model, "forward", forward)
    assert Blend(names, 0.5).answer(engine) is None
    assert Blend(names, 0.5, is_again=True).answer(engine) is None, "it is being tried again"
    assert ask(is_again=False) is None
    assert ask(is_again=True).num_tokens == len(first) + len(second)
