"""The loop for many requests, with attention planned before each step."""

import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from shared.cache.contiguous_memory import contiguous_memory
from shared.cache.paged_memory import PagedMemory
from shared.cache.planned_attention import planned_attention
from shared.cache.view import MakeMemory
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.engine.output_processor import OutputProcessor
from shared.engine.prompt import check_prompt
from shared.engine.record import EngineLoad, StepRecord
from shared.engine.request import Request
from shared.engine.runner import Runner
from shared.engine.sampler import SamplerOutput
from shared.kernels.launch import LAUNCHES
from shared.loading.loader import load_model
from shared.loading.resolve import resolve_model
from shared.models.fused import fuse
from shared.models.packed import pack
from shared.sampling.params import SamplingParams
from shared.scheduling.preemption import PreemptiveScheduler
from shared.scheduling.schedule import Schedule
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
    "attention_backend=planned",
    "pack_weights",
    "max_batch_size",
    "max_num_batched_tokens",
    "max_waiting_requests",
    "kv_cache_backend",
    "kv_cache_backend=paged",
    "batching_mode",
    "batching_mode=continuous",
    "scheduler_policy",
    "max_decode_interval",
    "block_size",
    "num_gpu_blocks",
}
MEMORY: dict[str, MakeMemory] = {"contiguous": contiguous_memory, "paged": PagedMemory(planned_attention)}
SCHEDULERS: dict[str, type[Scheduler]] = {"static": StaticScheduler, "continuous": PreemptiveScheduler}


class Engine:
    """Serves many requests at a time from a paged KV cache, with each step's attention planned on the host."""

    def __init__(self, config: EngineConfig) -> None:
        config.check(SUPPORTED)
        folder = resolve_model(config.model)
        self.config = config
        self.model = load_model(folder, dtype=config.torch_dtype, device=config.device)
        (pack if config.pack_weights else fuse)(self.model)
        self.tokenizer = Tokenizer.load(folder)
        self.max_seq_len = config.sequence_limit(self.model.max_positions)
        make_memory = MEMORY[config.kv_cache_backend or "paged"]
        self.pool, self.view = make_memory(config, self.model, self.max_seq_len)
        scheduler = SCHEDULERS[config.batching_mode or "continuous"]
        self.scheduler = scheduler(config, self.pool, self.max_seq_len)
        self.runner = Runner(self.model, self.view, self.pool.max_sequences)
        self.output_processor = OutputProcessor(self.tokenizer, self.max_seq_len)
        self.seeds = random.Random(config.seed)
        self.request_ids = itertools.count()
        self.answers: dict[str, deque[StepOutput]] = {}  # outputs that `generate` has not yielded yet
        self.last_step: StepRecord | None = None

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a request and return its id; raises RequestError or QueueFullError, and queues nothing."""
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        prompt_ids = check_prompt(prompt_ids, self.model.config.vocab_size, self.max_seq_len)
        end_ids = params.end_ids(self.tokenizer.eos_ids, self.model.config.vocab_size)
        if request_id is None:
            request_id = next(name for name in map(str, self.request_ids) if name not in self.scheduler)
        params.refuse("structured_output", "12")
        self.scheduler.check(request_id, len(prompt_ids), params)
        seed = self.seeds.getrandbits(64) if params.seed is None else params.seed
        request = Request(request_id, prompt_ids, params, seed, end_ids)
        self.scheduler.add(request)
        self.output_processor.add(request)
        return request_id

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One iteration: schedule, prefill the new prompts, run one token of each decoding request.

        A step that is interrupted, or raises, can be repeated: the next one also returns the outputs it had committed.
        """
        try:
            schedule = self.scheduler.schedule()
            prompts, decoding = schedule.prompts, schedule.decoding
            prefilled = self.prefill(prompts)
            decoded = self.decode(decoding)  # launch both forwards before waiting for tokens of the first
            self.finish(prompts, prefilled)
            self.finish(decoding, decoded)
        except BaseException:
            self.scheduler.drop_in_flight()
            self.scheduler.finish(self.output_processor.catch_up())
            raise
        outputs = self.output_processor.take()
        self.last_step = StepRecord.of(self.scheduler, schedule, outputs)
        return outputs

    def abort(self, request_id: str) -> bool:
        """Abort a request, which gives no further output; False if it is neither waiting nor running."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self.output_processor.drop(request)
        return request is not None

    def has_work(self) -> bool:
        """Whether a step has outputs to return or requests to run."""
        return bool(self.output_processor.ready) or self.scheduler.has_work()

    def generate(self, prompt: str | Sequence[int], params: SamplingParams) -> Iterator[StepOutput]:
        """Yield one output per token until the request finishes; raises RequestError before anything is computed.

        Each iterator steps the engine, so several may be used alternately, but no other caller may step meanwhile.
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

    def prefill(self, prompts: Schedule) -> SamplerOutput:
        """Run whole prompts, laid end to end, and sample the next token of each."""
        return self.forward(prompts)

    def decode(self, decoding: Schedule) -> SamplerOutput:
        """Run the last token of each sequence and sample the next."""
        return self.forward(decoding)

    def forward(self, part: Schedule) -> SamplerOutput:
        """Launch a part of a step as one batch, without waiting; its results are valid after ``finish``."""
        if not part:
            return SamplerOutput(())
        launched = self.runner.forward(Batch.of(part, self.pool))
        return self.runner.sample(launched, part.sampling_rows())

    def finish(self, part: Schedule, sampled: SamplerOutput) -> None:
        """Wait for the tokens of a part of a step, commit them, and make their outputs."""
        self.scheduler.commit(part, sampled.wait())
        self.scheduler.finish(self.output_processor.process(part))

    def stats(self) -> dict[str, int]:
        """Counters for ``infer generate --stats``."""
        return {
            "tokens computed": self.runner.num_tokens_computed,
            "forward passes": self.runner.num_forwards,
            "cache capacity (tokens)": self.pool.capacity_tokens,
            "cache bytes": self.view.num_bytes,
            "kernels launched": LAUNCHES.total(),
        }

    def load(self) -> EngineLoad:
        """Running and waiting requests, and KV cache usage."""
        return EngineLoad.of(self.scheduler)
