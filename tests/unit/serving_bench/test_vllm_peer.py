"""The adapter around vLLM, with a module in vLLM's place that answers with the calls of vLLM 0.26."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.serving.vllm_peer import VllmEngine
from shared.errors import ConfigError
from shared.sampling.params import SamplingParams


class FakeEngine:
    """Counts upwards from a prompt's last id; as with asynchronous scheduling, the first step gives nothing."""

    def __init__(self) -> None:
        self.open: dict[str, list[int]] = {}  # last id, tokens to come
        self.is_in_flight = self.is_down = False
        self.engine_core = SimpleNamespace(shutdown=lambda: setattr(self, "is_down", True))

    def add_request(self, request_id: str, prompt: Any, params: Any) -> str:
        assert prompt["type"] == "token"
        assert (params.ignore_eos, params.detokenize, params.output_kind) == (True, False, "delta")
        self.open[request_id] = [prompt["prompt_token_ids"][-1], params.max_tokens]
        return f"{request_id}-3f2a"

    def step(self) -> list[Any]:
        self.is_in_flight, gives = True, self.is_in_flight
        outputs = []
        for request_id, entry in list(self.open.items()) if gives else []:
            entry[0], entry[1] = entry[0] + 1, entry[1] - 1
            given = SimpleNamespace(token_ids=[entry[0]])
            outputs.append(SimpleNamespace(request_id=request_id, outputs=[given], finished=entry[1] == 0))
            if entry[1] == 0:
                del self.open[request_id]
        return outputs

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.open[request_id]

    def has_unfinished_requests(self) -> bool:
        return bool(self.open)

    def apply_model(self, function: Any) -> list[Any]:
        return [function(torch.nn.Linear(3, 2))]


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Puts the fake, and a GPU's memory, in place; what ``LLM`` was called with."""
    called: dict[str, Any] = {}

    def make(model: str, **settings: Any) -> Any:
        called.update(settings, model=model)
        return SimpleNamespace(llm_engine=FakeEngine())

    vllm, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.__spec__ = ModuleSpec("vllm", None)
    vllm.__dict__.update(LLM=make, SamplingParams=SimpleNamespace, __version__="0.26.0")
    params.__dict__.update(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (60 << 30, 80 << 30))
    return called


def test_tokens_are_handed_on_one_by_one_and_counted(fake_vllm: dict[str, Any], folder: Path) -> None:
    engine = VllmEngine(folder, torch.bfloat16, max_seq_len=64, max_batch_size=3)
    assert (fake_vllm["model"], fake_vllm["dtype"], fake_vllm["max_num_seqs"]) == (str(folder), "bfloat16", 3)
    assert fake_vllm["gpu_memory_utilization"] == 0.675
    assert (engine.weight_bytes, engine.version) == (32, "0.26.0")
    engine.add_request([5, 6], SamplingParams(temperature=0.0, max_new_tokens=2), "0")
    engine.add_request([9], SamplingParams(temperature=0.0, max_new_tokens=5), "1")
    assert engine.step() == []
    steps = [engine.step(), engine.step()]
    assert [[(o.request_id, o.token_id) for o in outputs] for outputs in steps] == [
        [("0", 7), ("1", 10)],
        [("0", 8), ("1", 11)],
    ]
    assert [output.finish_reason is not None for output in steps[1]] == [True, False]
    assert engine.stats() == {"tokens computed": 2 + 1 + 1 + 1, "cache bytes": fake_vllm["kv_cache_memory_bytes"]}
    engine.abort("1")
    assert not engine.has_work()
    theirs = engine.engine
    engine.close()
    assert theirs.is_down


def test_one_request_alone_is_an_iterator_that_drops_it_when_closed(fake_vllm: dict[str, Any], folder: Path) -> None:
    engine = VllmEngine(folder, torch.bfloat16, max_seq_len=64)
    params = SamplingParams(temperature=0.0, max_new_tokens=3)
    assert [output.token_id for output in engine.generate([1, 2], params)] == [3, 4, 5]
    answer = engine.generate([1, 2], params)
    assert next(answer).token_id == 3
    answer.close()  # type: ignore[attr-defined]
    assert not engine.has_work()


def test_without_vllm_it_says_how_to_install_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match="pip install vllm"):
        VllmEngine(folder, torch.bfloat16, max_seq_len=64)
