"""Philox agrees with Random123's known answers and an independent scalar version; noise has the promised layout."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from shared.sampling.noise import Stream, gumbel, philox, seed_pattern, uniform
from tests.comparison import assert_close

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
    assert run_philox(words(counter), words(key)) == words(answer) == scalar_philox(words(counter), words(key))


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2**64 - 1), WORD), max_size=4),
    stream=st.sampled_from(Stream),
    size=st.integers(1, 11),
)
@example(rows=[(0, 0), (1, 7), (2**63, 7), (2**64 - 1, 2**32 - 1), (1, 8)], stream=Stream.DRAFT, size=1001)
def test_layout(rows, stream, size):
    """A number is a word of its seed, index, stream and position, whatever the other rows and the vocabulary are."""
    seeds = torch.tensor([seed_pattern(seed) for seed, _ in rows], dtype=torch.int64)
    indices = torch.tensor([index for _, index in rows], dtype=torch.int64)
    before = seeds.clone(), indices.clone()
    found = uniform(seeds, indices, stream, size)
    assert found.shape == (len(rows), size)
    assert found.tolist() == [[scalar_uniform(*row, stream, v) for v in range(size)] for row in rows]
    assert torch.equal(gumbel(seeds, indices, stream, size), -(-found.log()).log())
    assert torch.equal(seeds, before[0])
    assert torch.equal(indices, before[1])


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


def test_gumbel_noise_is_made_of_the_uniform_numbers_of_the_same_arguments():
    """An answer must not depend on which of two programs has sampled it."""
    seeds, indices = torch.tensor([5, 5, 6]), torch.tensor([0, 1, 1])
    for stream in (Stream.DRAW, Stream.RESIDUAL):
        numbers = uniform(seeds, indices, stream, 1000)
        noise = gumbel(seeds, indices, stream, 1000)
        expected = -(-numbers.log()).log()
        assert_close(noise, expected, f"noise of {stream.name}", ("row", "token"), rtol=1e-5, atol=1e-6)


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_bits():
    seeds, indices = torch.tensor([5, -1]), torch.tensor([0, 3])
    on_gpu = uniform(seeds.cuda(), indices.cuda(), Stream.DRAW, 1001)
    assert torch.equal(on_gpu.cpu(), uniform(seeds, indices, Stream.DRAW, 1001))
