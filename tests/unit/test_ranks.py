"""Ranks without processes: what is sent to them, and that they compute the steps of rank 0 with it."""

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from shared import child_process
from shared.cache.pool.contiguous import ContiguousKVCachePool
from shared.child_process import start_child
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.executor.captured import Captured
from shared.engine.executor.eager import Eager
from shared.engine.executor.last_ids import LastIds
from shared.engine.request import Request
from shared.engine.runner import Runner
from shared.errors import ConfigError, RankError
from shared.grammar.grammar import Grammar
from shared.models.tokens import Tokens
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled
from shared.tracks.ranks import worker
from shared.tracks.ranks.batch import RankBatch, takes_plain_argmax
from shared.tracks.ranks.channel import BEATS, CALLS, Board, Receiver, Sender
from shared.tracks.ranks.collectives import Collectives
from shared.tracks.ranks.group import Group, _end, agreed_memory, draft_collectives, local_store, rank_device
from shared.tracks.ranks.several_ranks import SeveralRanks
from shared.tracks.ranks.shard import Shard
from shared.tracks.ranks.watch import Failed, Watch
from tests.ranks import on_ranks
from tests.unit.test_captured_runner import Fixed, Recorded
from tests.unit.test_runner import VOCABULARY, Successor

GRAMMAR = Grammar.regex("a")


def channel(size: int, check: Callable[[], None] = lambda: None) -> tuple[Sender, list[Receiver]]:
    board = Board(size)
    pipes = [Pipe() for _ in range(size - 1)]
    receivers = [Receiver(Board(size, board.fd), theirs, rank) for rank, (_, theirs) in enumerate(pipes, 1)]
    return Sender(board, [ours for ours, _ in pipes], check), receivers


