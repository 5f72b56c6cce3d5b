"""One message a step from rank 0 to each other rank. Introduced in phase 12.1.

Invariant: messages are numbered, and a rank that gets another number than the next one raises, so the ranks cannot
compute different steps together.
"""

import pickle
import struct
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from shared.tracks.ranks.board import READ, SLOT_BYTES, Board

HEADER = struct.Struct("<qq")  # the message's number, and its length in bytes


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
    """The end of rank ``rank``."""

    def __init__(self, board: Board, pipe: "Connection[Any, Any]", rank: int) -> None:
        self.board, self.pipe, self.rank = board, pipe, rank
        self.number = 0

    def receive(self) -> Any:
        """Wait for the next message. Raises EOFError if rank 0 has gone, RuntimeError for a wrong number."""
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
