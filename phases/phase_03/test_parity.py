"""Phase 3 generates the same tokens as phase 2 and transformers, however the prompt is divided into chunks."""

from pathlib import Path

import pytest
import torch
from filelock import FileLock

from phases.phase_02.engine import Engine as Uncached
from phases.phase_03.engine import Engine
from shared.cache.view.contiguous import ContiguousCache, ContiguousView, kv_bytes
from shared.cache.view.uncached import UncachedView
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.errors import CapacityError, ConfigError, RequestError
from shared.loading.loader import load_model
from shared.models.causal_lm import CausalLM
from shared.models.tokens import Tokens
from shared.sampling.params import SamplingParams
from tests.as_transformers import ASKED_OF_DEMO, assert_generated
from tests.comparison import assert_close, assert_equal
from tests.mixed_requests import SENTENCE
from tests.reference_tokens import ReferenceTokens

PROMPTS = ["The capital of France is", "x", SENTENCE]


def ids(engine: Engine | Uncached, prompt: str | list[int], num_tokens: int, **params: object) -> list[int]:
    settings: dict = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": num_tokens} | params
    return [output.token_id for output in engine.generate(prompt, SamplingParams(**settings))]


def sequence(length: int, vocab_size: int) -> torch.Tensor:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="session")
def cached_folder(model_folder: Path, session_folder: Path) -> Path:
    """Like ``model_folder``, but no generated model has a single KV head: a slice of such a cache is contiguous even
    when it is transposed, so an accidental copy would go unnoticed."""
    if model_folder.name != "tiny-qwen3":
        return model_folder
    folder = session_folder / "checkpoints" / "tiny-qwen3-ranks"
    with FileLock(f"{folder}.lock"):
        return make_checkpoint(folder.name, folder, seed=1)


@pytest.fixture(scope="module")
def cached_model(cached_folder: Path) -> CausalLM:
    """Loaded once; no test changes it."""
    return load_model(cached_folder)


@pytest.fixture(scope="module")
def whole(cached_model: CausalLM) -> torch.Tensor:
    """Its logits of 24 tokens, which are more than Gemma's window of 16, without a cache."""
    tokens = sequence(24, cached_model.config.vocab_size)
    with torch.inference_mode():
        return cached_model.logits(cached_model(Tokens(tokens, torch.arange(24)), UncachedView([24], "naive")))


def cache_for(model: CausalLM, capacity: int) -> ContiguousCache:
    """A cache whose unwritten contents are the same in every run."""
    cache = ContiguousCache(model.config, capacity, torch.float32)
    for memory in (cache.keys, cache.values):
        memory.copy_(torch.randn(memory.shape, generator=torch.Generator().manual_seed(capacity)))
    return cache


@torch.inference_mode()
def run_in_pieces(model: CausalLM, cache: ContiguousCache, backend: str, tokens: torch.Tensor, sizes: list[int]):
    """Append tokens to the cache in chunks of the given sizes; returns all logits, concatenated."""
    view = ContiguousView(cache, backend)
    logits = []
    for piece in tokens.split(sizes):
        size = len(piece)
        cache.reserve("a", size)
        view.prepare(size)
        positions = torch.arange(cache.length, cache.length + size)
        logits.append(model.logits(model(Tokens(piece, positions), view)))
        cache.advance(size)
    return torch.cat(logits)


@pytest.mark.from_empty("llama")
def test_greedy_tokens_equal_those_of_transformers(model_folder: Path, reference_tokens: ReferenceTokens) -> None:
    engine = Engine(EngineConfig(model=str(model_folder)))
    assert_generated(engine, reference_tokens, model_folder, [(PROMPTS[0], 60), (PROMPTS[1], 20), (PROMPTS[2], 20)])


@pytest.mark.demo
def test_greedy_tokens_of_the_demo_model_equal_those_of_transformers(
    demo_folder: Path, reference_tokens: ReferenceTokens
) -> None:
    engine = Engine(EngineConfig(model=str(demo_folder), max_seq_len=256))
    assert_generated(engine, reference_tokens, demo_folder, ASKED_OF_DEMO)


def test_sampled_tokens_equal_those_of_phase_2(model_folder: Path) -> None:
    config = EngineConfig(model=str(model_folder))
    params = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "seed": 11}
    assert ids(Engine(config), PROMPTS[0], 40, **params) == ids(Uncached(config), PROMPTS[0], 40, **params)


@pytest.mark.parametrize("backend", ["naive", "sdpa"])
@pytest.mark.parametrize(
    "sizes", [[24], [1] * 24, [5, 1, 12, 2, 4], [23, 1]], ids=["whole", "one by one", "chunks", "last"]
)
def test_logits_do_not_depend_on_how_the_prompt_is_cut(
    cached_model: CausalLM, whole: torch.Tensor, backend: str, sizes: list[int]
) -> None:
    tokens = sequence(24, cached_model.config.vocab_size)
    cut = run_in_pieces(cached_model, cache_for(cached_model, 24), backend, tokens, sizes)
    assert_close(cut, whole, "logits", ("token", "vocabulary"), rtol=0, atol=2e-5 * whole.abs().max().item())


