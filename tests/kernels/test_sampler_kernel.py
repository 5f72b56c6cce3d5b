"""The sampler's kernels choose the tokens that the sampler of the CPU chooses.

In fp32 both divide, compare and add exactly alike; they differ in the last bits of exponentials, logarithms and sums.
So a row has one right token unless one of two things lies within rounding: the probability above a token is within one
part in 2^19 of top-p, which leaves open whether the token stays; or the sums of score and noise of two tokens are
within 2^-19 of each other relative to their size, which leaves open which of them is drawn. ``right_tokens`` lists
them; a row with more than one is rare, and every token that either sampler chooses must be in the list.
"""

import math
import random

import pytest
import torch

import shared.kernels.sampling.sampler as module
from shared.kernels.launch import INTERPRETED, launch, tl, triton
from shared.kernels.sampling.cuts import WEIGHTLESS
from shared.kernels.sampling.draw import REACH, bound_of, gumbel_of, load_uniform
from shared.kernels.sampling.keys import UNITS
from shared.kernels.sampling.sampler import sample
from shared.sampling import sampler as op
from shared.sampling.noise import Stream, gumbel, seed_pattern, uniform
from shared.sampling.params import SamplingParams
from shared.sampling.processors import apply_min_p, apply_temperature
from shared.sampling.sampler import SamplingBatch, SamplingRow

INF = math.inf
ROUNDING = 2**-19
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def scores_of(logits, row):
    """The processed scores ``[V]`` in fp32, without top-k and top-p; of a greedy row the adjusted logits."""
    p = row.params
    logits = logits.cpu().float()[None]
    logits = op.adjust_logits(logits, SamplingBatch.of([row]))
    if not p.is_greedy:
        logits = apply_temperature(logits, torch.tensor([p.temperature], dtype=torch.float32))
        if p.min_p > 0:
            logits = apply_min_p(logits, torch.tensor([math.log(p.min_p)], dtype=torch.float32))
    return logits[0]


def kept_tokens(scores, params):
    """Two masks by exact masses in fp64: the tokens that stay, and those that may by rounding."""
    may_stay = scores > -INF if params.min_p > 0 else torch.ones(len(scores), dtype=torch.bool)
    if params.top_k is not None and params.top_k < len(scores):
        may_stay &= scores >= scores.topk(params.top_k).values[-1]
    if params.top_p == 1:
        return may_stay, may_stay
    values, place = scores.double().where(may_stay, -INF).softmax(-1).unique(return_inverse=True)  # ascending
    mass = values * place.bincount(minlength=len(values))
    above = (mass.flip(0).cumsum(0).flip(0) - mass)[place]
    p = params.top_p
    return may_stay & (above < p * (1 - ROUNDING)), may_stay & (above < p * (1 + ROUNDING))


def right_tokens(scores, row, stream):
    """The ids that may be chosen."""
    if row.params.is_greedy:
        return {int(scores.argmax())}
    stays, may_stay = kept_tokens(scores, row.params)
    seeds, indices = torch.tensor([seed_pattern(row.seed)]), torch.tensor([row.index])
    noise = -(-uniform(seeds, indices, stream, len(scores))[0].double().log()).log()
    sums = scores.double() + noise
    slack = ROUNDING * (1 + scores.abs() + noise.abs())
    return set((may_stay & (scores > -INF) & (sums >= sums.where(stays, -INF).max() - slack)).nonzero()[:, 0].tolist())


def sample_and_cuts(logits, batch, stream, inspect=lambda kernel, arguments: None):
    """The kernels' choice, and what they found the largest keys that stay to be: ``[B, 2]``, or None.

    ``inspect`` sees each launch's arguments by name when it has run.
    """
    cuts = []

    def recording_launch(kernel, grid, *args, **options):
        launch(kernel, grid, *args, **options)
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        inspect(kernel, arguments)
        if kernel is module.search_kernel:
            cuts.append(arguments["cuts"].cpu())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launch", recording_launch)
        return sample(logits, batch, stream=stream), cuts[0] if cuts else None


