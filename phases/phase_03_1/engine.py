"""The loop on fused kernels: a token costs a few launches per layer, and little more than reading the weights once."""

import itertools
import random
from collections.abc import Iterator, Sequence

import torch

from shared.cache.view.contiguous import ContiguousCache
from shared.cache.view.fused_contiguous import FusedContiguousView
from shared.engine import supported
from shared.engine.config import EngineConfig
from shared.engine.output import OutputStream, StepOutput
from shared.engine.prompt import check_prompt
from shared.engine.request import Request
from shared.kernels.launch import LAUNCHES
from shared.kernels.sampling.sampler import sample
from shared.loading.loader import load_model
from shared.loading.resolve import resolve_model
from shared.models.fused import fuse
from shared.models.packed import pack
from shared.models.tokens import Tokens
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingBatch
from shared.text.tokenizer import Tokenizer

SUPPORTED = supported.FUSED_KERNELS


class Engine:
    """Serves one request at a time, with fused parts and a KV cache that kernels read and write."""

    @torch.inference_mode()
    def generate(self, prompt: str | Sequence[int], params: SamplingParams) -> Iterator[StepOutput]:
        """Yield one output per token until the request finishes; raises RequestError before anything is computed."""
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        prompt_ids = check_prompt(prompt_ids, self.model.config.vocab_size, self.max_seq_len)
        params.check()
        end_ids = params.end_ids(self.tokenizer.eos_ids, self.model.config.vocab_size)
        seed = self.seeds.getrandbits(64) if params.seed is None else params.seed
        request = Request(str(next(self.request_ids)), prompt_ids, params, seed, end_ids)
        stream = OutputStream(request, self.tokenizer, self.max_seq_len)

        logits = self.prefill(request)
        while True:
            token_id = int(sample(logits, SamplingBatch.of([request.sampling_row()], device=logits.device)))
            request.append(token_id)
            output = stream.push(token_id)
            yield output
            if output.finish_reason is not None:
                return
            logits = self.decode(request)

    def prefill(self, request: Request) -> torch.Tensor:
        """Run the prompt into an empty cache; logits ``[1, V]`` of the next token."""
        self.cache.release()
        return self.forward(request)

    def decode(self, request: Request) -> torch.Tensor:
        """Run the last token, which is not cached yet; logits ``[1, V]`` of the next token."""
        return self.forward(request)

    def forward(self, request: Request) -> torch.Tensor:
        """Logits ``[1, V]`` after the request's last token; computes only tokens that are not cached."""
        new_ids = request.token_ids[request.num_computed_tokens :]
        ids = torch.tensor(new_ids, device=self.model.device)
        positions = torch.arange(request.num_computed_tokens, request.num_tokens, device=self.model.device)
        self.cache.reserve(request.request_id, len(new_ids))
        self.view.prepare(len(new_ids))
        hidden = self.model(Tokens(ids, positions), self.view)
        self.cache.advance(len(new_ids))
        request.num_computed_tokens += len(new_ids)
        self.num_tokens_computed += len(new_ids)
        return self.model.logits(hidden[-1:])

    def __init__(self, config: EngineConfig) -> None:
        config.check(SUPPORTED)
        folder = resolve_model(config.model)
        self.config = config
        self.model = load_model(folder, dtype=config.torch_dtype, device=config.device)
        (pack if config.pack_weights else fuse)(self.model)
        self.tokenizer = Tokenizer.load(folder)
        self.max_seq_len = config.sequence_limit(self.model.max_positions)
        self.cache = ContiguousCache(self.model.config, self.max_seq_len, self.model.dtype, self.model.device)
        self.view = FusedContiguousView(self.cache, self.model.config.num_heads, config.attention_backend)
        self.seeds = random.Random(config.seed)
        self.request_ids = itertools.count()
        self.num_tokens_computed = 0

    def stats(self) -> dict[str, int]:
        """Counters for ``infer generate --stats``."""
        return {
            "tokens computed": self.num_tokens_computed,
            "cache capacity (tokens)": self.cache.capacity,
            "cache bytes": self.cache.num_bytes,
            "kernels launched": LAUNCHES.total(),
        }
