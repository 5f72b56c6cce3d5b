"""An engine that echoes, and a server around it that is spoken to over a socket: HTTP, threads, failures, and no model.

The engine is a stand-in for the protocol of phases from 4 on, with the real tokenizer and the real stop conditions; it
can be made slow, held in a step, made to fail at one request, and made to die.
"""

import asyncio
import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai

from shared.engine.config import EngineConfig
from shared.engine.output import OutputStream, StepOutput
from shared.engine.prompt import check_prompt
from shared.engine.record import EngineLoad, StepRecord
from shared.engine.request import Request, TokenLogprobs
from shared.errors import QueueFullError, RequestError
from shared.sampling.params import SamplingParams
from shared.server.app import make_app
from shared.server.engine.loop import EngineHandle
from shared.server.engine.thread import EngineThread
from shared.server.process import Server, address_of, bind
from shared.server.settings import ServerConfig
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer
from tests.waiting import PATIENCE, wait_until

VOCAB, LIMIT = 512, 4096
POISON = "\x01"
ENDLESS: dict[str, Any] = {"max_tokens": 10**6, "ignore_eos": True}
"""Fields of a request to an :func:`endless` engine that no test outlasts: hours, at 20 ms a step."""


@dataclass
class EchoPool:
    """A region of ``request_capacity`` tokens for each of four requests."""

    request_capacity: int
    held: list[Request] = field(default_factory=list)

    @property
    def capacity_tokens(self) -> int:
        return 4 * self.request_capacity

    def holdings(self) -> tuple[int, dict[Request, list[int]]]:
        return self.request_capacity, {request: [region] for region, request in enumerate(self.held)}

    def cached_blocks(self) -> list[int]:
        return []

    def length(self, request: Request) -> int:
        return 1

    def audit(self) -> list[str]:
        return [f"{request.request_id} holds memory" for request in self.held]


