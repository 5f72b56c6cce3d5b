"""Computes the tokens that a grammar allows on the GPU in every step, and masks the others' logits.

Introduced in phase 12. Engines that compute masks on the CPU must wait for the sampled token and then upload the mask.
Here each thread walks the bytes of one token through the automaton of its row; nothing is uploaded, and a mask is
recomputed only if the row's allowed tokens may have changed. There are two launches. The walk sets a bit for each
token, in the order of :class:`shared.grammar.tokens.device.GrammarTokens`; it needs no logits, so it follows the draw
of the previous token, in the same CUDA graph. The second launch writes -inf, in the order of the ids.

Invariants: a row without a grammar is neither read nor written; the bits are those of the scalar walk; the host reads
nothing, and all addresses are fixed, so that a CUDA graph can hold both launches.
"""

import numpy as np
import torch

from shared.grammar.automata.automaton import Action
from shared.grammar.tokens.device import AT_END, GROUP, LENGTH_BITS, LONGEST, NEVER, GrammarTokens, unpack_row
from shared.grammar.tokens.fsm import TokenFSM
from shared.kernels.launch import launch, launches, next_power_of_two, tl, triton
from shared.kernels.sampling.grammar_walk import BASE, COLUMNS, KEPT, ROW, load_configuration, walk

NUM_GROUPS = 16  # groups of tokens whose first two bytes a program looks up at once; at most 16
NUM_PROGRAMS = 8192  # minimum programs of a launch: with a few rows, each gets fewer groups
APPLY_BLOCK, APPLY_WARPS = 8192, 8
BITS, LOWEST = tl.constexpr(LENGTH_BITS), tl.constexpr(LONGEST)
GROUPED = tl.constexpr(GROUP)
BANNED = tl.constexpr(NEVER)
COUNTS, BLANKS = tl.constexpr(Action.COUNT), tl.constexpr(Action.BLANK)
ENDS = tl.constexpr(AT_END)
IS_END, WITHOUT = 1, 2  # bits in the last word of a row
MAY_END, NO_GRAMMAR = tl.constexpr(IS_END), tl.constexpr(WITHOUT)


@triton.jit
def grammar_mask_kernel(
    tables, rows, slots, text, starts, token_numbers, prefixes, words, num_groups, first_plain, longest, stride,
    NUM_GROUPS: tl.constexpr,
):  # fmt: skip
    """Program (i, b) finds the bits of groups i, i + the grid's size, … of the b-th slot.

    Most groups need no walk: all their tokens are plain and the state is free, or they begin with one or two bytes that
    the state refuses. Groups that need one are adjacent, so neighbouring groups go to different programs.
    """
    slot = tl.load(slots + tl.program_id(1)).to(tl.int64)
    if slot >= 0:
        row = rows + slot * ROW
        words += slot * stride
        base = tl.load(row + BASE)
        if base < 0:
            tl.store(words + stride - 1, NO_GRAMMAR)
        elif tl.load(row + KEPT) == 0:
            grammar = tables + base
            table = grammar + tl.load(grammar + 1)
            state, free, fewest, most, blanks, seen, height = load_configuration(grammar, row)
            if tl.program_id(0) == 0:
                may_end = (tl.load(table + state) & 1) * (height == 0).to(tl.int32)
                tl.store(words + stride - 1, may_end)
            is_open = (free == 1) | ((free == 2) & (most >= longest))
            lane = tl.arange(0, NUM_GROUPS)
            group = tl.program_id(0) + lane * tl.num_programs(0)
            is_group = group < num_groups
            prefix = tl.load(prefixes + group, mask=is_group, other=-1)
            is_alike = prefix >= 0
            column = tl.load(grammar + COLUMNS + (prefix & 255), mask=is_alike, other=0)
            next_column = tl.load(grammar + COLUMNS + (prefix >> 8), mask=is_alike, other=0)
            entry = tl.load(table + state + column, mask=is_alike, other=0)
            action = (entry >> 2) & 7
            has_next = (prefix >= 256) & (entry >= 0) & ((action <= COUNTS) | (action == BLANKS))
            entry = tl.where(has_next, tl.load(table + (entry >> 5) + next_column, mask=has_next, other=0), entry)
            is_live = (is_alike == 0) | (entry >= 0)
            is_plain = is_open & (group * GROUPED >= first_plain)
            is_due = (is_group & is_live & (is_plain == 0)).to(tl.int32)
            tl.store(words + group, -is_plain.to(tl.int32), mask=is_group & (is_due == 0))
            waiting = tl.sum(is_due << lane, 0)
            walked = tl.program_id(0)
            while waiting != 0:
                if waiting & 1:
                    token = walked * GROUPED + tl.arange(0, GROUPED)
                    numbers = tl.load(token_numbers + token)
                    is_allowed, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _ = walk(
                        grammar, table, row, state, free, fewest, most, blanks, seen, height,
                        text, tl.load(starts + token), numbers & LOWEST, (numbers >> BITS) & LOWEST,
                        (numbers >> BITS) >> BITS,
                    )  # fmt: skip
                    bits = is_allowed.to(tl.int32) << tl.arange(0, GROUPED)
                    tl.store(words + walked, tl.sum(bits, 0))
                waiting = waiting >> 1
                walked += tl.num_programs(0)


