"""Log-probabilities of prompts: exact, in bounded pieces, whatever the phase, and once for a preempted request."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shared.engine.runner as runner_module
from phases.phase_03_1.engine import Engine as Single
from phases.phase_04.engine import Engine as Static
from phases.phase_05.engine import Engine as Continuous
from phases.phase_06.engine import Engine as Paged
from phases.phase_06_1.engine import Engine as Planned
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.engine.request import TokenLogprobs
from shared.errors import RequestError
from shared.parity.reference import load_reference
from shared.sampling.params import SamplingParams
from shared.text.stopping import FinishReason

ENGINES = [Static, Continuous, Paged, Planned]
PROMPTS = [[5, 5, 9], [(7 * n) % 250 for n in range(40)], [3]]
ASKED: list[dict[str, Any]] = [
    {"prompt_logprobs": 0, "max_new_tokens": 0},
    {"prompt_logprobs": 3, "max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True},
    {"prompt_logprobs": 2, "max_new_tokens": 0},
]


def make(kind: Any, folder: Path, **config: Any) -> Any:
    return kind(EngineConfig(model=str(folder), max_seq_len=64, **config))


def serve(engine: Any, prompts: Sequence[list[int]], asked: Sequence[dict[str, Any]]) -> list[list[StepOutput]]:
    names = [engine.add_request(prompt, SamplingParams(**one)) for prompt, one in zip(prompts, asked, strict=True)]
    outputs: dict[str, list[StepOutput]] = {name: [] for name in names}
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(output)
    assert engine.pool.audit() == []
    return [outputs[name] for name in names]


def check(folder: Path, prompt: list[int], k: int, found: Any) -> None:
    """Against transformers in fp32."""
    assert len(found) == len(prompt)
    assert found[0] is None
    with torch.inference_mode():
        truth = load_reference(folder, torch.float32)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    for row, token_id, logprobs in zip(truth, prompt[1:], found[1:], strict=False):
        assert logprobs.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        top = row.topk(k)
        assert [i for i, _ in logprobs.top[:k]] == top.indices.tolist()
        assert [p for _, p in logprobs.top[:k]] == pytest.approx(top.values.tolist(), abs=1e-4)
        is_extra = k > 0 and token_id not in top.indices.tolist()
        assert logprobs.top[k:] == (((token_id, logprobs.logprob),) if is_extra else ())


def rows_of_each_head_call(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    logits = engine.model.logits
    monkeypatch.setattr(engine.model, "logits", lambda hidden: (calls.append(len(hidden)), logits(hidden))[1])
    return calls


def test_they_are_those_of_transformers(model_folder: Path) -> None:
    outputs = serve(make(Planned, model_folder), PROMPTS, ASKED)
    for prompt, asked, answer in zip(PROMPTS, ASKED, outputs, strict=True):
        check(model_folder, prompt, asked["prompt_logprobs"], answer[0].prompt_logprobs)
        assert all(output.prompt_logprobs is None for output in answer[1:])
    first, drawn, last = outputs
    assert len(drawn) == 4
    for answer in (first, last):
        (output,) = answer
        assert (output.token_id, output.text, output.finish_reason) == (None, "", FinishReason.LENGTH)


@pytest.mark.parametrize("kind", ENGINES, ids=lambda kind: kind.__module__.split(".")[1])
def test_every_phase_computes_them_in_pieces(
    kind: Any, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoints["gemma3_text"]
    expected = serve(make(Static, folder), PROMPTS, ASKED)
    monkeypatch.setattr(runner_module, "MAX_PROMPT_LOGIT_ROWS", 7)
    engine = make(kind, folder)
    calls = rows_of_each_head_call(engine, monkeypatch)
    drawing = [{key: value for key, value in one.items() if key != "prompt_logprobs"} for one in ASKED]
    for ours, theirs in zip(serve(engine, PROMPTS, ASKED), expected, strict=True):
        assert [output.token_id for output in ours] == [output.token_id for output in theirs]
        for mine, other in zip(ours[0].prompt_logprobs or (), theirs[0].prompt_logprobs or (), strict=True):
            assert (mine is None) == (other is None)
            if mine and other:
                assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert sorted(calls) == [1] * 4 + [6] + [7] * 5, "39 + 2 rows of prompts, and one for each of four tokens"
    assert engine.runner.num_forwards == 4
    calls.clear()
    serve(engine, PROMPTS[1:2], drawing[1:2])
    assert calls == [1] * 4, "a request that does not ask computes one row for a token"


def test_a_preempted_request_gets_them_once(tiny_checkpoints: dict[str, Path]) -> None:
    folder = tiny_checkpoints["qwen3"]
    prompts = [[n + 1] * 6 for n in range(4)]
    asked = [{"prompt_logprobs": 1, "max_new_tokens": 20, "temperature": 0.0, "ignore_eos": True}] * 4
    engine = make(Planned, folder, block_size=4, num_gpu_blocks=16, max_batch_size=4)
    outputs = serve(engine, prompts, asked)
    assert engine.load().num_preemptions > 0
    for prompt, ours in zip(prompts, outputs, strict=True):
        assert len(ours) == 20
        check(folder, prompt, 1, ours[0].prompt_logprobs)
        assert sum(output.prompt_logprobs is not None for output in ours) == 1


@pytest.mark.failing_forwards
def test_a_request_that_fails_takes_no_other_ones(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is run in parts, whose sequences are numbered from 0."""
    folder = tiny_checkpoints["llama"]
    engine = make(Planned, folder)
    logits = engine.model.logits

    def failing(hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) > 39:
            raise RuntimeError("injected")
        return logits(hidden)

    monkeypatch.setattr(engine.model, "logits", failing)
    prompts = [[4] * 5, [6] * 45, [8] * 9]
    first, second, third = serve(engine, prompts, [{"prompt_logprobs": 1, "max_new_tokens": 0}] * 3)
    assert second[0].finish_reason is FinishReason.ERROR
    for prompt, answer in ((prompts[0], first), (prompts[2], third)):
        check(folder, prompt, 1, answer[0].prompt_logprobs)


