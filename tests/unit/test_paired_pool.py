"""The two pools of a model and its draft model, where a step is interrupted."""

from types import SimpleNamespace

from shared.cache.paged_layout import PagedSizes
from shared.cache.paired import PairedPool
from shared.cache.prefix import PrefixKVCachePool
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.sampling.params import SamplingParams
from tests.unit.machine_settings import MAX_SEQ_LEN, Followed


def test_drafts_of_an_interrupted_step_are_forgotten_with_their_blocks() -> None:
    sizes = PagedSizes(8, 2, 2, 64, MAX_SEQ_LEN)
    pair = PairedPool(PrefixKVCachePool(sizes, None), PrefixKVCachePool(sizes, None))
    drafter = Followed(EngineConfig(), pair, SimpleNamespace())
    request = Request("a", [5, 6, 7], SamplingParams(max_new_tokens=12), 0)
    pair.admit(request)
    assert pair.reserve(request, 7)
    twin = pair.twins[request]
    drafter.pool.commit(twin, 3)
    twin.draft_ids = [10, 11, 12, 13]  # the keys of the first three are written
    pair.shrink(request, 5)
    assert twin.draft_ids == [10, 11, 12]
    pair.shrink(request, request.num_tokens)  # as after an interruption
    for token_id in (10, 11, 12):
        request.append(token_id)
    assert pair.reserve(request, 7)  # in other blocks, perhaps
    assert drafter._follow(twin, request) == 3