def check(logits, rows, stream=Stream.DRAW):
    """Both samplers choose right tokens, and the same where only one is right; returns how many rows have more."""
    before = logits.clone()
    ours, cuts = sample_and_cuts(logits, SamplingBatch.of(rows, device=logits.device), stream)
    theirs = op.sample(logits.cpu(), SamplingBatch.of(rows), stream=stream)
    assert ours.dtype == torch.int64
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    several = 0
    for b, row in enumerate(rows):
        scores = scores_of(logits[b], row)
        right = right_tokens(scores, row, stream)
        assert int(ours[b]) in right, (b, row.params)
        assert int(theirs[b]) in right, (b, row.params)
        several += len(right) > 1
        p = row.params
        if not p.is_greedy and (p.top_p < 1 or (p.top_k or len(scores)) < len(scores)):
            stays, may_stay = kept_tokens(scores, p)
            kept = (scores.abs().view(torch.int32) <= cuts[b].min()) & ((scores > -INF) | (p.min_p == 0))
            assert (stays <= kept).all(), (b, p, int(stays.sum()), int(kept.sum()))
            assert (kept <= may_stay).all(), (b, p, int(kept.sum()), int(may_stay.sum()))
    return several


def random_rows(count, seed):
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        settings = {"temperature": generator.choice([0, 0.2, 0.7, 1.0, 1.0, 2.0])}
        if generator.random() < 0.6:
            settings["top_k"] = generator.choice([1, 2, 5, 50, 500, 2000, 10**6])
        if generator.random() < 0.6:
            settings["top_p"] = generator.choice([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 0.9999999])
        if generator.random() < 0.4:
            settings["min_p"] = generator.choice([1e-6, 0.01, 0.2, 1.0])
        if generator.random() < 0.3:
            settings |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.7}
        if generator.random() < 0.2:
            settings["logit_bias"] = {0: -100.0, 5: 3.0}
        masked = (1, 4) if generator.random() < 0.2 else ()
        numbers = generator.getrandbits(64), generator.getrandbits(33)
        rows.append(SamplingRow(SamplingParams(**settings), *numbers, [0, 3, 3, 4], [2, 2, 3], masked))
    return rows


def row(seed=1, index=0, **settings):
    return SamplingRow(SamplingParams(**settings), seed, index, ())


@pytest.mark.parametrize(("vocabulary", "scale"), [(2100, 3.0), (1024, 0.5), (1025, 10.0)])
def test_random_rows(randn, vocabulary, scale):
    assert check(randn(7, vocabulary, scale=scale), random_rows(7, vocabulary)) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_sixteen_bits(randn, dtype):
    """They have many equals, at the cuts too."""
    assert check(randn(5, 1500, dtype=dtype, scale=2.0), random_rows(5, 5)) <= 1


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 31, 1023])
def test_small_vocabularies(randn, vocabulary):
    rows = [row(), row(temperature=0), row(top_k=2, top_p=0.7)]
    check(randn(3, vocabulary, scale=2.0), rows)


def test_launches(randn, num_launches):
    logits = randn(2, 1500)
    before = 0
    for settings, expected in [({"temperature": 0}, 1), ({}, 2), ({"top_k": 5}, 5), ({"top_k": 5, "top_p": 0.5}, 5)]:
        sample(logits, SamplingBatch.of([row(**settings), row(temperature=0)], device=DEVICE))
        assert num_launches() - before == expected
        before = num_launches()


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(5, 2500, device=DEVICE)
    logits[1, [1023, 1024, 2400]] = 2.0
    logits[2] = -INF
    logits[3] = -INF
    logits[3, 2047] = -1e30
    logits[4, [700, 2100]] = INF
    ids = sample(logits, SamplingBatch.of([row(temperature=0)] * 5, device=DEVICE))
    assert ids.tolist() == [0, 1023, 0, 2047, 700]


TIES = torch.tensor([0.0, 1.0, -1.0, 1.0, 2.0, 0.0, 1.0, -INF]).repeat(40)  # of 320: 40, 120, 80, 40, 40 equals


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 41},
        {"top_k": 160},
        {"top_k": 300},
        {"top_p": 0.1},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_k": 41, "top_p": 0.3},
        {"top_k": 41, "top_p": 0.9},
    ],
    ids=str,
)
def test_equals_share_their_fate(settings):
    rows = [row(seed=seed, **settings) for seed in range(3)]
    assert check(TIES.expand(3, -1).to(DEVICE), rows) == 0