def test_an_interrupted_step_is_repeated_and_delivers_them_once(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoints["llama"]
    for broken in ("commit", "process"):
        engine = make(Planned, folder)
        owner = engine.scheduler if broken == "commit" else engine.output_processor
        with monkeypatch.context() as patch:
            patch.setattr(owner, broken, interrupt)
            engine.add_request(PROMPTS[0], SamplingParams(prompt_logprobs=1, max_new_tokens=0))
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        (output,) = [output for _ in range(2) for output in engine.step()]
        check(folder, PROMPTS[0], 1, output.prompt_logprobs)
        assert not engine.has_work()
        assert engine.pool.audit() == []


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def test_the_whole_answer_has_them(tiny_checkpoints: dict[str, Path]) -> None:
    from shared.engine.llm import LLM

    llm = LLM(str(tiny_checkpoints["llama"]), max_seq_len=64)
    (answer,) = llm.generate([PROMPTS[0]], SamplingParams(prompt_logprobs=1, max_new_tokens=0), progress=False)
    assert answer.token_ids == []
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.prompt_logprobs is not None
    assert [isinstance(one, TokenLogprobs) for one in answer.prompt_logprobs] == [False, True, True]


def test_engines_for_one_request_refuse_them_and_unknown_ids_by_name(tiny_checkpoints: dict[str, Path]) -> None:
    single = make(Single, tiny_checkpoints["llama"])
    for engine in (single, make(Planned, tiny_checkpoints["llama"])):
        with pytest.raises(RequestError, match=r"stop_token_ids is 999999; it must be ids of this model"):
            list(engine.generate([1], SamplingParams(stop_token_ids=(999_999,))))
    with pytest.raises(RequestError, match=r"prompt_logprobs is 1; it must be left out: .* phase 04 does"):
        list(single.generate([1], SamplingParams(prompt_logprobs=1)))