class EchoEngine:
    """Answers each prompt with its own tokens, over and over; the token POISON fails instead.

    The log-probability of a prompt's token is its id, below 0; the second most likely token is a special one. Of a
    prompt, all tokens but one were in the KV cache. An answer that ends has an accepted draft and two rejected ones.
    """

    def __init__(
        self, folder: Path, *, max_batch_size: int = 4, max_waiting_requests: int = 64, max_seq_len: int = LIMIT
    ) -> None:
        sizes = {"max_batch_size": max_batch_size, "max_waiting_requests": max_waiting_requests}
        self.config = EngineConfig(model=str(folder), **sizes)
        self.tokenizer = Tokenizer.load(folder)
        self.model = SimpleNamespace(config=SimpleNamespace(family="llama", vocab_size=VOCAB))
        self.max_seq_len = max_seq_len
        self.pool = EchoPool(max_seq_len)
        self.last_step: StepRecord | None = None
        self.step_seconds = 0.0
        self.before_step: Callable[[], object] = lambda: None
        self.may_step = threading.Event()
        self.may_step.set()
        self.is_held = False
        self.num_steps = 0
        self.bug: Exception | None = None
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.streams: dict[Request, OutputStream] = {}
        self.preempted: tuple[str, ...] = ()  # said of the next step
        self.prefix_lookups = 0, 0  # tokens, and those that were found
        self.drafts: tuple[tuple[int, ...], ...] = (), ()  # by position, and those that were accepted

    @property
    def scheduler(self) -> Any:
        return SimpleNamespace(pool=self.pool, running=self.running, waiting=self.waiting, ending=(), num_preemptions=0)

    def add_request(self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        assert request_id is not None
        ids = check_prompt(prompt, VOCAB, self.max_seq_len)
        if len(self.waiting) >= self.config.max_waiting_requests:
            raise QueueFullError(f"{len(self.waiting)} requests wait, as many as may.")
        if request_id in self.waiting or request_id in self.running:
            raise RequestError(f"The id {request_id} is in use.")
        request = self.waiting[request_id] = Request(request_id, ids, params, 0)
        self.streams[request] = OutputStream(request, self.tokenizer, self.max_seq_len)
        return request_id

    def step(self) -> list[StepOutput]:
        if self.bug is not None:
            raise self.bug
        self.is_held = not self.may_step.is_set()
        self.may_step.wait()
        self.is_held = False
        self.before_step()
        time.sleep(self.step_seconds)
        admitted = list(self.waiting)[: self.config.max_batch_size - len(self.running)]
        self.running |= {request_id: self.waiting.pop(request_id) for request_id in admitted}
        self.pool.held += [self.running[request_id] for request_id in admitted]
        outputs = [self._next(request) for request in self.running.values()]
        ended = [output.request_id for output in outputs if output.finish_reason is not None]
        for request_id in ended:
            self.abort(request_id)
        prefilled = tuple((request_id, 1) for request_id in admitted)
        load = self.load()
        counts = load.num_waiting, load.num_running, 0, 1
        starts = (0,) * len(prefilled)
        self.last_step = StepRecord(self.num_steps, prefilled, (), tuple(ended), (), *counts, self.preempted, starts)
        self.preempted = ()
        self.num_steps += 1
        return outputs

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The next step begins and does nothing until this ends; if there is work, it has begun."""
        self.may_step.clear()
        try:
            wait_until(lambda: self.is_held or not self.has_work())
            yield
        finally:
            self.may_step.set()

    def abort(self, request_id: str) -> bool:
        if self.waiting.pop(request_id, None) is not None:
            return True
        request = self.running.pop(request_id, None)
        if request is None:
            return False
        self.pool.held.remove(request)
        return True

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def stats(self) -> dict[str, int]:
        return {"steps": self.num_steps}

    def load(self) -> EngineLoad:
        kv_usage = len(self.running) / self.config.max_batch_size
        return EngineLoad(len(self.running), len(self.waiting), kv_usage, 0, *self.prefix_lookups, *self.drafts)

    def _next(self, request: Request) -> StepOutput:
        output = self._next_token(request) if request.params.max_new_tokens else nothing(request)
        if len(request.output_ids) <= 1:
            output = output._replace(num_cached_tokens=request.num_prompt_tokens - 1)
        if output.finish_reason is not None:
            output = output._replace(num_accepted_drafts=1, num_rejected_drafts=2)
        count = request.params.prompt_logprobs
        if count is None or len(request.output_ids) > 1:
            return output
        others = request.prompt_ids[1:]
        own = [TokenLogprobs(-float(index), ((index, -float(index)),) * min(1, count)) for index in others]
        return output._replace(prompt_logprobs=(None, *own))

    def _next_token(self, request: Request) -> StepOutput:
        special = self.tokenizer.special_ids
        text_ids = [index for index in request.prompt_ids if index not in special] or request.prompt_ids
        token_id = text_ids[len(request.output_ids) % len(text_ids)]
        if token_id == self.tokenizer.encode(POISON, add_special_tokens=False)[0]:
            return StepOutput(request.request_id, None, "", FinishReason.ERROR, error="The request was poisoned.")
        count = request.params.logprobs
        top = tuple((1 if i == 1 else text_ids[0] + i, -1.0 - i) for i in range(count)) if count else ()
        if top and token_id not in dict(top):
            top += ((token_id, -0.5),)
        request.append(token_id)
        request.num_scheduled_tokens = request.num_tokens - 1
        return self.streams[request].push(token_id, None if count is None else TokenLogprobs(-0.5, top))


def endless(folder: Path, **sizes: int) -> EchoEngine:
    """An engine whose answers can be as long as ENDLESS, and whose steps leave time to read them."""
    engine = EchoEngine(folder, max_seq_len=2**31, **sizes)
    engine.step_seconds = 0.02
    return engine


def nothing(request: Request) -> StepOutput:
    return StepOutput(request.request_id, None, "", FinishReason.LENGTH)


@dataclass
class Running:
    """A server that runs on a thread of this process."""

    url: str
    engine: EchoEngine
    app: Any
    server: Server
    loop: asyncio.AbstractEventLoop

    def client(self, accept: str = "text/event-stream") -> httpx.Client:
        """A client that asks completions for named events, unless it accepts something else."""
        # Without verify=False, each client reads the certificates of the system: 20 ms.
        return httpx.Client(
            base_url=self.url, timeout=PATIENCE, trust_env=False, verify=False, headers={"Accept": accept}
        )

    def openai(self) -> openai.OpenAI:
        plain = openai.DefaultHttpxClient(verify=False)  # as above
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="unused", timeout=PATIENCE, max_retries=0, http_client=plain
        )

    def end(self) -> None:
        """What SIGTERM does."""
        self.loop.call_soon_threadsafe(self.server.handle_exit, signal.SIGTERM, None)


@contextlib.contextmanager
def serving(engine: EchoEngine, handle: EngineHandle | None = None, **settings: Any) -> Iterator[Running]:
    """``handle`` is that of another engine like this one; None: this one, on a thread."""
    config = ServerConfig(model_name="echo", **settings)
    app = make_app(handle or EngineThread(engine), config)
    bound = bind("127.0.0.1", 0)
    bound.listen()
    url = address_of(bound)
    server = Server(app, config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    assert server._event_loop is not None
    try:
        yield Running(url, engine, app, server, server._event_loop)
    finally:
        engine.step_seconds = 0.0
        engine.may_step.set()
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


@contextlib.contextmanager
def connected(running: Running, *parts: bytes, receive_buffer: int = 2**16) -> Iterator[socket.socket]:
    """A connection that has sent ``parts``."""
    host, port = running.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.settimeout(PATIENCE)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect((host, int(port)))
        for part in parts:
            connection.sendall(part)
        yield connection


def unread(running: Running, path: str, body: dict[str, Any], **settings: int) -> Any:
    """A connection on which this request was sent, and from which nothing has been read."""
    content = json.dumps(body).encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % path.encode()
    head += b"Accept: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(content)
    return connected(running, head + content, **settings)


def everything(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(2**16):
            answer += chunk
    return answer