@pytest.mark.parametrize("top", [{}, {"top_k": 300}, {"top_k": 300, "top_p": 0.99}])
@pytest.mark.parametrize("min_p", [0.36, 0.01])  # of the ties 160, or 280
def test_min_p_before_top_k_and_top_p(randn, min_p, top):
    """Often it leaves fewer tokens than top-k would keep."""
    rows = [row(seed=seed, min_p=min_p, **top) for seed in range(2)] + [row(seed=2, **top)]
    assert check(TIES.expand(3, -1).to(DEVICE), rows) == 0
    assert check(randn(3, 1300, scale=2.0), rows) <= 1


def test_all_tokens_are_equal():
    rows = [row(top_k=3), row(top_p=0.2), row(top_k=3, top_p=0.2), row()]
    check(torch.full((4, 1100), -7.25, device=DEVICE), rows)


def test_tokens_without_any_probability(randn):
    logits = randn(4, 1100)
    logits[:, 20:] = -INF
    logits[3, :] = -INF
    check(logits, [row(), row(top_k=50), row(top_p=0.9, top_k=500), row(top_k=5)])


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e4, 1e38])
def test_extreme_temperatures_and_logits(randn, temperature):
    logits = torch.cat((randn(3, 300), randn(3, 300, scale=1e30)), 1)
    rows = [row(temperature=temperature, **settings) for settings in ({}, {"top_k": 200}, {"top_p": 0.6})]
    check(logits, rows)


def test_a_list_longer_than_the_searching_program_holds(randn, monkeypatch):
    monkeypatch.setattr(module, "LIST_TILE", 32)
    rows = [row(top_k=500), row(top_k=600, top_p=0.6)]
    assert check(randn(2, 1023, scale=0.05), rows) <= 1


def test_top_p_of_what_top_k_leaves(randn):
    """Until the top-k cut is known, the mass that the nucleus is a share of has two bounds."""
    generator = random.Random(0)
    rows = [row(top_k=generator.randrange(3, 500), top_p=generator.uniform(0.3, 0.999)) for _ in range(8)]
    assert check(randn(8, 1023, scale=1.5), rows) <= 1


@pytest.mark.parametrize("bracket", [(-1.0, 0.5), (6.0, INF), (INF, INF)], ids=str)
def test_a_bracket_that_misses_changes_no_cut(randn, bracket):
    def mislead(kernel, arguments):
        if kernel is module.bracket_kernel:
            arguments["brackets"].copy_(torch.tensor(bracket))

    rows = [row(seed=seed, top_p=p, **more) for seed, p in enumerate((0.3, 0.9)) for more in ({}, {"min_p": 0.01})]
    logits, batch = randn(4, 1300), SamplingBatch.of(rows, device=DEVICE)
    expected = sample_and_cuts(logits, batch, Stream.DRAW)
    assert all(map(torch.equal, sample_and_cuts(logits, batch, Stream.DRAW, mislead), expected))


@pytest.mark.parametrize(("head", "top_p"), [(0, 0.95), (1, 0.95), (40, 0.5), (3000, 0.95)])
def test_brackets_hold_the_cuts_and_lists_are_short(randn, head, top_p):
    """A flat row, one that one token rules, one with a head as a language model's, one with a plateau."""
    found = {}
    logits = randn(1, 40_000)
    logits[:, torch.randperm(40_000)[:head].to(DEVICE)] += 8.0
    batch = SamplingBatch.of([row(top_p=top_p, temperature=0.7)], device=DEVICE)
    _, cuts = sample_and_cuts(logits, batch, Stream.DRAW, lambda kernel, arguments: found.update(arguments))
    low, high = found["brackets"][0].tolist()
    assert low < cuts[0, 1].view(torch.float32) <= high
    assert found["num_listed"].item() < module.LIST_TILE


