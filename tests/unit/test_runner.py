"""The runner: forwards and sampling of a batch, ids that stay on the device, failures that stay with their sequence."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phases.phase_07.engine import Engine
from shared.cache.pool.contiguous import ContiguousKVCachePool
from shared.cache.view.interface import StepInputs, step_arrays
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.engine.runner import MakeRunner, Runner
from shared.engine.sampling.sampler import SampledTokens
from shared.models.mlp import GatedMLP
from shared.models.tokens import Tokens
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled

VOCABULARY = 100


class Successor:
    """A model whose likeliest token is the one after its last: the logits of id i are highest at i + 1."""

    device, dtype = torch.device("cpu"), torch.float32
    config = SimpleNamespace(vocab_size=VOCABULARY)

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.failing: set[int] = set()

    def __call__(self, tokens: Tokens, kv: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
        self.seen.append(tokens.ids.tolist())
        if self.failing & {*self.seen[-1]}:
            raise RuntimeError("injected")
        return tokens.ids if rows is None else tokens.ids[rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert len(hidden), "logits of no rows are not computed"
        return torch.nn.functional.one_hot(hidden + 1, VOCABULARY).float()


class View:
    """Loads a batch and has no memory."""

    num_bytes = 0

    def load(self, batch: Batch) -> StepInputs:
        return StepInputs.of({name: torch.from_numpy(array.copy()) for name, array in step_arrays(batch).items()})


class Step:
    """A runner over requests whose prompts end with 10, 20, … and have 1, 2, … tokens."""

    def __init__(self, num_requests: int, runner: MakeRunner = Runner) -> None:
        self.model = Successor()
        self.pool = ContiguousKVCachePool(8, 20)
        self.runner = runner(self.model, View(), 8)  # type: ignore[arg-type]
        params = SamplingParams(temperature=0.0)
        self.requests = [Request(str(n), [5] * n + [10 * (n + 1)], params, 0) for n in range(num_requests)]
        for request in self.requests:
            assert self.pool.reserve(request, 20)

    def schedule(self, order: Sequence[int]) -> Schedule:
        """The next tokens of these requests, known or in flight."""
        entries = []
        for n in order:
            request = self.requests[n]
            entries.append(Scheduled(request, request.num_scheduled_tokens, request.num_unscheduled_tokens))
            request.num_scheduled_tokens += entries[-1].num_tokens
            request.num_pending_tokens += 1
        return Schedule(1, tuple(entries))

    def run(self, order: Sequence[int]) -> SampledTokens:
        schedule = self.schedule(order)
        launched = self.runner.forward(Batch.of(schedule, self.pool))
        return self.runner.sample(launched, schedule.sampling_rows()).wait()

    def commit(self, order: Sequence[int], sampled: SampledTokens) -> None:
        for n, (token_id, _) in zip(order, sampled, strict=True):
            request = self.requests[n]
            self.pool.commit(request, request.num_scheduled_tokens - request.num_computed_tokens)
            request.num_computed_tokens = request.num_scheduled_tokens
            request.num_pending_tokens -= 1
            request.append(token_id)


@pytest.mark.failing_forwards
@pytest.mark.parametrize("culprits", [[0], [2], [3], [1, 2], [0, 1, 2, 3]])
def test_a_row_that_cannot_be_drawn_fails_alone(culprits: list[int]) -> None:
    """And its number is that of its sequence in the batch, also where forwards have failed before."""
    for failing in (set(), {10}, {10, 30}):
        step = Step(4)
        step.model.failing = failing
        sample = step.runner.sampler.sample

        def drawing(logits: torch.Tensor, rows: Any, places: Any, sample: Any = sample) -> Any:
            if any(10 * (n + 1) + 1 in logits.argmax(-1).tolist() for n in culprits):
                raise ValueError("injected")
            return sample(logits, rows, places)

        step.runner.sampler.sample = drawing  # type: ignore[method-assign]
        sampled = step.run([2, 0, 3, 1])
        lost = {*culprits, *(token_id // 10 - 1 for token_id in failing)}
        assert sampled.token_ids == [10 * (n + 1) + 1 for n in (2, 0, 3, 1) if n not in lost]
        assert sorted(sampled.errors) == [place for place, n in enumerate((2, 0, 3, 1)) if n in lost]


def test_the_rest_of_the_last_layer_computes_only_sampled_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens do if a prompt is scored; a step that samples none keeps one."""
    computed: list[int] = []
    run = GatedMLP.forward

    def counted(self: GatedMLP, x: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        computed.append(len(x))
        return run(self, x, *arguments, **named)

    monkeypatch.setattr(GatedMLP, "__call__", counted)
    engine = Engine(EngineConfig(str(folder), max_batch_size=4, prefill_chunk_size=4))
    num_layers = len(engine.model.blocks)

    def step() -> tuple[int, int]:
        """The tokens of every block but the last, and of the last."""
        computed.clear()
        engine.step()
        *others, last = computed
        assert others == others[:1] * (num_layers - 1)
        return others[0], last

    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    engine.add_request(list(range(3, 13)), params)
    assert [step() for _ in range(3)] == [(4, 1), (4, 1), (2, 1)]
    engine.add_request([8, 9], params)
    engine.add_request([7, 5, 6, 4, 3], params)
    assert [step() for _ in range(2)] == [(1 + 2 + 4, 2), (3, 3)]
    while engine.has_work():
        engine.step()
    engine.add_request([5, 6, 7], replace(params, prompt_logprobs=0))
    assert step() == (3, 3)
