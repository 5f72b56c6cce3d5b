"""The plain loop: every token recomputes everything."""

import itertools
import random
from collections.abc import Iterator, Sequence

import torch

from shared.cache.view.uncached import UncachedView
from shared.engine import supported
from shared.engine.config import EngineConfig
from shared.engine.output import OutputStream, StepOutput
from shared.engine.prompt import check_prompt
from shared.engine.request import Request
from shared.loading.loader import load_model
from shared.loading.resolve import resolve_model
from shared.models.tokens import Tokens
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingBatch, sample
from shared.text.tokenizer import Tokenizer

SUPPORTED = supported.MODEL


class Engine:
    """Serves one request at a time, without a KV cache."""

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
        """Run the prompt; logits ``[1, V]`` of the next token."""
        return self.forward(request)

    def decode(self, request: Request) -> torch.Tensor:
        """Run the prompt and the output so far; logits ``[1, V]`` of the next token."""
        return self.forward(request)

    def forward(self, request: Request) -> torch.Tensor:
        """Logits ``[1, V]`` after the request's last token; computes all its tokens."""
        ids = torch.tensor(request.token_ids, device=self.model.device)
        positions = torch.arange(request.num_tokens, device=self.model.device)
        view = UncachedView([request.num_tokens], self.config.attention_backend)
        hidden = self.model(Tokens(ids, positions), view)
        self.num_tokens_computed += request.num_tokens
        return self.model.logits(hidden[-1:])

    def __init__(self, config: EngineConfig) -> None:
        config.check(SUPPORTED)
        folder = resolve_model(config.model)
        self.config = config
        self.model = load_model(folder, dtype=config.torch_dtype, device=config.device)
        self.tokenizer = Tokenizer.load(folder)
        self.max_seq_len = config.sequence_limit(self.model.max_positions)
        self.seeds = random.Random(config.seed)
        self.request_ids = itertools.count()
        self.num_tokens_computed = 0

    def stats(self) -> dict[str, int]:
        """Counters for ``infer generate --stats``."""
        return {"tokens computed": self.num_tokens_computed}
