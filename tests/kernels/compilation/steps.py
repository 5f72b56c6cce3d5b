"""Sums of ranks, and what chooses tokens and keys, compiles for GPUs."""

from types import SimpleNamespace

import torch

from tests.kernels.compilation import compile_launch, compiling


def compile_compression():
    from shared.tracks.compression.kernels import kept_moves, key_redundancy, key_selection, window_mass
    from shared.tracks.compression.selection import Budget

    compiling(kept_moves, key_redundancy, key_selection, window_mass)
    for dtype, Hq, Hkv, D, length in [
        (torch.bfloat16, 32, 8, 64, 128),
        (torch.bfloat16, 4, 1, 256, 32),
        (torch.float32, 4, 1, 64, 32),
    ]:
        numbers = torch.zeros(2, 64, dtype=torch.int32)
        sequences = window_mass.CachedSequences(numbers, numbers, 2176)
        memory, ring = torch.zeros(2, 3, 16, Hkv, D, dtype=dtype), torch.zeros(2, 3, length, Hq, D, dtype=dtype)
        mass = window_mass.window_mass(ring, memory, sequences, length, 0.125)[:, :, :, 0]
        key_redundancy.key_redundancy(memory, sequences, 0.5)
        p = torch.ones(1, dtype=torch.float64)
        kept = key_selection.select_keys(mass, mass, sequences, numbers[0, :2], Budget(1024, 2048), p)
        kept_moves.move_kept(memory, memory, sequences, 1, *kept, 2048, 2049)


def compile_sampler():
    from shared.kernels.sampling import sampler as module
    from shared.sampling.params import SamplingParams
    from shared.sampling.sampler import SamplingBatch, SamplingRow

    compiling(module)
    for settings in ({}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9, "min_p": 0.1}):
        batch = SamplingBatch.of([SamplingRow(SamplingParams(**settings), 1, 2)])
        module.sample(torch.zeros(1, 128_256, dtype=torch.bfloat16), batch)


def compile_grammar():
    from shared.grammar.tokens.device import ROW, GrammarTokens
    from shared.grammar.tokens.vocabulary import GrammarVocabulary
    from shared.kernels.sampling import grammar_advance, grammar_mask

    compiling(grammar_advance, grammar_mask)
    tokens = GrammarTokens.of(GrammarVocabulary.of_tokens([b"a", b'"', b"</s>"], [2]), "cpu")
    tables, rows, slots = (torch.zeros(size, dtype=torch.int32) for size in (1024, (2, ROW), 2))
    words = torch.zeros(2, tokens.num_words, dtype=torch.int32)
    grammar_mask.grammar_mask(tables, tokens, rows, slots, words, {})
    for dtype in (torch.bfloat16, torch.float32):
        grammar_mask.remove_refused(words, slots, slots, tokens, torch.zeros(2, 3, dtype=dtype))
    for ids, chosen in ((torch.zeros(2, dtype=torch.int64), None), (torch.zeros(2, 5, dtype=torch.int64), slots)):
        grammar_advance.grammar_advance(tables, tokens, rows, slots, slots, ids, {}, chosen)


def compile_next_token():
    from shared.kernels.sampling import next_token as module
    from shared.kernels.sampling import pending_ids

    compiling(module, pending_ids)
    longs, ints = [torch.zeros(4, dtype=torch.int64)] * 3, [torch.zeros(4, dtype=torch.int32)] * 3
    module.next_token(*longs, *ints, longs[0], block_size=16, stride=1024)
    pending_ids.fill_pending(longs[0], longs[1])


def compile_all_reduce():
    """Of one shot and of two; what is written to other GPUs, read from them and cleared is 16 bytes for each thread."""
    from shared.tracks.ranks.kernels import all_reduce as module

    def launch(kernel, grid, *args, **options):
        ptx = compile_launch(kernel, grid, *args, **options)
        num_others, num_shots = options["SIZE"] - 1, 1 + (options["PIECES"] > 1)
        num_vectors = num_shots * num_others * max(1, options["BLOCK"] // (128 * options["num_warps"]))
        assert ptx.count("ld.volatile.global.v4.b32") == num_vectors
        assert ptx.count("st.global.v4.b32") >= 2 * num_vectors

    module.launch = launch
    ints = [torch.zeros(size, dtype=torch.int32) for size in (256, 1)]
    for size, T, dtype, n, has_residual in (
        (2, 1, torch.bfloat16, 8192, False),
        (2, 1, torch.float16, 1152, True),
        (4, 1, torch.float32, 4096, True),
        (4, 64, torch.bfloat16, 4096, True),
    ):
        addresses = torch.zeros(size, dtype=torch.int64)
        peers = SimpleNamespace(rank=1, size=size, addresses=addresses, counters=ints[0], stop=ints[1])
        x = torch.zeros(T, n, dtype=dtype)
        module.all_reduce(x, peers, x if has_residual else None)
