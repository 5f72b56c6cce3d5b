"""A draft model: the tokens are those without it, and its own KV cache follows the requests."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from phases.phase_10.engine import Engine as Plain
from phases.phase_11.engine import Engine
from shared.engine.config import EngineConfig
from shared.engine.request import Request, RequestStatus
from shared.errors import ConfigError
from shared.models.fused import FusedProjection
from shared.models.tokens import Tokens
from shared.sampling.noise import Stream, gumbel, seed_pattern
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow
from shared.scheduling.chunks import chunk_size
from shared.scheduling.drafts import num_equal
from shared.scheduling.schedule import Schedule
from shared.speculation.adaptive import a_tenth
from shared.speculation.draft_memory import memory_settings
from shared.speculation.draft_model import DraftMasks
from shared.speculation.vocabulary import check_vocabulary
from shared.text.tokenizer import Tokenizer
from tests.mixed_requests import ALIKE, ARRIVALS, ARRIVE, GREEDY, MIXED, SMALL, Requests, seen, serve
from tests.mixed_requests import tokens as tokens_of
from tests.random_loads import Load, answers_alone, assert_as_alone, interrupt, loads, sizes


@pytest.fixture(scope="session")
def drafts(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each family its tiny model, with noise on the weights: right in some of its guesses."""
    folders = {}
    for family, folder in tiny_checkpoints.items():
        folders[family] = tmp_path_factory.mktemp("drafts") / family
        shutil.copytree(folder, folders[family])
        generator = torch.Generator().manual_seed(0)
        for path in folders[family].glob("*.safetensors"):
            weights = load_file(path)
            for name, weight in weights.items():
                weights[name] = weight + 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
            save_file(weights, path, metadata={"format": "pt"})
    return folders


class Fresh(DraftMasks):
    """The masks of a step's first drafts follow no rejected draft."""

    is_fresh = False

    def forget(self) -> None:
        self.is_fresh = True

    def rows(self, rows: list[SamplingRow], asking: Any, proposed: Sequence[Any]) -> list[SamplingRow]:
        assert self.is_fresh or proposed
        self.is_fresh = False
        return rows


