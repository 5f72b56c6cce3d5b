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
        self.abort_request = lambda ids: [self.open.pop(request_id) for request_id in ids]
        self.has_unfinished_requests = lambda: bool(self.open)

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        assert (prompt["type"], params.ignore_eos, params.detokenize) == ("token", True, False)
        self.open[request_id] = [prompt["prompt_token_ids"][-1], params.max_tokens]

    def step(self) -> list[Any]:
        self.is_in_flight, gives = True, self.is_in_flight
        outputs = []
        for name, (last, left) in list(self.open.items()) if gives else []:
            self.open[name] = [last + 1, left - 1]
            given = [SimpleNamespace(token_ids=[last + 1])]
            outputs.append(SimpleNamespace(request_id=name, outputs=given, finished=left == 1))
        self.open = {name: entry for name, entry in self.open.items() if entry[1]}
        return outputs


def test_tokens_are_handed_on_one_by_one_and_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="pip install vllm"):
        VllmEngine(folder, torch.bfloat16, max_seq_len=64)
    vllm, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.__spec__ = ModuleSpec("vllm", None)
    make = lambda model, **settings: SimpleNamespace(llm_engine=FakeEngine())  # noqa: E731
    vllm.__dict__.update(LLM=make, SamplingParams=SimpleNamespace, __version__="0.26.0")
    params.__dict__.update(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    for module in (vllm, params):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (60 << 30, 80 << 30))

    engine = VllmEngine(folder, torch.bfloat16, max_seq_len=64, max_batch_size=3)
    told = {key: engine.settings[key] for key in ("dtype", "max_num_seqs", "gpu_memory_utilization")}
    assert told == {"dtype": "bfloat16", "max_num_seqs": 3, "gpu_memory_utilization": 0.675}
    assert engine.version == "0.26.0"
    engine.add_request([5, 6], SamplingParams(temperature=0.0, max_new_tokens=2), "0")
    engine.add_request([9], SamplingParams(temperature=0.0, max_new_tokens=5), "1")
    given = [(o.request_id, o.token_id, o.finish_reason is not None) for _ in range(3) for o in engine.step()]
    assert given == [("0", 7, False), ("1", 10, False), ("0", 8, True), ("1", 11, False)]
    assert engine.stats()["tokens computed"] == 2 + 1 + 1 + 1
    engine.abort("1")
    assert not engine.has_work()
    three = SamplingParams(temperature=0.0, max_new_tokens=3)
    assert [output.token_id for output in engine.generate([1, 2], three)] == [3, 4, 5]
    alone = engine.generate([1, 2], three)
    assert next(alone).token_id == 3
    alone.close()  # type: ignore[attr-defined]
    assert not engine.has_work()
    theirs = engine.engine
    engine.close()
    assert theirs.is_down