@pytest.mark.parametrize("lag", [1, 4])
def test_messages_arrive_whole_and_in_order(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sizes around that of a slot; rank 2 reads a message when rank 1 has read ``lag``."""
    monkeypatch.setattr("shared.tracks.ranks.channel.SLOT_BYTES", 200)
    sender, (first, second) = channel(3, pytest.fail)
    messages = [bytes([size]) * size for size in (*range(170, 206), *range(9))]
    found: dict[int, list[bytes]] = {1: [], 2: []}
    for number, message in enumerate(messages, 1):
        sender.send(message)
        found[1].append(first.receive())
        if number >= lag:
            found[2].append(second.receive())
    found[2] += [second.receive() for _ in range(lag - 1)]
    assert found == {1: messages, 2: messages}


def test_a_rank_that_reads_nothing_holds_rank_0_until_it_is_given_up() -> None:
    """Whatever the others read."""

    def check() -> None:
        raise RankError("Rank 2 of 3 made no progress")

    sender, (first, _) = channel(3, check)
    for number in range(4):
        sender.send(number)
        assert first.receive() == number
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
        *(
            {"logit_bias": {3: 1.0}},
            {"min_tokens": 2},
            {"logprobs": 0},
            {"structured_output": GRAMMAR, "ignore_eos": False},
        ),
    ):
        assert not takes_plain_argmax(SamplingParams(**plain | more)), more
        pool, entries = ContiguousKVCachePool(4, 20), []
        for name, params in (("a", plain), ("b", plain | more)):
            request = Request(name, [10], SamplingParams(**params), 0)
            assert pool.reserve(request, 20)
            entries.append(Scheduled(request, 0, 1, 0, 1))
            takes_argmax = RankBatch.of(Schedule(1, tuple(entries)), pool).takes_argmax
            assert takes_argmax is (name == "a"), "if every row's is"


def test_ranks_agree_on_blocks_for_all(session_folder: Path) -> None:
    """Of the ranks' numbers the smallest counts; ranks on one CPU measured the same memory."""
    config = EngineConfig(max_batch_size=4, max_seq_len=64, block_size=16)
    made: dict[int, list[int | None]] = {0: [], 1: []}

    def make(rank: int, found: int, config: EngineConfig, *_: Any) -> Any:
        made[rank].append(config.num_gpu_blocks)
        return SimpleNamespace(capacity_tokens=16 * (config.num_gpu_blocks or found)), None

    def agree(found: tuple[int, int], **options: Any) -> list[int]:
        own = replace(config, **options)
        return on_ranks(
            2, lambda r: agreed_memory(own, None, 64, partial(make, r.rank, found[r.rank]), r)[0].capacity_tokens // 16
        )  # type: ignore[arg-type]

    assert agree((16, 16)) == [16, 16], "all that can be used"
    assert agree((12, 9)) == [4, 4]
    assert agree((16, 12)) == [6, 6]
    assert made == {0: [None, None, 4, None, 6], 1: [None, None, 4, None, 6]}
    assert agree((17, 16)) == [16, 16]
    assert agree((7, 7), num_gpu_blocks=5) == [5, 5]
    assert agree((7, 7), kv_cache_backend="contiguous") == [7, 7]


class Part(Successor):
    """A rank's columns of the logits of :class:`Successor`, whose ids it has only after a sum over the ranks."""

    def __init__(self, ranks: Collectives) -> None:
        super().__init__()
        self.ranks, self.part = ranks, Shard(ranks.rank, ranks.size).part(VOCABULARY)

    def __call__(self, tokens: Tokens, kv: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
        self.seen.append(tokens.ids.tolist())
        own = tokens.ids * ((tokens.ids >= self.part.start) & (tokens.ids < self.part.stop))
        ids = self.ranks.all_sum(own.float()).long()
        return ids if rows is None else ids[rows]

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
        options = [(0, length) if step == 0 else (length + step - 1, 1) for length in lengths]
        entries = [
            Scheduled(request, *range_, 0, int(samples)) for request, range_ in zip(requests, options, strict=True)
        ]
        return RankBatch.of(Schedule(step + 1, tuple(entries)), pool)

    return [batch(0), batch(1), replace(batch(2), takes_argmax=False), batch(3), batch(4, samples=False)]


def tokens_of(runner: Runner, batches: Sequence[Batch]) -> list[list[int]]:
    """The ids that each batch's rows sample, greedily."""
    row = Request("x", [1], SamplingParams(temperature=0.0), 0).sampling_row()
    sampled = [runner.sample(runner.forward(batch), [row] * len(batch.logit_rows)) for batch in batches]
    return [output.wait().token_ids for output in sampled]


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_follow_the_steps_of_rank_0(captures: bool, size: int) -> None:
    """Their ids come from rank 0 alone; a captured step contains its sums."""
    batches, (sender, receivers) = steps(), channel(size)
    executor: Any = partial(Captured, capture=Recorded()) if captures else Eager
    make = partial(Runner, executor=executor, last_ids=LastIds)
    seen: dict[int, list[list[int]]] = {}

    def run(ranks: Collectives) -> tuple[list[list[int]], int]:
        model = Part(ranks)
        first: list[Any] = [sender, SimpleNamespace(check=lambda: None)] if ranks.rank == 0 else []
        group = SeveralRanks(VOCABULARY, ranks, *first)
        runner = make(model, Fixed(), 4, ranks=group)  # type: ignore[arg-type]
        found = tokens_of(runner, batches) if ranks.rank == 0 else []
        if ranks.rank:
            for _ in batches:
                number, batch = receivers[ranks.rank - 1].receive()
                assert number == group.number
                runner.compute(batch)
        seen[ranks.rank] = model.seen
        return found, runner.num_replays

    with torch.inference_mode():
        plain = make(Successor(), Fixed(), 4)  # type: ignore[arg-type]
        expected = tokens_of(plain, batches)
    assert expected == [[11, 22, 33], [12, 23, 34], [13, 24, 35], [14, 25, 36], []]
    found = on_ranks(size, run)
    assert found == [(expected, plain.num_replays), *[([], plain.num_replays)] * (size - 1)]
    assert (plain.num_replays > 0) is captures
    assert all(ids == seen[0] for ids in seen.values())


def test_a_model_of_several_ranks_is_not_observed() -> None:
    """Other ranks would not compute the hidden states that an observer needs."""
    several = SeveralRanks(VOCABULARY, Collectives(local_store(), 0, 1, torch.device("cpu")))
    with pytest.raises(ConfigError, match="several ranks compute its model"):
        Runner(Successor(), Fixed(), 4, ranks=several, observers=[SimpleNamespace()])  # type: ignore[arg-type, list-item]


def test_a_group_of_one_rank_watches_none() -> None:
    group = Group(EngineConfig(), Path(), None, None)  # type: ignore[arg-type]
    group.when_lost(pytest.fail)
    sampled: Any = SimpleNamespace(wait=lambda: "tokens")
    assert group.wait(sampled) == "tokens"
    group.close()


def test_gpus_are_counted_from_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.tracks.ranks.group.check_device", torch.device)
    for device, expected in (("cuda:2", "cuda:5"), ("cuda", "cuda:3"), ("cpu", "cpu")):
        assert rank_device(EngineConfig(device=device), 3) == torch.device(expected)


def test_a_child_process_has_its_pipe_and_its_variables_and_imports_this_course(tmp_path, monkeypatch) -> None:
    """Where another module of that name can be imported too; and it reads no input of its parent."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path / "shared")
    for name, value in (("INFER_WORKSHOP", "0"), ("OF_CHILD", "of its parent")):
        monkeypatch.setenv(name, value)
    says = "shared.child_process.__file__, os.environ['OF_CHILD'], os.read(0, 9), 'shared.cli' in sys.modules"
    statement = f"import os, sys, shared.child_process; os.write(int(sys.argv[1]), repr(({says})).encode())"
    (reader, writer), (given, giver) = os.pipe(), os.pipe()
    os.write(giver, b"of its parent")
    kept = os.dup(0)
    os.dup2(given, 0)
    try:
        assert start_child(statement, (writer,), {"OF_CHILD": "its own"}).wait(60) == 0
    finally:
        os.dup2(kept, 0)
    assert start_child("raise SystemExit(3)", ()).wait(60) == 3, "nothing passed, and no variables"
    assert os.read(reader, 9999).decode() == repr((child_process.__file__, "its own", b"", False))
    for each in (reader, writer, given, giver, kept):
        os.close(each)


def test_a_draft_model_is_cut_among_the_first_ranks() -> None:
    config = EngineConfig(use_speculative_decoding=True, draft_model="x", tensor_parallel_size=3, draft_ranks=2)
    store = dist.HashStore()

    def run(ranks: Collectives) -> list[int] | None:
        if ranks.rank >= config.draft_ranks:
            return None
        drafting = draft_collectives(config, store, ranks)
        return drafting.gathered(torch.tensor([ranks.rank])).flatten().tolist()

    assert on_ranks(3, run) == [[0, 1], [0, 1], None]


def watch_of(pipes: Sequence[Any], board: Board | None = None, code: int = -9) -> Any:
    """The watch of ranks at these pipes; it lists in ``ended`` what it does when the group has failed."""
    ended: list[Any] = []
    processes = [
        SimpleNamespace(kill=partial(ended.append, rank), wait=lambda _: code) for rank in range(1, len(pipes) + 1)
    ]
    watch: Any = Watch(board or Board(len(pipes) + 1), processes, [])  # type: ignore[arg-type]
    watch.ended, watch.when_lost = ended, ended.append
    watch.collectives.append(SimpleNamespace(abort=partial(ended.append, "collectives")))
    watch.pipes = pipes
    return watch


def watched(last_words: Sequence[Failed | None], code: int = -9) -> Any:
    """The watch of ranks that have left these last words, or died without."""
    pipes = [Pipe() for _ in last_words]
    for (_, theirs), words in zip(pipes, last_words, strict=True):
        if words is not None:
            theirs.send(words)
        theirs.close()
    return watch_of([ours for ours, _ in pipes], code=code)


def failure_of(watch: Any) -> str:
    """Every other rank is ended, then the engine is told, and then rank 0's collectives are aborted."""
    for _ in range(1000):
        if "collectives" in watch.ended:
            break
        time.sleep(0.01)
    assert watch.ended == [*range(1, watch.size), watch.failure, "collectives"]
    return str(watch.failure)


LEFT = Failed("failed (PeerError: connection closed)", is_peers=True)


@pytest.mark.parametrize(
    ("last_words", "code", "expected"),
    [
        ([LEFT, Failed("ran out of memory (12 GB)"), LEFT], 1, "Rank 2 of 4 ran out of memory"),
        ([LEFT, None, LEFT], -9, "Rank 2 of 4 was ended by SIGKILL"),
        ([None], 0, "Rank 1 of 2 ended with exit code 0"),
        ([LEFT, LEFT], 1, "Rank 1 of 3 failed"),
    ],
)
def test_the_failure_names_the_rank_that_it_began_with(
    last_words: Sequence[Failed | None], code: int, expected: str
) -> None:
    assert failure_of(watched(last_words, code)).startswith(expected)


def test_rank_0_waits_for_the_cause_of_its_error_unless_it_ran_out_of_memory() -> None:
    watch = watched([Failed("failed (ValueError: of rank 1)"), LEFT])
    assert str(watch.failed(RuntimeError("connection closed"))).startswith("Rank 1 of 3 failed (ValueError: of rank 1)")
    ours, _theirs = Pipe()
    watch = watch_of([ours])
    assert str(watch.failed(MemoryError())).startswith("Rank 0 of 2 ran out of memory (MemoryError)")
    failure_of(watch)


def test_after_a_failure_rank_0_neither_waits_nor_computes() -> None:
    watch = watched([None])
    assert failure_of(watch).startswith("Rank 1 of 2")
    with pytest.raises(RankError), watch.waiting():
        pytest.fail("it waits for a rank that is lost")
    group = SeveralRanks(VOCABULARY, SimpleNamespace(rank=0, size=2), watch=watch)  # type: ignore[arg-type]
    with pytest.raises(RankError):
        next(group.run(lambda _: pytest.fail("it computes a step without the others"), range(1)))


def test_ranks_that_rank_0_ends_have_not_failed() -> None:
    ours, theirs = Pipe()
    process: Any = SimpleNamespace(kill=theirs.close, wait=lambda *_: -9)
    before = threading.enumerate()
    watch = Watch(Board(2), [process], [ours])
    (thread,) = (each for each in threading.enumerate() if each not in before)
    lifeline, theirs_of_lifeline = os.pipe()
    num_threads = torch.get_num_threads()
    _end(watch, theirs_of_lifeline, num_threads + 1)
    assert torch.get_num_threads() == num_threads + 1, "as many as before the group"
    torch.set_num_threads(num_threads)
    thread.join(60)
    assert (thread.is_alive(), watch.failure, ours.closed) == (False, None, True)
    os.set_blocking(lifeline, False)
    assert os.read(lifeline, 1) == b"", "each rank that still lives sees the end of the lifeline"
    os.close(lifeline)


def test_only_this_machine_reaches_the_store() -> None:
    store = local_store()
    found = [each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    assert [ip for ip, port in found if port == store.port] == ["127.0.0.1"]


@pytest.fixture
def polled(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Is released each time that a watch looks at its ranks, none of which says anything."""
    released = threading.Semaphore(0)

    def poll(*_: Any) -> list[Any]:
        released.release()
        time.sleep(0.01)
        return []

    monkeypatch.setattr("shared.tracks.ranks.watch.wait", poll)
    return released


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a watch reads."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr("shared.tracks.ranks.watch.time", clock)
    return now


def test_ranks_that_make_no_progress_within_the_innermost_patience_hang(
    polled: threading.Semaphore, clock: list[float]
) -> None:
    """The one that has begun and ended the fewest collectives is named, also after a time without a wait."""
    watch = watch_of(Pipe())
    watch.board.counters[:, CALLS] = 4, 4, 3
    assert all(polled.acquire(timeout=20) for _ in range(3)), "it watches on while rank 0 waits for none"
    with watch.waiting(math.inf):
        clock[0] = 100.0
    with pytest.raises(RankError, match="Rank 2 of 3 made no progress for 50 s"), watch.waiting(math.inf):
        wait_within_a_wait(polled, watch, clock)


def wait_within_a_wait(polled: threading.Semaphore, watch: Any, clock: list[float]) -> None:
    with watch.waiting(50.0):
        with watch.waiting(math.inf):
            clock[0] = 200.0
            assert no_failure_yet(polled, watch)
        failure_of(watch)


def test_a_rank_hangs_that_is_silent_while_rank_0_waits(polled: threading.Semaphore, clock: list[float]) -> None:
    """Silence before the wait does not count, nor that of a rank which has not started."""
    board = Board(3)
    board.counters[2, BEATS] = 1
    watch = watch_of(Pipe(), board)
    assert polled.acquire(timeout=20)
    clock[0] = 100.0
    with pytest.raises(RankError, match="Rank 2 of 3 made no progress for 7 s"), watch.waiting(math.inf):
        silent_again(polled, watch, clock)


def silent_again(polled: threading.Semaphore, watch: Any, clock: list[float]) -> None:
    assert no_failure_yet(polled, watch), "by the silence before"
    clock[0] = 104.0
    assert no_failure_yet(polled, watch)
    with watch.waiting(math.inf):  # a wait within does not begin the silence anew
        clock[0] = 108.0
        failure_of(watch)


def no_failure_yet(polled: threading.Semaphore, watch: Watch) -> bool:
    """After the watch has looked three times more."""
    while polled.acquire(blocking=False):
        pass
    return all(polled.acquire(timeout=5) for _ in range(3)) and watch.failure is None


def test_a_rank_computes_the_batches_of_its_models_and_notes_when() -> None:
    """It is idle while it waits for one."""
    sender, (receiver,) = channel(2)
    idle, seen = threading.Event(), list[tuple[str, bool]]()
    for message in ((0, "a"), (1, "b"), (0, "c")):
        sender.send(message)
    sender.pipes[0].close()
    runner: Any = SimpleNamespace(compute=lambda batch: seen.append((batch, idle.is_set())))
    with pytest.raises(EOFError):
        worker.follow(receiver, {0: runner}, idle)
    assert (seen, idle.is_set()) == ([("a", False), ("c", False)], True)
    times = sender.board.times[1, :4].tolist()
    assert [0 < began <= ended for began, ended in times] == [True, False, True, False]


def test_a_rank_beats_while_it_computes_or_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginning with the beat of its own when it has started."""
    board, idle, now, found = Board(2), threading.Event(), [0.0], list[int]()
    steps = iter([(True, 1.0, 1), (False, 0.0, 0), (False, 0.0, 1), (False, 0.1, 2), (False, 0.002, 2), (True, 0.0, 2)])

    def select(*_: Any) -> tuple[list[int], list[int], list[int]]:
        found.append(int(board.counters[1, BEATS]))
        if len(found) == 2:
            board.counters[1, BEATS] = 1  # as the rank does when it has started
        is_idle, seconds, board.counters[1, CALLS] = next(steps, (None, 0.0, 0))
        (idle.set if is_idle else idle.clear)()
        now[0] += seconds
        return ([7] if is_idle is None else []), [], []

    def leave(_: int) -> None:
        raise SystemExit

    monkeypatch.setattr("shared.tracks.ranks.worker.select.select", select)
    monkeypatch.setattr("shared.tracks.ranks.worker.time.process_time", lambda: now[0])
    monkeypatch.setattr("shared.tracks.ranks.worker.os._exit", leave)
    with pytest.raises(SystemExit):
        worker.beat(board, 1, 7, idle)
    assert found == [0, 0, 1, 2, 3, 3, 4]
