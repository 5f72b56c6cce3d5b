"""Peers of the generation benchmark, as their users get them: transformers' ``generate``, and vLLM where it is
installed. Introduced in phase 3.1.

``transformers_eager`` is a plain call with the cache that grows; ``transformers_compiled`` has the static cache, for
which ``generate`` compiles the decode step by itself (``CompileConfig``: Inductor, CUDA graphs), only on a GPU.
Invariant: nothing of a peer is replaced or tuned. A streamer sees each token when it reaches the host, which
``generate`` waits for in every step with or without one.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.contenders import Contender
from benchmarks.serving import vllm_peer
from benchmarks.setup import Setup
from benchmarks.timing import OnToken, answer_with
from shared.errors import ConfigError
from shared.parity.reference import load_reference

PEERS = {
    "transformers_eager": "transformers, eager",
    "transformers_compiled": "transformers, static cache, compiled",
    "vllm": "vLLM",
}


def choose_peers(asked: Sequence[str] | None, is_gpu: bool) -> list[str]:
    """The peers asked for, or all that can run here; raises ConfigError for one that cannot."""
    able = list(PEERS) if is_gpu else ["transformers_eager"]
    if not vllm_peer.is_installed():
        able = [name for name in able if name != "vllm"]
    for name in asked or ():
        if name not in PEERS:
            raise ConfigError(f"There is no peer {name!r}; there are {', '.join(PEERS)}.")
        if name not in able:
            what = "a GPU and an installed vLLM" if name == "vllm" else "a GPU (--device cuda)"
            raise ConfigError(f"The peer {name} needs {what}; peers that can run here: {', '.join(able)}.")
    return able if asked is None else [name for name in able if name in asked]


def load_peers(program: str, names: Sequence[str], setup: Setup, max_seq_len: int) -> dict[str, Contender]:
    """The peers of one program, ``transformers`` or ``vllm``, on one copy of the weights."""
    if program == "vllm":
        return {"vllm": load_vllm(setup, max_seq_len)}
    return load_transformers([name for name in names if name.startswith(program)], setup)


def load_transformers(names: Sequence[str], setup: Setup) -> dict[str, Contender]:
    """transformers in one or both of its ways, with its default attention.

    In the eager one's warm-up cuDNN plans its attention for each length; of the compiled one's three, one compiles, and
    two record the CUDA graph and replay it.
    """
    from transformers import CompileConfig, GenerationConfig

    model = load_reference(setup.folder, setup.work.dtype).to(setup.target)
    model.generation_config = GenerationConfig()  # the folder's own would bring its end ids back
    found = {}
    for name in names:
        settings: dict[str, Any] = {"do_sample": False, "attention": "sdpa"}
        ways: dict[str, Any] = {}
        if is_compiled := name == "transformers_compiled":
            ways = {"cache_implementation": "static", "compile_config": CompileConfig()}
            settings |= ways | {"compile_config": CompileConfig().to_dict()}
        found[name] = Contender(
            PEERS[name],
            partial(generate_with, model, ways),
            {"generate": settings},
            num_warm_ups=3 if is_compiled else 1,
        )
    return found


def load_vllm(setup: Setup, max_seq_len: int) -> Contender:
    """vLLM's engine in this process, for one request at a time."""
    engine = vllm_peer.VllmEngine(setup.folder, setup.work.dtype, max_seq_len)
    return Contender(PEERS["vllm"], partial(answer_with, engine), engine.settings)


class TokenStreamer:
    """Hands each token that ``generate`` makes to ``on_token``; cannot break an answer off."""

    def __init__(self, on_token: OnToken) -> None:
        self.on_token, self.num_tokens = on_token, -1  # the first call brings the prompt

    def put(self, value: torch.Tensor) -> None:
        self.num_tokens += 1
        if self.num_tokens:
            self.on_token(int(value))

    def end(self) -> None:
        pass


def generate_with(model: Any, ways: dict[str, Any], prompt_ids: list[int], new_tokens: int, on_token: OnToken) -> int:
    """Let transformers answer: an `Answer` once the model and further settings of its GenerationConfig are bound."""
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, **ways)
    ids = torch.tensor([prompt_ids], device=model.device)
    streamer = TokenStreamer(on_token)
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer)
    return len(prompt_ids) + streamer.num_tokens - 1
