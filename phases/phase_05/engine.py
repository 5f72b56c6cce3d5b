"""The loop for many requests, each of which joins and leaves between two steps."""

import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from shared.cache.contiguous_pool import ContiguousKVCachePool
from shared.cache.pool import CachePoolProtocol
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.draw import Drawing
from shared.engine.isolation import run_isolated
from shared.engine.output import StepOutput
from shared.engine.prompt import check_prompt
from shared.engine.record import EngineLoad, StepRecord
from shared.engine.request import Request
from shared.kernels.launch import LAUNCHES
from shared.loading.loader import load_model
from shared.loading.resolve import resolve_model
from shared.models.fused import fuse
from shared.models.packed import pack
from shared.sampling.params import SamplingParams
from shared.scheduling.continuous import ContinuousScheduler
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.static import StaticScheduler
from shared.text.tokenizer import Tokenizer

SUPPORTED = {
    "model",
    "dtype",
    "device",
    "max_seq_len",
    "seed",
    "attention_backend",
    "attention_backend=flash",
    "pack_weights",
    "max_batch_size",
    "max_num_batched_tokens",
    "max_waiting_requests",
    "kv_cache_backend",
    "batching_mode",
    "batching_mode=continuous",
    "scheduler_policy",
    "max_decode_interval",
}
POOLS: dict[str, type[CachePoolProtocol]] = {"contiguous": ContiguousKVCachePool}
SCHEDULERS: dict[str, type[Scheduler]] = {"static": StaticScheduler, "continuous": ContinuousScheduler}


class Engine:
    """Answers many requests at a time, and puts the batch together anew for each step."""

    def __init__(self, config: EngineConfig) -> None:
        config.check(SUPPORTED)
        folder = resolve_model(config.model)
        self.config = config
        self.model = load_model(folder, dtype=config.torch_dtype, device=config.device)
        if config.pack_weights:
            pack(self.model)
        else:
            fuse(self.model)
        self.tokenizer = Tokenizer.load(folder)
        self.max_seq_len = config.sequence_limit(self.model.max_positions)
        self.pool = POOLS[config.kv_cache_backend or "contiguous"].for_engine(config, self.model, self.max_seq_len)
        self.view = self.pool.view(self.model.config.num_heads, config.attention_backend)
        scheduler = SCHEDULERS[config.batching_mode or "continuous"]
        self.scheduler = scheduler(config, self.pool, self.tokenizer, self.max_seq_len)
        self.drawing = Drawing(self.model.device)
        self.seeds = random.Random(config.seed)
        self.request_ids = itertools.count()
        self.outputs: list[StepOutput] = []  # committed, and not yet returned by the step that is under way
        self.answers: dict[str, deque[StepOutput]] = {}  # of `generate`, what nobody has asked for yet
        self.num_tokens_computed = 0
        self.num_forwards = 0
        self.last_step: StepRecord | None = None

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a request and return its id; raises RequestError or QueueFullError with nothing queued."""
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        prompt_ids = check_prompt(prompt_ids, self.model.config.vocab_size, self.max_seq_len)
        if request_id is None:
            request_id = next(name for name in map(str, self.request_ids) if name not in self.scheduler)
        self.scheduler.check(request_id, len(prompt_ids), params)
        seed = self.seeds.getrandbits(64) if params.seed is None else params.seed
        self.scheduler.add(Request(request_id, prompt_ids, params, seed))
        return request_id

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One iteration: plan, run the new prompts, run one token of each decoding request.

        A step that is interrupted, or raises, can be made again: the next one also returns what it had committed.
        """
        schedule = self.scheduler.schedule()
        parts = [  # both forwards are on their way before a token of the first is waited for
            *run_isolated(self.prefill, self.drawing.draw, schedule.prefill),
            *run_isolated(self.decode, self.drawing.draw, schedule.decode),
        ]
        for part, drawn in parts:
            if isinstance(drawn, Exception):
                self.outputs.append(self.scheduler.fail(part[0].request_id, drawn))
            else:
                self.outputs += self.scheduler.commit(part, drawn)
        outputs, self.outputs = self.outputs, []
        self.last_step = StepRecord.of(self.scheduler, schedule, outputs)
        return outputs

    def abort(self, request_id: str) -> bool:
        """End a request, which gives no further output; False if it is not here (any more)."""
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.outputs) or self.scheduler.has_work()

    def generate(self, prompt: str | Sequence[int], params: SamplingParams) -> Iterator[StepOutput]:
        """Yield one output a token until the answer ends; raises RequestError before anything is computed.

        It steps the engine itself, so several iterators may take turns, but nobody else should step meanwhile.
        """
        request_id = self.add_request(prompt, params)
        mine = self.answers[request_id] = deque()
        try:
            while mine or request_id in self.scheduler:
                if not mine:
                    for output in self.step():
                        self.answers.get(output.request_id, deque()).append(output)
                    continue
                output = mine.popleft()
                if output.error is not None:
                    raise RuntimeError(output.error)
                yield output
        finally:
            del self.answers[request_id]
            self.abort(request_id)

    def prefill(self, batch: Batch) -> torch.Tensor:
        """Run whole prompts, laid end to end; logits ``[B, V]`` of the token that follows each."""
        return self.forward(batch)

    def decode(self, batch: Batch) -> torch.Tensor:
        """Run the one token of each sequence that the memory lacks; logits ``[B, V]`` of each next token."""
        return self.forward(batch)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits ``[n, V]`` of the batch's logit rows; what is written becomes valid when the tokens are committed."""
        tokens, logit_rows = self.view.prepare(batch)
        hidden = self.model(tokens, self.view)
        self.num_tokens_computed += batch.num_tokens
        self.num_forwards += 1
        return self.model.logits(hidden[logit_rows])

    def stats(self) -> dict[str, int]:
        """Figures for ``infer generate --stats``."""
        return {
            "tokens computed": self.num_tokens_computed,
            "forward passes": self.num_forwards,
            "cache capacity (tokens)": self.pool.capacity_tokens,
            "cache bytes": self.pool.num_bytes,
            "kernels launched": LAUNCHES.total(),
        }

    def load(self) -> EngineLoad:
        """How busy the engine is, for whoever sends it requests."""
        return EngineLoad.of(self.scheduler)
