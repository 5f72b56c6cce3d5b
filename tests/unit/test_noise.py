"""Philox agrees with Random123's known answers and an independent scalar version; noise has the promised layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shared.sampling.noise import Stream, gumbel, philox, seed_pattern, uniform

WORD = st.integers(0, 2**32 - 1)

KNOWN_ANSWERS = [  # counter, key, output: the kat_vectors file of Random123, philox4x32 with 10 rounds
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


def run_philox(counter, key):
    out = philox(tuple(torch.tensor([w]) for w in counter), tuple(torch.tensor([w]) for w in key))
    return [int(word) for word in out]


def scalar_philox(counter, key):
    """The definition in unbounded Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def scalar_uniform(seed, index, stream, position):
    word = scalar_philox((position // 4, index, int(stream), 0), (seed % 2**32, seed >> 32))[position % 4]
    return ((word >> 9) + 0.5) / 2**23


def draws(seed, index, stream, size):
    return uniform(torch.tensor([seed_pattern(seed)]), torch.tensor([index]), stream, size)[0]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    assert run_philox(words(counter), words(key)) == words(answer)


@settings(max_examples=50, deadline=None)
@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_philox_equals_the_scalar_definition(counter, key):
    assert run_philox(counter, key) == scalar_philox(counter, key)


def test_philox_leaves_its_arguments_alone_and_broadcasts():
    counter = (torch.arange(5)[None], torch.tensor([[1], [2]]), torch.tensor([[3], [4]]), torch.tensor(9))
    key = (torch.tensor([[7], [8]]), torch.tensor([[5], [6]]))
    before = [t.clone() for t in (*counter, *key)]
    out = philox(counter, key)
    assert all(torch.equal(a, b) for a, b in zip(before, (*counter, *key), strict=True))
    for row in range(2):
        for n in range(5):
            expected = scalar_philox((n, row + 1, row + 3, 9), (row + 7, row + 5))
            assert [int(word[row, n]) for word in out] == expected


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**64 - 1), WORD, st.sampled_from(Stream), st.integers(1, 11))
def test_layout(seed, index, stream, size):
    assert draws(seed, index, stream, size).tolist() == [scalar_uniform(seed, index, stream, v) for v in range(size)]


def test_ends_of_the_interval_are_never_reached():
    steps = torch.tensor([0, 2**23 - 1]).to(torch.float32).add_(0.5).mul_(2**-23)  # smallest and largest word
    assert steps[0] > 0
    assert steps[1] < 1
    values = draws(1, 2, Stream.DRAW, 300_000)
    assert values.dtype == torch.float32
    assert 0 < values.min() < 2e-5
    assert 1 - 2e-5 < values.max() < 1
    noise = gumbel(torch.tensor([1]), torch.tensor([2]), Stream.DRAW, 300_000)
    assert noise.isfinite().all()


@pytest.mark.parametrize("size", [1, 3, 49, 1001, 49155])
def test_rows_do_not_know_their_batch(size):
    seeds = torch.tensor([seed_pattern(s) for s in (0, 1, 2**63 + 5, 2**64 - 1, 1)])
    indices = torch.tensor([0, 7, 7, 2**32 - 1, 8])
    together = gumbel(seeds, indices, Stream.DRAFT, size)
    assert together.shape == (5, size)
    for b in range(5):
        alone = gumbel(seeds[b : b + 1], indices[b : b + 1], Stream.DRAFT, size)
        assert torch.equal(alone[0], together[b])


def test_vocabulary_size_does_not_change_the_noise():
    assert torch.equal(draws(3, 4, Stream.DRAW, 1003)[:50], draws(3, 4, Stream.DRAW, 50))


def test_an_empty_batch_has_no_noise():
    none = torch.empty(0, dtype=torch.int64)
    assert gumbel(none, none, Stream.DRAW, 10).shape == (0, 10)


def test_uniform_and_gumbel_follow_their_distributions():
    assert stats.kstest(draws(11, 0, Stream.DRAW, 100_000).numpy(), "uniform").pvalue > 0.01, (
        "the uniform numbers are not uniform (Kolmogorov-Smirnov)"
    )
    noise = gumbel(torch.tensor([12]), torch.tensor([0]), Stream.DRAW, 100_000)[0]
    distance = stats.kstest(noise.numpy(), "gumbel_r")
    assert distance.pvalue > 0.01, (
        f"the noise is not Gumbel's: at {distance.statistic_location:.3g} its distribution function is off by "
        f"{distance.statistic:.3f} (Kolmogorov-Smirnov); mean {noise.mean():.3f} where 0.577 is right"
    )


@pytest.mark.parametrize("axis", ["seed", "index"])
def test_one_position_is_uniform_over_seeds_and_over_indices(axis):
    n = torch.arange(20_000)
    zero = torch.zeros_like(n)
    values = uniform(*((n, zero) if axis == "seed" else (zero, n)), Stream.DRAW, 2)
    assert stats.kstest(values[:, 0].numpy(), "uniform").pvalue > 0.01
    neighbours = np.corrcoef(values[1:, 0], values[:-1, 0])[0, 1], np.corrcoef(values[:, 0], values[:, 1])[0, 1]
    assert max(map(abs, neighbours)) < 0.03  # 4 sigma of an uncorrelated sample


def test_streams_are_independent():
    n = torch.arange(10_000)
    columns = np.stack([uniform(n, torch.zeros_like(n), stream, 1)[:, 0].numpy() for stream in Stream])
    correlations = np.corrcoef(columns) - np.eye(len(Stream))
    assert np.abs(correlations).max() < 0.04
    for a in range(len(Stream)):  # every pair of deciles equally often
        for b in range(a):
            table, _, _ = np.histogram2d(columns[a], columns[b], bins=10, range=[[0, 1], [0, 1]])
            assert stats.chisquare(table.ravel()).pvalue > 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_bits():
    seeds, indices = torch.tensor([5, -1]), torch.tensor([0, 3])
    on_gpu = uniform(seeds.cuda(), indices.cuda(), Stream.DRAW, 1001)
    assert torch.equal(on_gpu.cpu(), uniform(seeds, indices, Stream.DRAW, 1001))
