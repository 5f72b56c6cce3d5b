"""Tokens and log-probabilities of a batch's rows, each as its own request asked."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.request import TokenLogprobs
from shared.engine.sampling.sampler import SampledTokens, Sampler, SamplerOutput
from shared.sampling.logprobs import top_logprobs
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow

CPU = torch.device("cpu")


def sample(logits: torch.Tensor, rows: list[SamplingRow]) -> SampledTokens:
    return SamplerOutput([Sampler(CPU, 8).sample(logits, rows, range(len(rows)))]).wait()


@settings(max_examples=60)
@given(
    n=st.integers(1, 4),
    vocabulary=st.integers(1, 30),
    k=st.integers(0, 25),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_top_logprobs_are_the_likeliest_of_the_softmax(n: int, vocabulary: int, k: int, dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(n, vocabulary, generator=generator)).to(dtype)
    before = logits.clone()
    ids = torch.randint(vocabulary, (n,), generator=generator)
    chosen, values, top_ids = top_logprobs(logits, ids, k)
    assert torch.equal(logits, before)
    truth = logits.double().softmax(-1).log()
    torch.testing.assert_close(chosen.double(), truth[torch.arange(n), ids], rtol=1e-5, atol=1e-5)
    assert values.shape == top_ids.shape == (n, min(k, vocabulary))
    torch.testing.assert_close(values.double(), truth.gather(-1, top_ids), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values.double(), truth.sort(-1, descending=True).values[:, :k], rtol=1e-5, atol=1e-5)


def test_each_row_gets_what_it_asked_for() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, 2.0], [0.0, 0.0, 4.0], [1.0, 5.0, 0.0]])
    asked = [None, 2, 0, 20]
    rows = [SamplingRow(SamplingParams(temperature=0.0, logprobs=k), 0, 0, ()) for k in asked]
    drawn = sample(logits, rows)
    assert drawn.token_ids == [1, 0, 2, 1]
    assert drawn.logprobs is not None
    assert drawn.logprobs[0] is None
    assert [len(found.top) for found in drawn.logprobs[1:] if found] == [2, 0, 3]
    second = drawn.logprobs[1]
    assert isinstance(second, TokenLogprobs)
    assert [token_id for token_id, _ in second.top] == [0, 2]
    assert second.logprob == second.top[0][1] == pytest.approx(math.log(1 / (1 + math.exp(-2) + math.exp(-1))))
    assert isinstance(second.top[0][0], int)
    assert sample(logits[:1], rows[:1]).logprobs is None


def test_the_sampled_token_is_reported_also_if_it_is_not_among_the_likeliest() -> None:
    """As one entry more, after the likeliest; none if no alternatives were asked for. No parameter changes a value."""
    logits, counts = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), {0: 0, 1: 2, 3: 4, 4: 4}
    only_last = dict.fromkeys(range(3), -100.0)
    options = {"temperature": 9.0, "top_k": 1, "repetition_penalty": 1.5, "logit_bias": only_last}
    rows = [SamplingRow(SamplingParams(**options, logprobs=k), 0, 0, (0, 3)) for k in counts]
    drawn = sample(logits.repeat(4, 1), rows)
    assert drawn.token_ids == [3] * 4
    assert drawn.logprobs is not None
    for (k, count), found in zip(counts.items(), drawn.logprobs, strict=True):
        assert found is not None
        assert [token_id for token_id, _ in found.top] == [*range(k), 3][:count]
        assert not found.top or found.top[-1] == (3, found.logprob)
        raw = logits[0].log_softmax(-1).tolist()
        assert [logprob for _, logprob in found.top] == pytest.approx([*raw[:k], raw[3]][:count])
        assert found.logprob == pytest.approx(raw[3])


def test_the_parts_of_a_batch_are_one_output_however_often_it_is_waited_for() -> None:
    """After a failure a batch is sampled in parts; each numbers its rows from 0."""
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, 2.0], [0.0, 0.0, 4.0]])
    rows = [SamplingRow(SamplingParams(temperature=0.0, logprobs=k), 0, 0, ()) for k in (None, 1, 2)]
    sampler, error = Sampler(CPU, 8), ValueError("injected")
    whole = SamplerOutput([sampler.sample(logits, rows, range(3))])
    split = [sampler.sample(logits[part], rows[part], [0, 1, 2][part]) for part in (slice(0, 1), slice(1, 3))]
    parts = SamplerOutput(split, {7: error})
    first, again = parts.wait(), parts.wait()
    assert (first.token_ids, first.logprobs) == (again.token_ids, again.logprobs) == ([1, 0, 2], whole.wait().logprobs)
    assert first.logprobs is not None
    assert [len(found.top) if found else None for found in first.logprobs] == [None, 1, 2]
    assert first.errors == {7: error}
    assert list(first) == list(zip([1, 0, 2], first.logprobs, strict=True))


def test_rows_that_decode_on_upload_their_indices_alone_and_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose rows are those of the one before keeps the rest on the device, unless that changes by token."""
    plain, filtered = SamplingParams(temperature=0.9), SamplingParams(temperature=0.7, top_p=0.8, logprobs=2)
    masked = SamplingParams(temperature=0.8, min_tokens=3, logit_bias={0: 30.0})  # a token of those that are masked
    penalised = SamplingParams(temperature=0.8, presence_penalty=1.5)

    def rows(index: int, *options: tuple[SamplingParams, int]) -> list[SamplingRow]:
        return [
            SamplingRow(params, seed, index, (1, 2), (), (0, 7) * (index < params.min_tokens), serial=seed)
            for params, seed in options
        ]

    some = (plain, 1), (filtered, 2), (SamplingParams(temperature=0), 3)
    others = (filtered, 1), (plain, 2)
    calls = [(n, some) for n in range(3)] + [(5, others), (3, some), (6, others), (7, others)]
    calls += [(8, ((filtered, 6), (plain, 7)))]  # the same parameters, other seeds
    calls += [(n, ((masked, 4), *some)) for n in range(6)] + [(0, ((masked, 4), *some))]
    calls += [(9, some)] + [(0, ((plain, 1), (penalised, 5)))] * 3 + [(4, some), (5, some)]
    sampler, sent = Sampler(CPU, 8), []
    send = sampler.staging.send
    monkeypatch.setattr(sampler.staging, "send", lambda arrays: [sent.append(set(arrays)), send(arrays)][1])
    for number, (index, options) in enumerate(calls):
        logits = torch.randn(len(options), 40, generator=torch.Generator().manual_seed(number))
        step = rows(index, *options)
        ours = SamplerOutput([sampler.sample(logits, step, range(len(step)))]).wait()
        fresh = sample(logits, step)
        assert (ours.token_ids, ours.logprobs) == (fresh.token_ids, fresh.logprobs), f"call {number}"

    def interrupted(arrays: dict[str, Any]) -> None:
        send(arrays)
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(sampler.staging, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sampler.sample(logits, rows(0, *others, (plain, 9)), range(3))
    again = SamplerOutput([sampler.sample(logits, step, range(3))]).wait()
    assert again.token_ids == fresh.token_ids, "what was overwritten is sent again"
    alone = [number for number, names in enumerate(sent) if names == {"indices"}]
    assert alone == [1, 2, 6, *range(9, 15), 17, 18, 20]
