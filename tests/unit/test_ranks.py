"""Ranks without processes: what is sent to them, and that they compute the steps of rank 0 with it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cache.contiguous_pool import ContiguousKVCachePool
from shared.engine.batch import Batch
from shared.engine.captured_runner import CapturedRunner
from shared.engine.config import EngineConfig
from shared.engine.overlapped_runner import OverlappedRunner
from shared.engine.request import Request
from shared.engine.runner import Runner
from shared.errors import RankError
from shared.models.tokens import Tokens
from shared.parallel.batch import RankBatch, takes_plain_argmax
from shared.parallel.board import SLOT_BYTES, Board
from shared.parallel.channel import Receiver, Sender
from shared.parallel.collectives import Collectives
from shared.parallel.group import agreed_memory
from shared.parallel.runner import rank_runner
from shared.parallel.shard import Shard
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled
from tests.ranks import on_ranks
from tests.unit.test_captured_runner import Fixed, Recorded
from tests.unit.test_runner import VOCABULARY, Successor

SIZES = st.lists(st.sampled_from([0, 1, 1000, SLOT_BYTES - 200, SLOT_BYTES, 2 * SLOT_BYTES]), max_size=12)


def channel(size: int, check: Callable[[], None] = lambda: None) -> tuple[Sender, list[Receiver]]:
    board = Board(size)
    pipes = [Pipe() for _ in range(size - 1)]
    receivers = [Receiver(Board(size, board.fd), theirs, rank) for rank, (_, theirs) in enumerate(pipes, 1)]
    return Sender(board, [ours for ours, _ in pipes], check), receivers


@given(SIZES)
@settings(max_examples=25)
def test_messages_arrive_whole_and_in_order(sizes: list[int]) -> None:
    """Also those that are larger than a slot, and when a rank reads much later than another."""
    sender, receivers = channel(3)
    messages = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    got: dict[int, list[bytes]] = {}
    readers = [
        threading.Thread(target=lambda one=one: got.update({one.rank: [one.receive() for _ in sizes]}), daemon=True)
        for one in receivers
    ]
    for reader in readers:
        reader.start()
    for message in messages:
        sender.send(message)
    for reader in readers:
        reader.join(60)
    assert got == {1: messages, 2: messages}


def test_a_rank_that_reads_nothing_holds_rank_0_until_it_is_given_up() -> None:
    def check() -> None:
        raise RankError("Rank 1 of 2 made no progress")

    sender, _ = channel(2, check)
    for number in range(4):
        sender.send(number)
    with pytest.raises(RankError):
        sender.send(4)


def test_a_message_with_another_number_is_refused() -> None:
    sender, (receiver,) = channel(2)
    sender.number = 1
    sender.send("step")
    with pytest.raises(RuntimeError, match="received step 1 and the next one is 0: the ranks are not in step"):
        receiver.receive()


def test_when_the_argmax_of_raw_logits_is_enough() -> None:
    plain: dict[str, Any] = {"temperature": 0.0, "stop": ("x",), "ignore_eos": True, "seed": 3, "prompt_logprobs": 1}
    assert takes_plain_argmax(SamplingParams(**plain))
    for more in (
        *({"temperature": 0.5}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}),
        *({"logit_bias": {3: 1.0}}, {"min_tokens": 2}, {"logprobs": 0}),
    ):
        assert not takes_plain_argmax(SamplingParams(**plain | more)), more


def test_ranks_agree_on_blocks_for_all(session_folder: Path) -> None:
    """Of the ranks' numbers the smallest counts; ranks on one CPU measured the same memory."""
    config = EngineConfig(max_batch_size=4, max_seq_len=64, block_size=16)
    made: dict[int, list[int | None]] = {0: [], 1: []}

    def make(rank: int, found: int, config: EngineConfig, *_: Any) -> Any:
        made[rank].append(config.num_gpu_blocks)
        return SimpleNamespace(capacity_tokens=16 * (config.num_gpu_blocks or found)), None

    def agree(found: tuple[int, int], **about: Any) -> list[int]:
        own = replace(config, **about)
        return on_ranks(
            2, lambda r: agreed_memory(own, None, 64, partial(make, r.rank, found[r.rank]), r)[0].capacity_tokens // 16
        )  # type: ignore[arg-type]

    assert agree((16, 16)) == [16, 16], "all that can be used"
    assert agree((12, 9)) == [4, 4]
    assert agree((16, 12)) == [6, 6]
    assert made == {0: [None, None, 4, None, 6], 1: [None, None, 4, None, 6]}
    assert agree((7, 7), num_gpu_blocks=5) == [5, 5]
    assert agree((7, 7), kv_cache_backend="contiguous") == [7, 7]


