"""vLLM for comparison, with the interface of a phase's engine. Introduced in phase 4, written against vLLM 0.26.

Its engine runs in its own process. Prompts and outputs are ids, prefixes are not cached, and the KV cache holds as many
tokens as ours. Scheduling, graphs and kernels are vLLM's own choice.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.setup import free_memory
from shared.cache.view.contiguous import kv_bytes
from shared.engine.output import StepOutput
from shared.errors import ConfigError
from shared.loading.config_json import read_config
from shared.sampling.params import SamplingParams
from shared.text.stopping import FinishReason

ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a process that has used the GPU cannot be forked
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiled on first use, with sources that may have to be downloaded
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "HF_HUB_OFFLINE": "1",
}


def settings_of(dtype: torch.dtype, max_seq_len: int, max_batch_size: int, kv_cache_bytes: int) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``, for as much memory as is free now."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (1, 1)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_seq_len,
        "max_num_seqs": max_batch_size,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "gpu_memory_utilization": round(0.9 * free / total, 3),  # this memory must be free, but is not used
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }


def is_installed() -> bool:
    """Whether vLLM can be imported and has a GPU."""
    return importlib.util.find_spec("vllm") is not None and torch.cuda.is_available()


class VllmEngine:
    """vLLM with a model folder, serving like an engine of phase 4 or later; ``last_step`` stays None. Raises
    ConfigError without vLLM or a GPU.
    """

    last_step = None

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        max_seq_len: int,
        max_batch_size: int = 1,
        kv_tokens: int | None = None,
    ) -> None:
        if not is_installed():
            raise ConfigError("The contender vllm needs a GPU and vLLM; install it with `pip install vllm==0.26.0`.")
        os.environ.update(ENVIRONMENT)
        import vllm
        from vllm.sampling_params import RequestOutputKind

        # 256 tokens for each sequence's last block, and a quarter for layers that vLLM groups with padding
        tokens = ((kv_tokens or max_batch_size * max_seq_len) + max_batch_size * 256) * 5 // 4
        num_bytes = kv_bytes(read_config(Path(folder)), tokens, dtype)
        given = settings_of(dtype, max_seq_len, max_batch_size, num_bytes)
        self.max_seq_len, self.version = max_seq_len, vllm.__version__
        self.settings = given | {"version": self.version}
        self.params: Any = lambda **asked: vllm.SamplingParams(output_kind=RequestOutputKind.DELTA, **asked)
        self.engine: Any = vllm.LLM(model=str(folder), **given).llm_engine
        self.new_prompts: dict[str, int] = {}  # the prompt tokens of requests whose first token has not arrived
        self.num_tokens_computed = 0

    def stats(self) -> dict[str, int]:
        return {"tokens computed": self.num_tokens_computed, "cache bytes": self.settings["kv_cache_memory_bytes"]}

    def add_request(self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        request_id = request_id or "alone"
        asked = {"temperature": params.temperature, "max_tokens": params.max_new_tokens}
        theirs = self.params(**asked, ignore_eos=True, detokenize=False)
        self.engine.add_request(request_id, {"type": "token", "prompt_token_ids": list(prompt)}, theirs)
        self.new_prompts[request_id] = len(prompt)
        return request_id

    def step(self) -> list[StepOutput]:
        outputs = []
        for answer in self.engine.step():
            token_ids = answer.outputs[0].token_ids
            for n, token_id in enumerate(token_ids, 1):
                reason = FinishReason.LENGTH if answer.finished and n == len(token_ids) else None
                outputs.append(StepOutput(answer.request_id, token_id, "", reason))
                self.num_tokens_computed += self.new_prompts.pop(answer.request_id, 1)
        return outputs

    def abort(self, request_id: str) -> bool:
        self.engine.abort_request([request_id])
        return self.new_prompts.pop(request_id, None) is not None

    def has_work(self) -> bool:
        return bool(self.engine.has_unfinished_requests())

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[StepOutput]:
        """Answer a single request; closing the iterator drops it."""
        request_id = self.add_request(prompt, params)
        try:
            while self.has_work():
                yield from self.step()
        finally:
            if self.has_work():
                self.abort(request_id)

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        del self.engine
        free_memory()