@triton.jit
def remove_kernel(
    words, slots, numbers, ranks, logits, vocabulary, stride, logit_stride, BLOCK: tl.constexpr, WORDS: tl.constexpr
):
    """Program (i, b) removes the i-th block of ids of the b-th row, and looks up their bits in shared memory."""
    b = tl.program_id(1)
    slot = tl.load(slots + b).to(tl.int64)
    if slot >= 0:
        words += slot * stride
        about_row = tl.load(words + stride - 1)
        if about_row != NO_GRAMMAR:
            ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            rank = tl.load(ranks + ids, mask=ids < vocabulary, other=BANNED)
            place = tl.arange(0, WORDS)
            row = tl.load(words + place, mask=place < stride, other=0)
            word = tl.gather(row, tl.where(rank >= 0, rank // GROUPED, 0), 0)
            is_allowed = (rank >= 0) & (((word >> (rank % GROUPED)) & 1) != 0)
            is_allowed = is_allowed | ((rank == ENDS) & (about_row == MAY_END))
            own = logits + tl.load(numbers + b).to(tl.int64) * logit_stride + ids
            kept = tl.load(own, mask=ids < vocabulary, other=0.0)  # storing all is faster than storing some
            tl.store(own, tl.where(is_allowed, kept.to(tl.float32), float("-inf")), mask=ids < vocabulary)


def grammar_mask(
    tables: torch.Tensor,
    tokens: GrammarTokens,
    rows: torch.Tensor,
    slots: torch.Tensor,
    words: torch.Tensor,
    grammars: dict[int, TokenFSM],
) -> None:
    """Write the bits of the allowed tokens of each row of a batch, except those whose bits are unchanged.

    Args:
        tables: those of :class:`shared.grammar.tokens.pool.GrammarPool`.
        rows: int32 ``[slots, ROW]``, configurations.
        slots: int32 ``[B]``, the indices of the configurations; -1 for a row without a grammar.
        words: int32 ``[slots, tokens.num_words]``, contiguous; those of other slots are unchanged.
        grammars: by their base in the tables; read only if no kernel runs.
    """
    B, stride = len(slots), words.shape[1]
    if words.shape != (len(rows), tokens.num_words):
        raise ValueError(
            f"the bits have the shape {[*words.shape]}; {len(rows)} slots and the vocabulary take "
            f"{[len(rows), tokens.num_words]}"
        )
    if B == 0:
        return
    if not launches(words):
        _mask_by_numpy(tokens, rows, slots, words, grammars)
        return
    num_groups = len(tokens.prefixes)
    programs_of_row = min(num_groups, max(triton.cdiv(num_groups, NUM_GROUPS), NUM_PROGRAMS // B))
    launch(
        grammar_mask_kernel, (programs_of_row, B),
        tables, rows, slots, tokens.text, tokens.starts, tokens.packed, tokens.prefixes, words, num_groups,
        tokens.first_plain, tokens.longest, stride,
        NUM_GROUPS=NUM_GROUPS, num_warps=1,
    )  # fmt: skip


def _mask_by_numpy(
    tokens: GrammarTokens, rows: torch.Tensor, slots: torch.Tensor, words: torch.Tensor, grammars: dict[int, TokenFSM]
) -> None:
    ranks = tokens.ranks.numpy()
    for slot in slots.tolist():
        if slot < 0:
            continue
        base, now = unpack_row(rows[slot].numpy())
        if base < 0:
            words[slot, -1] = WITHOUT
            continue
        mask = grammars[base].mask(now)
        bits = np.zeros(len(tokens.starts), np.uint8)
        bits[ranks[mask & (ranks >= 0)]] = 1
        words[slot, :-1] = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())
        words[slot, -1] = int(grammars[base].is_terminal(now))


def remove_refused(
    words: torch.Tensor, slots: torch.Tensor, numbers: torch.Tensor, tokens: GrammarTokens, logits: torch.Tensor
) -> None:
    """Set the logits of the tokens that the bits of :func:`grammar_mask` refuse to -inf, in place.

    Args:
        words: int32 ``[slots, tokens.num_words]``.
        slots: int32 ``[B]``, the rows of ``words``; -1 for a row without a grammar.
        numbers: int32 ``[B]``, the row of the logits that each belongs to, without duplicates.
        logits: ``[n, V]``, with adjacent columns; other rows are unchanged.
    """
    B, V = len(slots), logits.shape[1]
    if len(tokens.ranks) != V or logits.stride(1) != 1:
        raise ValueError(f"the logits have {V} columns; the vocabulary has {len(tokens.ranks)}, side by side")
    if B and launches(logits):
        launch(
            remove_kernel, (triton.cdiv(V, APPLY_BLOCK), B),
            words, slots, numbers, tokens.ranks, logits, V, words.shape[1], logits.stride(0),
            BLOCK=APPLY_BLOCK, WORDS=next_power_of_two(words.shape[1]), num_warps=APPLY_WARPS,
        )  # fmt: skip
        return
    ranks, words = tokens.ranks.long(), words[slots.long().clamp(min=0)]
    flags = words[:, -1:]
    bits = (words[:, :-1][:, ranks.clamp(min=0) >> 5] >> (ranks.clamp(min=0) & 31)) & 1
    is_allowed = ((ranks >= 0) & (bits != 0)) | ((ranks == AT_END) & (flags == IS_END))
    is_constrained = (slots >= 0)[:, None] & (flags != WITHOUT)
    rows = numbers.long()
    logits[rows] = logits[rows].masked_fill(is_constrained & ~is_allowed, float("-inf"))