def test_rows_that_lie_apart(randn):
    rows = random_rows(4, 11)
    wide = torch.full((8, 1500), INF, device=DEVICE)
    wide[::2, :1100] = randn(4, 1100, scale=3.0)
    check(wide[::2, :1100], rows)
    check(wide[::2, :1100].T.contiguous().T, rows)


def test_a_row_alone_and_among_others(randn):
    logits, rows = randn(5, 1300, scale=2.0), random_rows(5, 3)
    together = sample(logits, SamplingBatch.of(rows, device=DEVICE))
    alone = [sample(logits[b : b + 1], SamplingBatch.of(rows[b : b + 1], device=DEVICE)) for b in (1, 4)]
    assert torch.equal(together[[1, 4]], torch.cat(alone))


@pytest.mark.parametrize("vocabulary", [10, 1100])
def test_a_nan_is_not_chosen(randn, vocabulary):
    logits = randn(4, vocabulary)
    logits[:3, ::2] = float("nan")
    logits[3] = float("nan")
    rows = [row(top_k=5, top_p=0.5), row(temperature=0), row(), row()]
    ids = sample(logits, SamplingBatch.of(rows, device=DEVICE))
    assert (ids[:3] % 2 == 1).all()
    assert ((ids >= 0) & (ids < vocabulary)).all()


