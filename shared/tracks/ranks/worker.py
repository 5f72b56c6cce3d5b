"""The process of a rank other than 0. Introduced in phase 12.1.

It loads its shard of the model, makes its memory and runner as rank 0 does, and then computes every batch that rank 0
sends. It plans nothing and samples nothing.

Invariants: the process ends when rank 0's does, for whatever reason; a failure is its last message; it ignores SIGINT
and SIGTERM, which a terminal or a supervisor sends to rank 0 too.
"""

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from shared.engine.runner import Runner
from shared.errors import InferError
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.loading.resolve import resolve_model
from shared.models.fused import fuse
from shared.speculation.draft_memory import memory_settings
from shared.tracks.ranks.channel import BEATS, CALLS, NUM_TIMED, Board, Receiver
from shared.tracks.ranks.collectives import Collectives, PeerError
from shared.tracks.ranks.group import (
    START_SECONDS,
    Assignment,
    agreed_memory,
    count_call,
    draft_collectives,
    here,
    load_rank,
    rank_device,
)
from shared.tracks.ranks.model import load_part
from shared.tracks.ranks.several_ranks import SeveralRanks
from shared.tracks.ranks.watch import Failed, reason_of

BEAT_SECONDS = 0.5
LEAST_SECONDS = 0.005
"""Minimum processor time within a heartbeat for a rank that computes."""


def main() -> None:
    """Run the rank; its descriptors are the command's arguments."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe_fd, board_fd, lifeline = map(int, sys.argv[1:])
    pipe: Connection[Any, Any] = Connection(pipe_fd)
    size, assignment = pipe.recv()
    board = Board(size, board_fd)
    idle = threading.Event()
    idle.set()  # while loading it may wait for a disk
    threading.Thread(target=beat, args=(board, assignment.rank, lifeline, idle), daemon=True).start()
    try:
        with torch.inference_mode():
            serve(assignment, size, board, pipe, idle)
    except EOFError:
        return
    except BaseException as error:
        if not isinstance(error, PeerError | InferError):
            traceback.print_exception(error)
        with suppress(OSError):
            pipe.send(Failed(reason_of(error), isinstance(error, PeerError)))
        os._exit(1)  # other ranks' collectives would keep the process alive


def serve(assignment: Assignment, size: int, board: Board, pipe: "Connection[Any, Any]", idle: threading.Event) -> None:
    """Load the models, then compute batches; see :func:`follow`."""
    config, rank = assignment.config, assignment.rank
    device = rank_device(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(assignment.num_threads)
    store = dist.TCPStore("127.0.0.1", assignment.port, is_master=False, timeout=timedelta(seconds=START_SECONDS))
    torch.zeros(1, device=device)  # creating a GPU's context takes seconds
    board.counters[rank, BEATS] = 1
    store.set(here(rank), "")
    store.wait([here(other) for other in range(1, size)])
    is_shared = config.all_reduce_backend != "nccl"
    ranks = Collectives(store, rank, size, device, partial(count_call, board, rank), is_shared=is_shared)
    model = fuse(load_rank(config, assignment.folder, ranks))
    max_seq_len = config.sequence_limit(model.max_positions)
    drafting = None
    if config.draft_on_each_rank:
        drafting = ranks
        whole: dict[str, Any] = {"dtype": model.dtype, "device": device, "quantize": quantizer(None, False)}
        draft = fuse(load_model(config.draft_model or "", **whole))
    elif config.draft_ranks > 1 and rank < config.draft_ranks:
        drafting = draft_collectives(config, store, ranks)
        draft = fuse(load_part(resolve_model(config.draft_model or ""), drafting, dtype=model.dtype))
    pool, view = agreed_memory(config, model, max_seq_len, assignment.make_memory, ranks)
    runners = {}
    if drafting is not None:
        own, longest = memory_settings(config, pool), min(max_seq_len, draft.max_positions)
        draft_pool, draft_view = assignment.make_memory(own, draft, longest)
        drafters = SeveralRanks(draft.config.vocab_size, drafting, number=1, is_whole=config.draft_on_each_rank)
        runners[1] = assignment.make_runner(draft, draft_view, draft_pool.max_sequences, ranks=drafters)
    own_ranks = SeveralRanks(model.config.vocab_size, ranks)
    runners[0] = assignment.make_runner(model, view, pool.max_sequences, config.most_logit_rows, ranks=own_ranks)
    follow(Receiver(board, pipe, rank), runners, idle)


def follow(receiver: Receiver, runners: Mapping[int, Runner], idle: threading.Event) -> None:
    """Compute each batch with the model whose number its message gives, until rank 0 is gone; then raises EOFError.
    ``idle`` is set while there is no batch."""
    while True:
        idle.set()
        number, batch = receiver.receive()
        idle.clear()
        if number in runners:
            began, entry = time.perf_counter_ns(), (receiver.number - 1) % NUM_TIMED
            runners[number].compute(batch)
            receiver.board.times[receiver.rank, entry] = began, time.perf_counter_ns()


def beat(board: Board, rank: int, lifeline: int, idle: threading.Event) -> None:
    """Count heartbeats until rank 0 ends; then end the process.

    The rank itself counts the first one, when it has started. There is no heartbeat while the rank is neither
    computing, nor waiting for a message (``idle``), nor in a collective.
    """
    used = time.process_time()
    while not select.select([lifeline], [], [], BEAT_SECONDS)[0]:
        before, used = used, time.process_time()
        is_well = used - before > LEAST_SECONDS or idle.is_set() or board.counters[rank, CALLS] % 2
        if is_well and board.counters[rank, BEATS]:
            board.counters[rank, BEATS] += 1
    os._exit(1)