def test_a_cap_on_scores_is_the_same_over_the_cache(folder: Path) -> None:
    model = load_model(folder)
    tokens = sequence(12, model.config.vocab_size)
    with torch.inference_mode():
        uncapped = model.logits(model(Tokens(tokens, torch.arange(12)), UncachedView([12])))
        for block in model.blocks:
            block.attention.softcap = 0.01  # so small that nearly all scores become equal
        whole = model.logits(model(Tokens(tokens, torch.arange(12)), UncachedView([12])))
    cut = run_in_pieces(model, cache_for(model, 12), "sdpa", tokens, [7, 1, 4])
    tolerance = 2e-5 * whole.abs().max().item()
    assert_close(cut, whole, "logits with a cap on scores", ("token", "vocabulary"), rtol=0, atol=tolerance)
    assert (whole - uncapped).abs().max() > 10 * tolerance, "the cap changes nothing, so this test would prove nothing"


def test_the_cache_holds_what_a_recomputed_forward_computes(cached_model: CausalLM) -> None:
    """Keys and values of every layer equal those of a forward without a cache."""
    tokens = sequence(40, cached_model.config.vocab_size)
    cache = ContiguousCache(cached_model.config, 64, torch.float32)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    run_in_pieces(cached_model, cache, "sdpa", tokens, [7, 1, 30, 1, 1])

    class Recorder(UncachedView):
        def __init__(self) -> None:
            super().__init__([40])
            self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def write(self, layer, q, k, v, positions, qk):  # type: ignore[no-untyped-def]
            q = super().write(layer, q, k, v, positions, qk)
            self.kept[layer] = (self.k, self.v)  # [Hkv, T, D]
            return q

    recorder = Recorder()
    with torch.inference_mode():
        cached_model(Tokens(tokens, torch.arange(40)), recorder)
    assert_equal(len(recorder.kept), cached_model.config.num_layers, "layers that wrote")
    for layer, computed in recorder.kept.items():
        for name, cached, wanted in zip(("keys", "values"), (cache.keys, cache.values), computed, strict=True):
            what, axes = f"cached {name} of layer {layer}", ("head", "token", "dim")
            assert_close(cached[layer, :, :40], wanted, what, axes, rtol=1e-4, atol=1e-5)
    assert cache.keys[:, :, 40:].isnan().all(), "slots after the sequence were written"
    assert_equal(cache.length, 40, "length of the cache")


def test_positions_turn_and_the_order_in_the_cache_decides(cached_model: CausalLM) -> None:
    """Logical positions with a gap, physical slots without one: equal to the same positions run at once."""
    tokens = sequence(12, cached_model.config.vocab_size)
    positions = torch.tensor([0, 1, 2, 3, 200, 201, 202, 203, 7, 7, 8, 9])
    with torch.inference_mode():
        whole = cached_model.logits(cached_model(Tokens(tokens, positions), UncachedView([12], "naive")))
        cache = cache_for(cached_model, 12)
        view = ContiguousView(cache)
        pieces = []
        for piece in (slice(0, 6), slice(6, 7), slice(7, 12)):
            view.prepare(len(tokens[piece]))
            pieces.append(cached_model.logits(cached_model(Tokens(tokens[piece], positions[piece]), view)))
            cache.advance(len(tokens[piece]))
    assert_close(
        torch.cat(pieces), whole, "logits", ("token", "vocabulary"), rtol=0, atol=2e-5 * whole.abs().max().item()
    )


@pytest.mark.parametrize("backend", ["naive", "sdpa"])
def test_windowed_layers_read_only_their_window(tiny_checkpoints: dict[str, Path], backend: str) -> None:
    """Keys before every layer's window may have any value if all layers have a sliding window.

    With as many cached tokens as the window has, the first key is before the new token's window.
    """
    model = load_model(tiny_checkpoints["gemma3_text"])
    window = model.config.windows[0]
    assert window is not None, "all layers of this model should have a window"
    tokens = sequence(60, model.config.vocab_size)
    for block in model.blocks:
        block.attention.window = window
    for num_past in (59, window):
        cache = cache_for(model, 64)
        run_in_pieces(model, cache, backend, tokens[:num_past], [num_past])
        new = tokens[num_past : num_past + 1]
        last = run_in_pieces(model, cache, backend, new, [1])
        first = num_past + 1 - window
        for end, where in ((first - 1, "before the last key in front of its window"), (first, "before its window")):
            cache.truncate(num_past)
            cache.keys[:, :, :end] = float("nan")
            cache.values[:, :, :end] = float("nan")
            again = run_in_pieces(model, cache, backend, new, [1])
            compared = f"logits after {num_past} cached tokens, window {window}, with NaN {where}"
            assert_equal(again, last, compared, ("token", "vocabulary"))
        cache.truncate(num_past)
        cache.keys[:, :, first] = float("nan")
        assert run_in_pieces(model, cache, backend, new, [1]).isnan().all(), (
            f"logits after {num_past} cached tokens are numbers although the first key of the window of {window} is "
            "NaN: the window begins too late"
        )