@triton.jit
def gumbel_kernel(out, seed, index, first, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    noise = gumbel_of(load_uniform(tl.load(seed), tl.load(index), first, STREAM, BLOCK))
    tl.store(out + tl.arange(0, BLOCK), noise)


@pytest.mark.parametrize("stream", Stream)
def test_the_noise_is_that_of_the_cpu(stream):
    for seed, index, first in [(0, 0, 0), (2**64 - 3, 2**31 + 5, 4096), (2**63 + 2**32, 2**32 + 9, 261_888)]:
        seeds, indices = torch.tensor([seed_pattern(seed)]), torch.tensor([index])
        expected = gumbel(seeds, indices, stream, first + 256)[0, first:]
        out = torch.empty(256, device=DEVICE)
        launch(gumbel_kernel, (1,), out, seeds.to(DEVICE), indices.to(DEVICE), first, STREAM=int(stream), BLOCK=256)
        torch.testing.assert_close(out.cpu(), expected, rtol=4e-7, atol=4e-7)


def test_no_noise_reaches_further_than_the_draw_looks():
    words = torch.tensor([0, 2**23 - 1]).float()
    least, most = (-(-((words + 0.5) * 2**-23).log()).log()).tolist()
    assert most - least < REACH.value < most - least + 1


def test_what_the_sums_leave_out_weighs_nothing():
    assert math.exp(-WEIGHTLESS.value) * UNITS.value < 1 < math.exp(1 - WEIGHTLESS.value) * UNITS.value


@triton.jit
def bound_kernel(uniform, noise, bounds, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(noise + i, gumbel_of(tl.load(uniform + i)))
    tl.store(bounds + i, bound_of(tl.load(uniform + i)))


def test_no_noise_exceeds_its_bound():
    words = torch.cat((torch.arange(0, 2**23, 2**11), 2**23 - 1 - torch.arange(4096)))
    uniform = ((words.float() + 0.5) * 2**-23).to(DEVICE)
    noise, bounds = torch.empty_like(uniform), torch.empty_like(uniform)
    launch(bound_kernel, (1,), uniform, noise, bounds, BLOCK=8192)
    assert (noise < bounds).all()
    assert (bounds - noise)[noise > 4].max() < 0.07 + 1e-2


def test_large_blocks_choose_the_same(randn, monkeypatch):
    """The tied rows have tokens whose bounds come close, so that exact scores of whole blocks are computed."""
    ties = TIES.repeat(30)[None].expand(4, -1).to(DEVICE)
    few, many = random_rows(4, 21), [row(seed=seed) for seed in range(4)]
    cases = [(randn(4, 9000, scale=2.0), few), (ties, many)]
    expected = [sample(logits, SamplingBatch.of(rows, device=DEVICE)) for logits, rows in cases]
    monkeypatch.setattr(module, "FEW_ROWS", 0)
    for (logits, rows), right in zip(cases, expected, strict=True):
        assert torch.equal(sample(logits, SamplingBatch.of(rows, device=DEVICE)), right)


def test_blocks_that_cannot_win_and_blocks_that_can(randn):
    """The second and fourth block lie just within the noise's reach or beyond it, at various temperatures."""
    logits = randn(5, 4500)
    logits[:, 1024:2048] -= 14
    logits[:, 3072:4096] -= 30
    logits[4, 3072:4096] = -INF
    tops = [{}, {"top_p": 0.9}, {"top_k": 1500}, {"top_p": 1 - 1e-9, "temperature": 5.0}, {"min_p": 1e-9}]
    assert check(logits, [row(seed=seed, **top) for seed, top in enumerate(tops)]) <= 1


def test_other_streams_draw_other_tokens(randn):
    logits, rows = randn(3, 1100), [row(seed=seed) for seed in range(3)]
    drawn = []
    for stream in (Stream.DRAW, Stream.DRAFT):
        check(logits, rows, stream)
        drawn.append(sample(logits, SamplingBatch.of(rows, device=DEVICE), stream=stream).tolist())
    assert drawn[0] != drawn[1]


def test_no_row(randn, num_launches):
    assert sample(randn(0, 100), SamplingBatch.of([], device=DEVICE)).shape == (0,)
    assert num_launches() == 0


def test_what_cannot_be(randn):
    with pytest.raises(ValueError, match="logits have 2 rows, the sampling batch has 1"):
        sample(randn(2, 100), SamplingBatch.of([row()], device=DEVICE))
    with pytest.raises(ValueError, match="262145"):
        sample(torch.zeros(1, 262_145, device=DEVICE), SamplingBatch.of([row()], device=DEVICE))


def test_without_a_gpu_the_op_does_the_same(randn, monkeypatch):
    logits, batch = randn(6, 500), SamplingBatch.of(random_rows(6, 8), device=DEVICE)
    monkeypatch.setattr(module, "launches", lambda tensor: False)
    assert torch.equal(sample(logits, batch), op.sample(logits, batch))


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [128_256, 151_936, 262_144])
@pytest.mark.parametrize("scale", [0.9, 3.0])
def test_real_vocabularies(randn, stored_dtype, vocabulary, scale):
    logits, rows = randn(64, vocabulary, dtype=stored_dtype, scale=scale), random_rows(64, vocabulary)
    assert check(logits, rows) <= 6
    batch = SamplingBatch.of(rows, device=DEVICE)
    first = sample(logits, batch)  # whatever the order in which programs add and arrive
    assert all(torch.equal(sample(logits, batch), first) for _ in range(30))


@pytest.mark.gpu
def test_nothing_is_read_by_the_host_and_a_graph_can_record_it(randn):
    rows = [row(seed=seed, index=seed, **settings) for seed, settings in enumerate([{}, {"top_k": 50, "top_p": 0.9}])]
    batch = SamplingBatch.of(rows, device=DEVICE)
    inputs = [randn(2, 128_256, scale=2.0) for _ in range(3)]
    expected = [sample(logits, batch) for logits in inputs]
    buffer = inputs[0].clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample(buffer, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = sample(buffer, batch)
    for logits, right in zip(inputs, expected, strict=True):
        buffer.copy_(logits)
        graph.replay()
        assert torch.equal(ids, right)


def test_counters_that_are_kept_are_zero_again_and_change_no_token(randn):
    """Batches of different sizes and kinds in turn, as the steps of an engine bring them."""
    counters = module.make_counters(5, DEVICE)
    for n, (rows, temperature, top_p) in enumerate([(3, 0.0, 1.0), (5, 0.8, 1.0), (2, 0.7, 0.9), (5, 0.0, 1.0)]):
        logits = randn(rows, 2000 + n)
        params = SamplingParams(temperature=temperature, top_p=top_p)
        batch = SamplingBatch.of([SamplingRow(params, seed, n, ()) for seed in range(rows)], device=DEVICE)
        assert sample(logits, batch, counters=counters).tolist() == sample(logits, batch).tolist()
        assert not counters.any()