class Checked(Engine):
    """After each step a draft request has the tokens of its request, and the pools hold what it says; the
    draft model computes no more tokens than its memory was made for, and in chunks as the model does."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        commit, drafter = self.scheduler.commit, self.drafter
        missing, drafter.masks = drafter._missing, Fresh()

        def within(schedule: Schedule) -> Any:
            entries, asking = missing(schedule)
            sizes = [entry.num_tokens for entry in entries]
            assert sum(sizes) <= drafter.room
            if config.is_on("use_chunked_prefill"):
                assert all(size <= chunk_size(config, size, schedule.num_decoding) for size in sizes)
            return entries, asking

        drafter._missing = within

        def checking(schedule: Schedule, sampled: Any) -> None:
            commit(schedule, sampled)
            pool: Any = self.pool
            assert pool.draft_requests.keys() == set(self.scheduler.running.values()) | self.scheduler.ending.keys()
            for request, draft_request in pool.draft_requests.items():
                assert request.token_ids[: draft_request.num_tokens] == draft_request.token_ids
                assert pool.draft.length(draft_request) <= request.num_tokens
                if request.status is RequestStatus.RUNNING:
                    assert pool.length(request) == request.num_computed_tokens
            for side, held in ((pool.target, pool.draft_requests), (pool.draft, pool.draft_requests.values())):
                assert len(side.audit()) == len(side.holdings()[1]) <= len(held)

        self.scheduler.commit = checking  # type: ignore[method-assign]


def make(folder: Path, draft: Path, **config: Any) -> Any:
    arguments = {"use_speculative_decoding": True, "adapt_spec_length": False, "max_seq_len": 128}
    return Checked(EngineConfig(model=str(folder), draft_model=str(draft), **arguments | config))


def has_guessed(engine: Any) -> bool:
    stats = engine.stats()
    return stats["drafts accepted (tokens)"] > 0 and stats["drafts rejected (tokens)"] > 0


@pytest.mark.parametrize(("family", "overlaps"), [("llama", True), ("qwen3", False), ("gemma3_text", True)])
def test_outputs_are_those_without_drafts(
    tiny_checkpoints: dict[str, Path], drafts: dict[str, Path], family: str, overlaps: bool
) -> None:
    """Greedy and sampled, with penalties, chunks, shared prefixes and preemptions."""
    arguments = SMALL | ({"chunk_beside_decoding": 12} if family == "llama" else {"prefill_chunk_size": 30})
    requests, arrivals = [*ALIKE, *MIXED], [*ARRIVE, *ARRIVALS]
    plain = Plain(EngineConfig(model=str(tiny_checkpoints[family]), **arguments))
    answers = serve(plain, requests, arrivals)[0]
    engine = make(tiny_checkpoints[family], drafts[family], overlap_scheduling=overlaps, **arguments)
    engine.drafter.room = 32  # of a smaller memory
    assert isinstance(engine.drafter.model.head, FusedProjection), "packed only if the model is"
    assert seen(serve(engine, requests, arrivals)[0]) == seen(answers)
    assert has_guessed(engine)
    assert engine.pool.draft.free_tokens == engine.pool.draft.capacity_tokens
    assert engine.load().num_preemptions > 0
    assert engine.runner.num_forwards < plain.runner.num_forwards


@pytest.mark.parametrize(
    "config",
    [
        {"use_chunked_prefill": False, "max_batch_size": 5},
        {"kv_cache_backend": "contiguous", "max_batch_size": 5},
        {"max_num_batched_tokens": 7, "max_batch_size": 4},
    ],
    ids=lambda config: next(iter(config)),
)
def test_every_memory_gives_the_same_outputs(
    tiny_checkpoints: dict[str, Path], drafts: dict[str, Path], config: dict[str, Any]
) -> None:
    requests: Requests = [*ALIKE, *MIXED]
    plain = EngineConfig(model=str(tiny_checkpoints["qwen3"]), max_seq_len=128)
    engine = make(tiny_checkpoints["qwen3"], drafts["qwen3"], **config)
    for mine, theirs in zip(serve(engine, requests)[0], serve(Plain(plain), requests)[0], strict=True):
        assert tokens_of(mine) == tokens_of(theirs)
    assert has_guessed(engine)


@settings(max_examples=6)
@given(arguments=sizes(spec_length=st.integers(1, 8), overlap_scheduling=st.booleans()), load=loads())
def test_whatever_the_sizes_arrivals_and_aborts(
    tiny_checkpoints: dict[str, Path], drafts: dict[str, Path], arguments: dict[str, Any], load: Load
) -> None:
    folder = tiny_checkpoints["gemma3_text"]
    assert_as_alone(make(folder, drafts["gemma3_text"], **arguments), load, answers_alone(Plain, folder))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_draft_models_cache_holds_the_text(
    tiny_checkpoints: dict[str, Path], drafts: dict[str, Path], family: str
) -> None:
    """After rejected drafts too: a draft request's keys and values are those of its text."""
    engine = make(tiny_checkpoints[family], drafts[family], block_size=3)
    plain = Plain(EngineConfig(model=str(drafts[family]), max_seq_len=128, block_size=3))
    engine.add_request(list(range(30)), SamplingParams(**GREEDY, max_new_tokens=60))
    while engine.has_work():
        engine.step()
        if not engine.scheduler.running or engine.stats()["tokens computed"] % 4:
            continue
        ((request, draft_request),) = engine.pool.draft_requests.items()
        text = request.token_ids[: engine.pool.draft.length(draft_request)]
        found = kept(engine.pool.draft, engine.drafter.runner.view, draft_request)
        name = plain.add_request([*text, 0], SamplingParams(max_new_tokens=2, ignore_eos=True))
        plain.step()
        torch.testing.assert_close(found, kept(plain.pool, plain.view, plain.scheduler.running[name])[:, : len(text)])
        plain.abort(name)
    assert has_guessed(engine)