def test_a_truncated_cache_continues_as_if_the_rest_had_never_been(model_folder: Path) -> None:
    model = load_model(model_folder)
    tokens = sequence(30, model.config.vocab_size)
    straight = run_in_pieces(model, cache_for(model, 30), "sdpa", tokens, [20, 10])[20:]
    cache = cache_for(model, 30)
    run_in_pieces(model, cache, "sdpa", tokens.flip(0)[:20], [20])
    cache.truncate(0)
    run_in_pieces(model, cache, "sdpa", tokens[:20], [20])
    run_in_pieces(model, cache, "sdpa", sequence(7, model.config.vocab_size), [7])
    cache.truncate(20)
    assert torch.equal(run_in_pieces(model, cache, "sdpa", tokens[20:], [10]), straight)


@pytest.mark.from_empty
def test_every_token_is_computed_once(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder)))
    num_expected = 0
    for prompt in PROMPTS:
        ids(engine, prompt, 4)
        num_expected += len(engine.tokenizer.encode(prompt)) + 3  # the last token of an answer is never run
        num_computed = engine.num_tokens_computed
        assert num_computed == num_expected, f"{num_computed} tokens were computed; each once would be {num_expected}"


@pytest.mark.from_empty
def test_an_answer_does_not_depend_on_how_long_it_may_get(folder: Path) -> None:
    """A cache that is made for one answer has a slot for each token that is run."""
    engine = Engine(EngineConfig(model=str(folder)))
    whole = ids(engine, PROMPTS[0], 8)
    for num_tokens in range(2, 8):
        found = ids(engine, PROMPTS[0], num_tokens)
        assert_equal(found, whole[:num_tokens], f"{num_tokens} tokens of an answer of 8", ("token",))


def test_an_answer_left_in_the_middle_leaves_nothing_behind(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder)))
    expected = ids(engine, PROMPTS[0], 10)
    params = SamplingParams(temperature=0, max_new_tokens=50, ignore_eos=True)
    left = engine.generate("another prompt, left after two tokens", params)
    next(left)
    next(left)
    assert ids(engine, PROMPTS[0], 10) == expected
    with pytest.raises(CapacityError, match="can hold only one sequence"):
        list(left)


def test_an_answer_fills_the_cache_to_its_last_place(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder), max_seq_len=16))
    assert len(ids(engine, [5] * 10, 100)) == 6
    assert engine.cache.length == 15  # the last token of an answer is never run
    assert len(ids(engine, [5] * 15, 100)) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_bytes_equal_the_formula(model_folder: Path, dtype: str) -> None:
    engine = Engine(EngineConfig(model=str(model_folder), max_seq_len=100, dtype=dtype))
    config = engine.model.config
    size = {"float32": 4, "bfloat16": 2}[dtype]
    expected = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 100 * size
    assert_equal(engine.cache.num_bytes, expected, "bytes of the cache")
    found = kv_bytes(config, 100, engine.model.dtype)
    assert_equal(found, expected, "kv_bytes of 100 tokens")
    assert_equal(type(found).__name__, "int", "the type of kv_bytes")
    assert_equal(engine.stats()["cache bytes"], expected, "cache bytes in the statistics")


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_cache_without_room_is_refused(folder: Path, capacity: int) -> None:
    config = load_model(folder).config
    with pytest.raises(ConfigError, match=f"capacity is {capacity} tokens"):
        ContiguousCache(config, capacity, torch.float32)


def test_a_prompt_as_long_as_the_capacity_is_refused_before_any_work(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder), max_seq_len=16))
    with pytest.raises(RequestError, match=r"length is 16 tokens. However, you requested 16 tokens"):
        ids(engine, [5] * 16, 1)
    assert engine.num_tokens_computed == 0


def test_the_cache_refuses_what_does_not_fit_and_stays_as_it_was(folder: Path) -> None:
    cache = ContiguousCache(load_model(folder).config, 8, torch.float32)
    cache.reserve("a", 8)
    cache.advance(5)
    with pytest.raises(CapacityError, match="holds 5 tokens of at most 8 and cannot take 4 more"):
        cache.reserve("a", 4)
    with pytest.raises(CapacityError, match="-1 slots were requested"):
        cache.reserve("a", -1)
    with pytest.raises(CapacityError, match="holds request a"):
        cache.reserve("b", 1)
    for length in (-1, 6):
        with pytest.raises(CapacityError, match=f"cannot be truncated to {length}"):
            cache.truncate(length)
    assert (cache.length, cache.owner) == (5, "a")
