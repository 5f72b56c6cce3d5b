"""A model of a layer or two, and sequences that come, grow and go: their hidden states alone and together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shared.cache.view.contiguous import ContiguousCache, ContiguousView
from shared.engine.batch import Batch
from shared.kernels.launch import INTERPRETED
from shared.loading.loader import load_model
from shared.models.tokens import Tokens
from tests.steps import commit, make_request, step_of

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LAYERS = {"llama": (2,), "qwen3": (1,), "gemma3_text": (1, 2)}  # Gemma's: the last with a window, the first without
CAPACITY = 40
Steps = Sequence[Mapping[str, int]]


def load(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model truncated to a layer or two, since each costs the interpreter seconds; the memory has space for all."""
    model = load_model(folder, dtype=dtype, device=DEVICE)
    model.blocks = torch.nn.ModuleList(model.blocks[layer] for layer in LAYERS[family])
    return model


def token_ids(name: str) -> list[int]:
    """The ids of a sequence, as many as it may have."""
    return [(ord(name) * 31 + 113 * n) % 512 for n in range(CAPACITY)]


def run(model: Any, pool: Any, view: Any, steps: Steps, leaves_after: Mapping[int, str]) -> torch.Tensor:
    """Hidden states of each step, whose sequences have so many new tokens; one may leave, and come again."""
    requests, outputs = {name: make_request(name, token_ids(name)) for name in "abcd"}, []
    for number, step in enumerate(steps):
        for name, new in step.items():
            assert pool.reserve(requests[name], requests[name].num_computed_tokens + new)
        schedule = step_of({requests[name]: new for name, new in step.items()})
        outputs.append(model(view.load(Batch.of(schedule, pool))[0], view).clone())
        commit(pool, schedule)
        if number in leaves_after:
            request = requests[leaves_after[number]]
            pool.release(request)
            request.num_computed_tokens = request.num_scheduled_tokens = 0
    return torch.cat(outputs)


def alone(model: Any, steps: Steps, leaves_after: Mapping[int, str], make_view: Any = ContiguousView) -> torch.Tensor:
    """The same hidden states, from a cache of its own for each sequence."""
    caches, outputs = dict[str, ContiguousCache](), []
    for number, step in enumerate(steps):
        for name, new in step.items():
            if name not in caches:
                caches[name] = ContiguousCache(model.config, CAPACITY, model.dtype, DEVICE)
            start, view = caches[name].length, make_view(caches[name], "naive")
            view.prepare(new)
            ids = torch.tensor(token_ids(name)[start : start + new], device=DEVICE)
            outputs.append(model(Tokens(ids, torch.arange(start, start + new, device=DEVICE)), view))
            caches[name].advance(new)
        caches.pop(leaves_after.get(number, ""), None)
    return torch.cat(outputs)


def poisoned(view: Any) -> Any:
    """The view, with NaN in all of its keys and values."""
    view.keys.fill_(float("nan"))
    view.values.fill_(float("nan"))
    return view


def assert_as_near_as_alone(ours: torch.Tensor, model: Any, exact: Any, *steps: Any) -> None:
    """In 16 bits: hidden states are about as far from fp32's as those of a plain cache for each sequence."""
    expected = alone(exact, *steps)
    assert (ours.float() - expected).norm() <= 1.5 * (alone(model, *steps).float() - expected).norm()
