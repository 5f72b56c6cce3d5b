"""One message per step from rank 0 to each other rank, and each rank's progress. Introduced in phase 12.1.

Rank 0 pickles a batch once and writes it into one of a few slots in memory that the ranks share; a pipe to each rank
announces its sequence number and length. A batch that is larger than a slot goes through the pipes. Each rank has its
own row of counters: messages read, collectives started and ended (the count is odd during one), and heartbeats. It also
records the start and end times of its last messages.

Invariants: a slot is written only after every rank has read its content; only its own rank writes a row of counters; a
rank that gets a wrong sequence number raises, so the ranks never compute different steps together. The memory has no
name, so nothing of it remains when the processes end.
"""

import mmap
import os
import pickle
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

NUM_SLOTS, SLOT_BYTES = 4, 1 << 20
READ, CALLS, BEATS = range(3)  # messages read, starts and ends of collectives, heartbeats
COUNTERS = 3
NUM_TIMED = 4096  # messages whose times are recorded
SHARED = Path("/dev/shm")
HEADER = struct.Struct("<qq")  # the message's sequence number, and its length in bytes


class Board:
    """The shared memory of ``size`` ranks, of the file descriptor ``fd``; ``None`` makes it."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        counter_bytes = 8 * (COUNTERS + 2 * NUM_TIMED) * size
        if fd is None:
            with tempfile.TemporaryFile(dir=SHARED if SHARED.is_dir() else None) as file:
                fd = os.dup(file.fileno())
            os.ftruncate(fd, counter_bytes + NUM_SLOTS * SLOT_BYTES)
        self.fd = fd
        self.memory = mmap.mmap(fd, counter_bytes + NUM_SLOTS * SLOT_BYTES)
        self.counters = np.frombuffer(self.memory, np.int64, COUNTERS * size).reshape(size, COUNTERS)
        times = np.frombuffer(self.memory, np.int64, 2 * NUM_TIMED * size, 8 * COUNTERS * size)
        self.times = times.reshape(size, NUM_TIMED, 2)  # of message n at n % NUM_TIMED, in ns of the monotonic clock
        self.first = counter_bytes

    def write(self, number: int, message: bytes, check: Callable[[], None]) -> None:
        """Write message ``number``, counted from 0; ``check`` is called while some rank has not yet read the slot's
        previous message."""
        while (self.counters[1:, READ] <= number - NUM_SLOTS).any():
            check()
            time.sleep(0.0001)
        begin = self.first + number % NUM_SLOTS * SLOT_BYTES
        self.memory[begin : begin + len(message)] = message

    def read(self, rank: int, number: int, length: int) -> bytes:
        """Message ``number``, of ``length`` bytes; its slot may be written again afterwards."""
        begin = self.first + number % NUM_SLOTS * SLOT_BYTES
        message = self.memory[begin : begin + length]
        self.counters[rank, READ] = number + 1
        return message


class Sender:
    """Rank 0's end. ``check`` raises if the group has failed."""

    def __init__(self, board: Board, pipes: "Sequence[Connection[Any, Any]]", check: Callable[[], None]) -> None:
        self.board, self.pipes, self.check = board, pipes, check
        self.number = 0

    def send(self, message: object) -> None:
        """Send a message to every other rank."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if len(data) <= SLOT_BYTES:
            self.board.write(self.number, data, self.check)
        for pipe in self.pipes:
            pipe.send_bytes(HEADER.pack(self.number, len(data)))
            if len(data) > SLOT_BYTES:
                pipe.send_bytes(data)
        self.number += 1


class Receiver:
    """The end that rank ``rank`` holds."""

    def __init__(self, board: Board, pipe: "Connection[Any, Any]", rank: int) -> None:
        self.board, self.pipe, self.rank = board, pipe, rank
        self.number = 0

    def receive(self) -> Any:
        """Wait for the next message. Raises EOFError if rank 0 is gone, RuntimeError for a wrong number."""
        number, length = HEADER.unpack(self.pipe.recv_bytes())
        if number != self.number:
            raise RuntimeError(
                f"it received step {number} and the next one is {self.number}: the ranks are not in step"
            )
        if length > SLOT_BYTES:
            data = self.pipe.recv_bytes()
            self.board.counters[self.rank, READ] = number + 1
        else:
            data = self.board.read(self.rank, number, length)
        self.number += 1
        return pickle.loads(data)