def kept(pool: Any, view: Any, request: Any) -> torch.Tensor:
    """Keys and values of the last layer, ``[2, tokens, heads, dimensions]``."""
    table = pool.table(request)
    rows = [part[-1][table].flatten(0, 1)[: pool.length(request)] for part in (view.keys, view.values)]
    return torch.stack(rows)


def test_a_model_that_drafts_for_itself_is_always_right(tiny_checkpoints: dict[str, Path]) -> None:
    """So its forwards are few: a prompt, and for each six tokens K = 5 small ones and one of six rows.

    Of a request that wants no drafts, it computes nothing.
    """
    request: Requests = [(list(range(20)), {"seed": 1, "max_new_tokens": 61, "ignore_eos": True})]
    request += [([7, 8, 9], {"use_speculative_decoding": False, "max_new_tokens": 9, "ignore_eos": True})]
    engine = make(tiny_checkpoints["llama"], tiny_checkpoints["llama"])
    serve(engine, request)
    assert engine.stats()["drafts rejected (tokens)"] == 0
    assert engine.runner.num_forwards == 1 + 10
    assert engine.drafter.runner.num_forwards == 1 + 10 * 5
    assert engine.drafter.runner.num_tokens_computed == 20 + 60 - 1, "each token once, and the last draft never"


@pytest.mark.failing_forwards
def test_a_draft_model_that_fails_costs_drafts_alone(
    tiny_checkpoints: dict[str, Path], drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoints["llama"]
    expected = serve(Plain(EngineConfig(model=str(folder), max_seq_len=128)), MIXED)[0]
    engine = make(folder, drafts["llama"])
    forward, calls = engine.drafter.model.forward, []

    def failing(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) % 5 == 3:
            raise RuntimeError("no memory")
        return forward(*args)

    monkeypatch.setattr(engine.drafter.model, "forward", failing)
    assert seen(serve(engine, MIXED)[0]) == seen(expected)
    assert has_guessed(engine)


@pytest.mark.failing_forwards
def test_a_request_that_the_draft_model_cannot_read_costs_others_no_token(
    tiny_checkpoints: dict[str, Path], drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for others in ([], [([250, 251], GREEDY)]):
        engine = make(tiny_checkpoints["llama"], drafts["llama"], adapt_spec_length=False)
        forward = engine.drafter.model.forward

        def failing(tokens: Tokens, *rest: Any, forward: Any = forward) -> torch.Tensor:
            if 250 in tokens.ids.tolist():
                raise RuntimeError("injected")
            return forward(tokens, *rest)

        monkeypatch.setattr(engine.drafter.model, "forward", failing)
        serve(engine, [([5, 6, 7], GREEDY), *others])
        counts.append(engine.drafter.runner.num_tokens_computed)
    assert counts[1] == counts[0] > 0


def test_a_draft_model_of_another_vocabulary_is_refused(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_checkpoints["llama"], other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    token = next(token for token, number in vocabulary.items() if number == 77)
    vocabulary["another"] = vocabulary.pop(token)
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"token 77 is 'another' there and"):
        make(tiny_checkpoints["llama"], other)
    tokenizer = Tokenizer.load(tiny_checkpoints["llama"])
    padded, plain = (SimpleNamespace(config=SimpleNamespace(vocab_size=size)) for size in (513, 512))
    check_vocabulary("x", (plain, tokenizer), (padded, tokenizer))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="logits for 513 tokens and the model for 512"):
        check_vocabulary("x", (padded, tokenizer), (plain, tokenizer))  # type: ignore[arg-type]


def test_requests_longer_than_the_draft_model_can_read_go_on_without(
    tiny_checkpoints: dict[str, Path], drafts: dict[str, Path], tmp_path: Path
) -> None:
    short = tmp_path / "short"
    shutil.copytree(drafts["llama"], short)
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 40}
    (short / "config.json").write_text(json.dumps(config))
    requests: Requests = [([5, 6, 7], GREEDY | {"max_new_tokens": 80})]
    engine = make(tiny_checkpoints["llama"], short)
    expected = serve(Plain(EngineConfig(model=str(tiny_checkpoints["llama"]), max_seq_len=128)), requests)[0]
    assert seen(serve(engine, requests)[0]) == seen(expected)
    assert has_guessed(engine)
    assert engine.runner.num_forwards > 40