class Part(Successor):
    """A rank's columns of the logits of :class:`Successor`, whose ids it has only after a sum over the ranks."""

    def __init__(self, ranks: Collectives) -> None:
        super().__init__()
        self.ranks, self.part = ranks, Shard(ranks.rank, ranks.size).part(VOCABULARY)

    def __call__(self, tokens: Tokens, kv: Any) -> torch.Tensor:
        self.seen.append(tokens.ids.tolist())
        own = tokens.ids * ((tokens.ids >= self.part.start) & (tokens.ids < self.part.stop))
        return self.ranks.all_sum(own.float()).long()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden)[:, self.part.start : self.part.stop]


def steps() -> list[Batch]:
    """A mixed step, decode steps whose ids are in flight, and one that samples nothing."""
    pool = ContiguousKVCachePool(4, 20)
    params = SamplingParams(temperature=0.0)
    requests = [Request(name, ids, params, 0) for name, ids in (("a", [10]), ("b", [20, 21]), ("c", [30, 31, 32]))]
    for request in requests:
        pool.reserve(request, 20)

    def batch(step: int, samples: bool = True) -> Batch:
        lengths = [request.num_prompt_tokens for request in requests]
        about = [(0, length) if step == 0 else (length + step - 1, 1) for length in lengths]
        entries = [
            Scheduled(request, *range_, 0, int(samples)) for request, range_ in zip(requests, about, strict=True)
        ]
        return RankBatch.of(Schedule(step + 1, tuple(entries)), pool)

    return [batch(0), batch(1), replace(batch(2), takes_argmax=False), batch(3), batch(4, samples=False)]


def tokens_of(runner: Runner, batches: Sequence[Batch]) -> list[list[int]]:
    """The ids that each batch's rows draw, which are greedy."""
    row = Request("x", [1], SamplingParams(temperature=0.0), 0).sampling_row()
    sampled = [runner.sample(runner.forward(batch), [row] * len(batch.logit_rows)) for batch in batches]
    return [output.wait().token_ids for output in sampled]


@pytest.mark.parametrize("kind", [OverlappedRunner, CapturedRunner])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_follow_the_steps_of_rank_0(kind: type[OverlappedRunner], size: int) -> None:
    """Their ids come from rank 0 alone; a captured step contains its sums."""
    batches, (sender, receivers) = steps(), channel(size)
    about: dict[str, Any] = {"capture": Recorded()} if kind is CapturedRunner else {}
    seen: dict[int, list[list[int]]] = {}

    def run(ranks: Collectives) -> tuple[list[list[int]], int]:
        model = Part(ranks)
        first = {"sender": sender, "watch": SimpleNamespace(check=lambda: None)} if ranks.rank == 0 else {}
        runner = rank_runner(kind)(model, Fixed(), 4, ranks=ranks, **first, **about)  # type: ignore[arg-type]
        found = tokens_of(runner, batches) if ranks.rank == 0 else []
        if ranks.rank:
            for _ in batches:
                number, batch = receivers[ranks.rank - 1].receive()
                assert number == runner.number
                runner.follow(batch)
        seen[ranks.rank] = model.seen
        return found, runner.num_replays

    with torch.inference_mode():
        plain = kind(Successor(), Fixed(), 4, **about)  # type: ignore[arg-type]
        expected = tokens_of(plain, batches)
    assert expected == [[11, 22, 33], [12, 23, 34], [13, 24, 35], [14, 25, 36], []]
    about = {"capture": Recorded()} if kind is CapturedRunner else {}
    found = on_ranks(size, run)
    assert found == [(expected, plain.num_replays), *[([], plain.num_replays)] * (size - 1)]
    assert (plain.num_replays > 0) is (kind is CapturedRunner)
    assert all(ids == seen[0] for ids in seen.values())
