"""The configuration after a token, on the GPU that sampled the token. Introduced in phase 12.

The next mask depends on the token that a step has just sampled, which the host sees a step later. So the configurations
are kept on the device, and a launch after the sampler advances them. With drafts, each position has a configuration,
which follows from the previous position's by one draft, so one launch walks the whole chain.

If the allowed tokens stay the same, as for most tokens inside a string, the row is marked and keeps its mask.

Invariant: a row whose grammar refuses the token loses its grammar. The mask prevents this, and the host, which walks
the same tokens, detects it.
"""

import torch

from shared.grammar.tokens import device
from shared.grammar.tokens.device import GrammarTokens, pack_row, unpack_row
from shared.grammar.tokens.fsm import TokenFSM
from shared.kernels.launch import launch, launches, next_power_of_two, tl, triton
from shared.kernels.sampling.grammar_walk import (
    BASE,
    BLANKS,
    FEWEST,
    FRAMES,
    HEIGHT,
    KEPT,
    MOST,
    ROW,
    SEEN,
    SEENS,
    STATE,
    load_configuration,
    walk,
)

COPIED = tl.constexpr(next_power_of_two(device.ROW))


@triton.jit
def store_set(pointers, sets, mask):
    tl.store(pointers, sets.to(tl.int32), mask=mask)
    tl.store(pointers + 1, (sets >> 32).to(tl.int32), mask=mask)


@triton.jit
def grammar_advance_kernel(tables, rows, sources, targets, chosen, token_ids, text, ids, longest, num_steps):
    """Program b walks the tokens of chain b, one after the other."""
    b = tl.program_id(0)
    source = tl.load(sources + b)
    if source >= 0:
        target = tl.load(targets + b)
        number = b
        if chosen is not None:
            number = tl.load(chosen + b)
        lane = tl.arange(0, 1)
        n = tl.arange(0, COPIED)
        for step in range(num_steps):
            row = rows + source.to(tl.int64) * ROW
            after = rows + (target + step).to(tl.int64) * ROW
            numbers = tl.load(row + n, mask=n < ROW)
            base = tl.load(row + BASE)
            token_id = tl.load(token_ids + number * num_steps + step)
            length = tl.load(ids + 2 * token_id + 1 + lane)
            start = tl.load(ids + 2 * token_id + lane)
            if base < 0:
                tl.store(after + n, numbers, mask=n < ROW)
            else:
                grammar = tables + base
                table = grammar + tl.load(grammar + 1)
                was, free, least, limit, run, known, height = load_configuration(grammar, row)
                (
                    is_allowed, state, fewest, most, blanks, seen, below, own,
                    frame0, frame1, frame2, frame3, seen0, seen1, seen2, seen3,
                ) = walk(
                    grammar, table, row, was, free, least, limit, run, known, height,
                    text, start, length, length, length * 0,
                )  # fmt: skip
                is_kept = is_allowed & (state == was) & (blanks == run) & (seen == known)
                is_kept &= (own == 0) & (below == height)
                is_kept &= tl.minimum(fewest, longest) == tl.minimum(least, longest)  # a token counts no further
                is_kept &= tl.minimum(most, longest) == tl.minimum(limit, longest)
                tl.debug_barrier()  # source and target may be the same row
                tl.store(after + n, numbers, mask=n < ROW)
                tl.debug_barrier()
                is_token = length > 0  # an id that ends the sequence leaves the row unchanged
                tl.store(after + KEPT + lane, (is_kept & (source == target + step)).to(tl.int32))
                tl.store(after + BASE + lane, -1 + lane, mask=is_token & (is_allowed == 0))
                tl.store(after + STATE + lane, state // tl.load(grammar), mask=is_allowed)
                tl.store(after + FEWEST + lane, fewest, mask=is_allowed)
                tl.store(after + MOST + lane, most, mask=is_allowed)
                tl.store(after + BLANKS + lane, blanks, mask=is_allowed)
                tl.store(after + HEIGHT + lane, below + own, mask=is_allowed)
                store_set(after + SEEN + lane, seen, is_allowed)
                frames, seens = after + FRAMES + below, after + SEENS + 2 * below
                tl.store(frames, frame0, mask=is_allowed & (own > 0))
                tl.store(frames + 1, frame1, mask=is_allowed & (own > 1))
                tl.store(frames + 2, frame2, mask=is_allowed & (own > 2))
                tl.store(frames + 3, frame3, mask=is_allowed & (own > 3))
                store_set(seens, seen0, is_allowed & (own > 0))
                store_set(seens + 2, seen1, is_allowed & (own > 1))
                store_set(seens + 4, seen2, is_allowed & (own > 2))
                store_set(seens + 6, seen3, is_allowed & (own > 3))
            tl.debug_barrier()  # the next iteration reads what this one wrote
            source = target + step


def grammar_advance(
    tables: torch.Tensor,
    tokens: GrammarTokens,
    rows: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    token_ids: torch.Tensor,
    grammars: dict[int, TokenFSM],
    chosen: torch.Tensor | None = None,
) -> None:
    """Walk ``token_ids[b]`` one by one from ``rows[sources[b]]``, and write the configuration after the j-th to
    ``rows[targets[b] + j]``.

    Args:
        rows: int32 ``[slots, ROW]``. No row is the source of one chain and the target of another.
        sources: int32 ``[B]``; -1 for a row without a grammar, which is not written.
        targets: int32 ``[B]``; may equal ``sources``.
        token_ids: int64 ``[B]`` or ``[B, K]``, contiguous.
        grammars: by their base in the tables; read only if no kernel runs.
        chosen: int32 ``[B]``: chain b walks ``token_ids[chosen[b]]``; None: ``token_ids[b]``.
    """
    num_steps = 1 if token_ids.ndim == 1 else token_ids.shape[1]
    if launches(rows):
        launch(
            grammar_advance_kernel, (len(sources),),
            tables, rows, sources, targets, chosen, token_ids, tokens.text, tokens.ids, tokens.longest, num_steps,
            num_warps=1,
        )  # fmt: skip
        return
    if chosen is not None:
        token_ids = token_ids[chosen]
    chains = zip(sources.tolist(), targets.tolist(), token_ids.reshape(len(sources), num_steps).tolist(), strict=True)
    for source, target, ids in chains:
        for step, token_id in enumerate(ids if source >= 0 else []):
            row = rows[target + step - 1 if step else source].clone()
            base, now = unpack_row(row.numpy())
            if base >= 0 and tokens.ids[token_id, 1] > 0:
                after = grammars[base].next_state(now, token_id)
                if after is None:
                    row[device.BASE] = -1
                else:
                    row = torch.from_numpy(pack_row(base, after))
            rows[target + step] = row