def test_with_rejection_a_model_that_drafts_for_itself_is_always_right(tiny_checkpoints: dict[str, Path]) -> None:
    """p equals q, so each draft is accepted: the distributions arrive at the right rows."""
    requests: Requests = [
        (list(range(20)), {"seed": n, "max_new_tokens": 31, "ignore_eos": True, "top_k": 40 + n}) for n in range(3)
    ]
    engine = make(tiny_checkpoints["qwen3"], tiny_checkpoints["qwen3"], acceptance_method="rejection")
    serve(engine, requests)
    stats = engine.stats()
    assert stats["drafts accepted (tokens)"] > 60
    assert stats["drafts rejected (tokens)"] <= 3, "p and q differ by rounding"


def test_both_caches_are_counted_in_the_memory(tiny_checkpoints: dict[str, Path]) -> None:
    folder = tiny_checkpoints["llama"]
    alone = Engine(EngineConfig(model=str(folder), max_seq_len=128, max_batch_size=2))
    both = make(folder, folder, max_batch_size=2)
    assert both.pool.draft.capacity_tokens == both.pool.target.capacity_tokens <= alone.pool.capacity_tokens
    own = memory_settings(both.config, both.pool.target)
    assert own.num_gpu_blocks * own.block_size == both.pool.target.capacity_tokens, "as many, if its keys are smaller"
    params = SamplingParams(max_new_tokens=4)
    assert both.add_request([1, 2, 3], params)


GPU = pytest.mark.gpu
ON = [("cpu", None), pytest.param("cuda", None, marks=GPU), pytest.param("cuda", False, marks=GPU)]
"""Devices, and whether steps are captured there."""
LONG_ANSWERS: Requests = [
    ([*range(7 * n, 7 * n + 12)], {"seed": n, "temperature": n % 2 * 0.9, "max_new_tokens": 60, "ignore_eos": True})
    for n in range(8)
]


class Verified(NamedTuple):
    """The drafts of a request in a step; the first of them has this index in the request's text."""

    request: Request
    first: int
    num_drafts: int
    num_accepted: int


def serve_noting(engine: Any, requests: Requests) -> list[Verified]:
    """Serve the requests, and return what was verified of them."""
    noted, count = list[Verified](), engine.scheduler.lengths.count

    def counting(request: Request, num_drafts: int, num_accepted: int) -> None:
        noted.append(Verified(request, request.num_tokens, num_drafts, num_accepted))
        count(request, num_drafts, num_accepted)

    engine.scheduler.lengths.count = counting
    serve(engine, requests)
    return noted


def scores(folder: Path, request: Request) -> torch.Tensor:
    """By index of the text, the score ``[V]`` of each token that may follow: the largest is sampled."""
    ids = torch.tensor([request.token_ids])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[0].roll(1, 0)
    temperature, first = request.params.temperature, request.num_prompt_tokens
    if temperature:
        indices = torch.arange(len(logits)) - first
        seeds = torch.full_like(indices, seed_pattern(request.seed))
        logits = logits / temperature + gumbel(seeds, indices, Stream.DRAW, logits.shape[1])
    return logits


