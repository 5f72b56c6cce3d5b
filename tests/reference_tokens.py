"""The tokens and logits of transformers, computed once for all the processes of a test run."""

import json
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from shared.parity.reference import load_reference


def version(folder: Path) -> list[tuple[str, int, int]]:
    """What changes when a file of the checkpoint is written again."""
    return [(str(file), (s := file.stat()).st_size, s.st_mtime_ns) for file in sorted(folder.iterdir())]


def kept(file: Path, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What ``compute`` gives in the first of the processes of a test run that asks."""
    with FileLock(f"{file}.lock"):
        if not file.exists():
            torch.save(compute(), file)
    return torch.load(file)


def greedy_tokens(reference: Any, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation of a prompt by transformers' ``generate``, with its cache, past end-of-sequence ids."""
    from transformers import GenerationConfig

    reference.generation_config = GenerationConfig()  # the folder's config would restore its eos ids
    ids = torch.tensor([prompt_ids], device=reference.device)
    config = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
    with torch.inference_mode():
        found = reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return found[0, len(prompt_ids) :].tolist()


class ReferenceTokens:
    """``reference_tokens(folder, prompt_ids, n)``: the ``n`` tokens with which transformers continues a prompt in fp32.

    A greedy answer begins with every shorter one, so one file per checkpoint and prompt holds the longest answer that a
    test asked for. A lock on the file lets one process compute while the others wait.
    """

    def __init__(self, answers: Path) -> None:
        self.answers = answers
        self.model = cache(partial(load_reference, dtype=torch.float32))

    def __call__(self, folder: Path, prompt_ids: list[int], num_tokens: int) -> list[int]:
        key = sha256(repr((version(folder), prompt_ids)).encode()).hexdigest()
        file = self.answers / f"{key}.json"
        with FileLock(f"{file}.lock"):
            found = json.loads(file.read_text()) if file.exists() else []
            if len(found) < num_tokens:
                found = greedy_tokens(self.model(folder), prompt_ids, num_tokens)
                file.write_text(json.dumps(found))
        return found[:num_tokens]
