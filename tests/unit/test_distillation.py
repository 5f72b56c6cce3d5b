"""Training of an adapter: what is predicted, from what, and that an interrupted run continues unchanged."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.cache.view.uncached import UncachedView
from shared.engine.llm import LLM
from shared.errors import ConfigError
from shared.loading.loader import load_model
from shared.models.causal_lm import CausalLM
from shared.models.fused import fuse
from shared.models.tokens import Tokens
from shared.ops.attention import naive_attention
from shared.tracks.multi_token.adapter import Adapter, AdapterConfig, load_adapter
from shared.tracks.multi_token.lora import FIRST_MASK, adapt
from shared.tracks.multi_token.training import own_texts
from shared.tracks.multi_token.training import run as training_run
from shared.tracks.multi_token.training import step as training_step
from shared.tracks.multi_token.training.distillation import TrainingConfig, losses, measure, rate, train
from shared.tracks.multi_token.training.look_ahead import batched_attention, look_ahead, read
from shared.tracks.multi_token.training.own_texts import Texts
from shared.tracks.multi_token.training.run import train_adapter
from tests.adapters import random_adapter

SHAPE = AdapterConfig(rank=4, num_masks=2)
WRITING: dict[str, Any] = {"num_prompts": 6, "length": 32, "max_new_tokens": 24, "seed": 0}


def adapted(folder: Path, adapter: Adapter | None = None) -> tuple[CausalLM, Adapter]:
    model = fuse(load_model(folder))
    adapter = adapter or random_adapter(model, num_masks=2)
    return adapt(model, adapter.additions(), adapter.masks), adapter


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_of_texts_is_that_of_each_alone(softcap: float | None) -> None:
    q, k, v = (torch.randn(2, heads, 5, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    found = batched_attention(q, k, v, torch.ones(5, 5).tril().bool(), 0.9, softcap)
    for out, *one in zip(found, q.transpose(1, 2), k, v, strict=True):
        expected = naive_attention(*one, scale=0.9, softcap=softcap)
        torch.testing.assert_close(out.transpose(0, 1), expected)


def some_texts(num_rows: int = 4, length: int = 24) -> Texts:
    ids = torch.randint(0, 500, (num_rows, length), generator=torch.Generator().manual_seed(0))
    return Texts(ids, torch.ones_like(ids, dtype=torch.bool))


@torch.no_grad()
def test_masks_behind_an_anchor_are_those_of_a_step_that_ends_there(model_folder: Path) -> None:
    """Two texts at once, with other anchors beside it, against each beginning alone; longer than Gemma's window."""
    model, _ = adapted(model_folder)
    ids = some_texts(2).ids
    hidden, view = read(model, ids)
    anchors = torch.tensor([0, 7, 21])
    found = look_ahead(model, view, anchors, 2)
    for text in range(2):
        for n, anchor in enumerate(anchors.tolist()):
            own = torch.cat((ids[text, : anchor + 1], torch.tensor([FIRST_MASK, FIRST_MASK + 1])))
            gate = (own >= FIRST_MASK).float()
            alone = model.norm(model(Tokens(own, torch.arange(len(own)), gate), UncachedView([len(own)])))
            torch.testing.assert_close(found[text, n], alone[-2:], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(hidden[text, : anchor + 1], alone[:-2], rtol=1e-4, atol=1e-4)


def test_only_the_adapter_learns_and_every_part_of_it(tiny_checkpoints: dict[str, Path]) -> None:
    model, adapter = adapted(tiny_checkpoints["qwen3"])
    adapter.requires_grad_(True)
    sum(losses(model, adapter, some_texts(), torch.tensor([2, 9]))).backward()  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapter.parameters())
    own = {id(parameter) for parameter in adapter.parameters()}
    assert all(p.grad is None and not p.requires_grad for p in model.parameters() if id(p) not in own)


@torch.no_grad()
def test_an_adapter_is_measured_by_its_first_wrong_guess(tiny_checkpoints: dict[str, Path]) -> None:
    """On a text that repeats what the sampler head is made to say, all is right up to the place where it is changed."""
    model, adapter = adapted(tiny_checkpoints["llama"])
    texts = Texts(torch.full((1, 24), 7), torch.ones(1, 24, dtype=torch.bool))
    head = model.head.weight
    assert isinstance(head, torch.Tensor)
    adapter.head.forward = lambda previous, hidden: head[7].expand_as(hidden)  # type: ignore[method-assign]
    assert int((head @ head[7]).argmax()) == 7
    assert measure(model, adapter, texts, 100).accepted == (1.0, 1.0)
    texts.ids[0, 10] = 8  # a guess for it is wrong: 1 of 21 anchors has it as its first, and 1 as its second
    assert measure(model, adapter, texts, 100).accepted == pytest.approx((20 / 21, 19 / 21))
    texts.is_answer[0, :12] = False
    assert measure(model, adapter, texts, 100) == measure(model, adapter, texts, 21)
    assert measure(model, adapter, texts, 100).judged == 11