@pytest.mark.parametrize(("device", "is_captured"), ON)
def test_a_draft_is_accepted_exactly_where_both_models_agree(
    tiny_checkpoints: dict[str, Path], drafts: dict[str, Path], device: str, is_captured: bool | None
) -> None:
    """Which is at about half of the tokens."""
    options = {"device": device, "dtype": "float32", "use_cuda_graphs": is_captured}
    engine = make(tiny_checkpoints["llama"], drafts["llama"], max_batch_size=8, **options)
    noted = serve_noting(engine, LONG_ANSWERS)
    likeliest = {
        request: scores(drafts["llama"], request).argmax(-1).tolist()
        for request in dict.fromkeys(each.request for each in noted)
    }
    assert any(token_id in request.end_ids for request in likeliest for token_id in request.output_ids), "ignored ends"
    assert [each.num_accepted for each in noted] == [
        num_equal(likeliest[request][first:], request.token_ids[first : first + num_drafts])
        for request, first, num_drafts, _ in noted
    ]
    share = sum(each.num_accepted > 0 for each in noted) / len(noted)
    assert 0.3 < share < 0.7, share


def test_penalties_of_drafts_count_the_text_and_no_rejected_draft(
    tiny_checkpoints: dict[str, Path], drafts: dict[str, Path]
) -> None:
    engine = make(tiny_checkpoints["llama"], drafts["llama"], max_batch_size=8, spec_length=1)
    requests: Requests = [(prompt, params | {"presence_penalty": 2.0}) for prompt, params in LONG_ANSWERS[::2]]
    found = {}
    for request, first, _, num_accepted in serve_noting(engine, requests):
        if request not in found:
            found[request] = scores(drafts["llama"], request)
        penalised = found[request][first].clone()
        penalised[list({*request.token_ids[request.num_prompt_tokens : first]})] -= 2.0
        assert num_accepted == (int(penalised.argmax()) == request.token_ids[first])


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_tokens_on_the_gpu_equal_those_of_the_cpu(
    tiny_checkpoints: dict[str, Path], drafts: dict[str, Path], family: str, drafter: str
) -> None:
    """Captured, overlapped, and with lengths that adapt."""
    folder, requests, arrivals = tiny_checkpoints[family], [*ALIKE, *MIXED], [*ARRIVE, *ARRIVALS]
    arguments: dict[str, Any] = {"max_seq_len": 128, "max_batch_size": 8, "prefill_chunk_size": 30, "dtype": "float32"}
    expected = serve(Plain(EngineConfig(model=str(folder), **arguments)), requests, arrivals)[0]
    guesses = {"drafter": "ngram"} if drafter == "ngram" else {"draft_model": str(drafts[family])}
    for adapts in (False, None):
        settings = {"use_speculative_decoding": True, "adapt_spec_length": adapts, **guesses, **arguments}
        engine = Engine(EngineConfig(model=str(folder), device="cuda", **settings))
        engine.scheduler.lengths.costs_of = a_tenth  # by the table no draft pays for so small a model
        for _ in range(2):
            answers = serve(engine, requests, arrivals)[0]
            assert [tokens_of(answer) for answer in answers] == [tokens_of(answer) for answer in expected]
        assert has_guessed(engine)
        assert engine.runner.num_replays > 20


def test_a_step_that_is_interrupted_behind_its_drafts_can_be_made_again(
    tiny_checkpoints: dict[str, Path], drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: Requests = [([5, 6, 7], GREEDY | {"max_new_tokens": 24})]
    expected = serve(Plain(EngineConfig(model=str(tiny_checkpoints["llama"]), max_seq_len=128)), requests)[0]
    engine = make(tiny_checkpoints["llama"], drafts["llama"])
    interrupts = interrupt(engine, "runner.forward", monkeypatch)
    assert seen(serve(engine, requests)[0]) == seen(expected)
    assert len(interrupts) > 2
    assert has_guessed(engine)
