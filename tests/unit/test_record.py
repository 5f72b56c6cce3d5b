"""What a step's record says of requests that fail, and of the load between two steps."""

from shared.engine.config import EngineConfig
from shared.engine.record import EngineLoad, StepRecord
from shared.scheduling.chunked import ChunkedScheduler
from shared.text.tokenizer import Tokenizer
from tests.unit.scheduling_loop import LETTER, Loop, TokenPool


def test_a_failed_request_is_in_one_field_of_a_record(tokenizer: Tokenizer) -> None:
    loop = Loop(ChunkedScheduler(EngineConfig(), TokenPool(40), 48), tokenizer, lambda request, index: LETTER)
    scheduler, (decoding, failing) = loop.scheduler, [loop.add_new(name) for name in "ab"]
    loop.step()
    scheduler.verified = [("a", 1, 2)]  # of an earlier step
    loop.add_new("c", 5)
    broken = loop.add_new("d", 6)
    schedule = scheduler.schedule()
    assert EngineLoad.of(scheduler).kv_usage == (4 + 4 + 5 + 6) / 40, "what is reserved, written or not"
    loop.finish(schedule, [failing, broken])
    record = StepRecord.of(scheduler, schedule, loop.processor.take())
    assert (record.step, record.failed, record.finished) == (1, ("b", "d"), ())
    assert (record.decoded, record.prefilled, record.prefill_starts) == (("a",), (("c", 5),), (0,))
    assert (record.verified, record.num_running, record.kv_used_tokens) == ((), 2, 4 + 5)
    assert decoding.last_step == 2