@pytest.mark.gpu
def test_a_recorded_step_is_a_step(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps of which five are replayed, against eight eager ones: their losses depend on all updates."""
    texts = Texts(some_texts(8, 40).ids.cuda(), some_texts(8, 40).is_answer.cuda())
    trained = []
    for num_eager in (3, 8):
        monkeypatch.setattr(training_step, "NUM_EAGER", num_eager)
        model = fuse(load_model(tiny_checkpoints["qwen3"], device="cuda", dtype=torch.float32))
        adapter = random_adapter(model, num_masks=2).cuda().requires_grad_(True)
        adapt(model, adapter.additions(), adapter.masks)
        step = training_step.TrainingStep(partial(losses, model, adapter), adapter.parameters(), 1e-3)
        found = []
        for n in range(8):
            options = Texts(texts.ids.roll(n, 1), texts.is_answer), torch.arange(n, n + 20, device="cuda")
            found.append([float(loss) for loss in step(*options, 1e-4 * (n + 1))])
        trained.append(found)
        assert (step.graph is not None) == (num_eager == 3)
    torch.testing.assert_close(torch.tensor(trained[0]), torch.tensor(trained[1]), rtol=1e-3, atol=1e-4)


def test_a_step_is_as_long_as_its_rate() -> None:
    parameter, moved = torch.nn.Parameter(torch.ones(1)), []
    step = training_step.TrainingStep(lambda *_: training_step.Losses(*[parameter.sum()] * 3), [parameter], 1.0)
    for each in (0.0, 1e-3, 1e-2):
        before = float(parameter)
        step(some_texts(), torch.tensor([0]), each)
        moved.append(before - float(parameter))
        assert float(parameter.grad) == pytest.approx(1), "a gradient of 3 is made no longer than 1"
    assert moved == pytest.approx([0.0, 1e-3, 1e-2], rel=0.05)


def test_texts_are_laid_end_to_end_and_cut_into_rows() -> None:
    texts = Texts.of([[1, 2], [3]], [[4], [5, 6, 7]], 3)
    assert texts.ids.tolist() == [[1, 2, 4], [3, 5, 6]]
    assert texts.is_answer.tolist() == [[False, False, True], [False, True, True]]


def test_texts_are_written_anew_for_other_settings_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    write = lambda *_, **options: calls.append(options) or (some_texts(), some_texts(2))  # noqa: E731
    monkeypatch.setattr(training_run, "write_texts", write)
    for options, expected in ((WRITING, 1), (WRITING, 1), (WRITING | {"seed": 1}, 2)):
        found = training_run._texts("a", tmp_path, options, 8, None, "cpu", lambda _: None)
        assert len(calls) == expected
        assert [len(texts.ids) for texts in found] == [4, 2]


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [rate(step / 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) == 3
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.05)


class CutError(Exception):
    """The end of a process."""


def test_a_run_that_is_cut_goes_on_as_if_it_had_not_been(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    config, texts = TrainingConfig(steps=6, rows=2, anchors=4, measure_every=2), (some_texts(4), some_texts(2))
    model = fuse(load_model(tiny_checkpoints["llama"]))

    def start(seed: int) -> tuple[CausalLM, Adapter]:
        torch.manual_seed(seed)
        return adapted(tiny_checkpoints["llama"], Adapter(SHAPE, model.config))

    def cut(entry: dict[str, Any]) -> None:
        if entry["step"] == 4:
            raise CutError

    whole, again = start(1), start(1)
    curve = train(*whole, *texts, config, tmp_path / "runs" / "whole")
    assert curve is not None
    assert [entry["step"] for entry in curve] == [0, 2, 4, 6]
    with pytest.raises(CutError):
        train(*again, *texts, config, tmp_path / "cut", report=cut)
    resumed = start(2)  # as a new process, whose numbers do not matter
    assert [entry["step"] for entry in train(*resumed, *texts, config, tmp_path / "cut") or []] == [0, 2, 4, 6]
    for name, tensor in whole[1].state_dict().items():
        assert torch.equal(resumed[1].state_dict()[name], tensor), name
    with pytest.raises(ConfigError, match=r"other settings \(steps\)"):
        train(*again, *texts, TrainingConfig(7, None, 2, 4, measure_every=2), tmp_path / "cut")
    with pytest.raises(ConfigError, match="a row needs 5 at least"):
        train(*again, some_texts(2, 4), texts[1], config, tmp_path / "short")
    assert train(*again, some_texts(2, 5), some_texts(2, 5), config, tmp_path / "just long enough")


def test_a_run_from_a_name_to_an_adapter(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lines, generate = tiny_checkpoints["llama"], list[str](), LLM.generate
    asked: list[list[tuple[float, int]]] = []
    monkeypatch.setattr(own_texts, "AT_A_TIME", 4)

    def noting(llm: LLM, prompts: Any, params: Any, **more: Any) -> Any:
        asked.append([(each.temperature, each.seed) for each in params])
        return generate(llm, prompts, params, **more)

    monkeypatch.setattr(LLM, "generate", noting)
    config = TrainingConfig(steps=20, rows=8, anchors=8, learning_rate=3e-3, measure_every=10)
    options = (str(folder), tmp_path / "a", SHAPE, config, WRITING, 8)
    (tmp_path / "a.training").mkdir()
    (tmp_path / "a.training" / "texts.safetensors").write_bytes(b"a run that was interrupted while it wrote texts")
    assert not train_adapter(*options, pause_after=0, report=lines.append)
    assert "paused" in lines[-1]
    texts = (tmp_path / "a.training" / "texts.safetensors").stat().st_mtime_ns
    assert [len(part) for part in asked] == [4, 2, *[4] * 6]
    assert [each for part in asked for each in part] == [
        *((0.7, n) for n in range(6)),
        *((0.0, n) for n in range(24)),
    ], "held out: greedy"
    assert train_adapter(*options, report=lines.append)
    assert (tmp_path / "a.training" / "texts.safetensors").stat().st_mtime_ns == texts, "texts are written once"
    card = json.loads((tmp_path / "a" / "training.json").read_text())
    assert [entry["step"] for entry in card["curve"]] == [0, 10, 20]
    assert card["curve"][-1]["held_out_loss"] < card["curve"][0]["held_out_loss"]
    assert card["curve"][-1]["losses"]["latent"] < 0.9
    assert card["adapter"]["num_masks"] == 2
    assert card["model"] == folder.name, "and no path of the machine"
    assert load_adapter(tmp_path / "a", load_model(folder)).config == SHAPE
