"""Prefill attention that follows a plan: ``planned``, for ragged batches. Introduced in phase 6.1.

Each sequence has any number of new tokens after its cached ones: a prompt, a chunk of one, draft tokens to verify. They
are divided into tiles whose rows are (token, head of the group) pairs, so a key is loaded once for all heads that share
it (FlashAttention-2, arXiv 2307.08691; the packing is from FlashInfer, arXiv 2501.01005). A program computes one item
of the plan for one KV head: a tile of rows and a split of the keys that the tile attends to.

Invariants: causality follows the order in the cache; a tile holds whole tokens, so all heads of a token have the same
splits; only keys that some token of the tile attends to are read; a row without visible keys in its item stores an
empty state; a program without an item returns at once.
"""

import torch

from shared.attention.descriptor import DevicePlan
from shared.kernels.attention.decode_attention import NO_WINDOW, in_base_2
from shared.kernels.attention.merge_states import merge_states
from shared.kernels.attention.paged_attention import attend_by_sequence
from shared.kernels.attention.planned_attention import DOT_ROWS
from shared.kernels.attention.planned_tiling import CopiedTiling, PrefillTiling
from shared.kernels.attention.planned_workspace import PlannedWorkspace
from shared.kernels.attention.prompt_keys import copy_keys
from shared.kernels.attention.prompt_tiles import attend_to_keys
from shared.kernels.attention.specialized_prefill import specialized_prefill
from shared.kernels.launch import launch, launch_dependents, launches, next_power_of_two, tl, triton, wait_for_previous


@triton.jit
def planned_prefill_kernel(
    q, keys, values, tables, table_starts, lengths, k_scales, v_scales, num_masks, copied, num_copied, first_rows,
    num_items, split_size, request_indices, query_tile_indices, kv_tile_indices, query_indptr, output_indptr, out,
    partial, partial_log, scale, softcap, window, q_row_stride, q_head_stride,
    HAS_MASKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes item j for KV head i; the grid is (Hkv, capacity).

    With ``first_rows`` there are two launches: one for the requests whose keys are copied, and one for the others.
    """
    launch_dependents(PDL)
    wait_for_previous(PDL)
    item = tl.program_id(1)
    request = tl.load(request_indices + item)
    is_computed = item < tl.load(num_items)
    if first_rows is not None:
        key_row = tl.load(first_rows + request)
        is_computed &= (key_row >= 0) == (copied is not None)
    if is_computed:
        kv_head = tl.program_id(0)
        query_tile = tl.load(query_tile_indices + item)
        kv_tile = tl.load(kv_tile_indices + item)
        size = tl.load(split_size)
        length = tl.load(lengths + request)
        first_row = tl.load(query_indptr + request)
        num_new = tl.load(query_indptr + request + 1) - first_row

        r, d = tl.arange(0, ROWS), tl.arange(0, D)
        first_token = query_tile * TOKENS
        token = first_token + r // GROUP
        is_row = (r < TOKENS * GROUP) & (token < num_new)
        position = length - num_new + token  # in the cache
        row = (first_row + token).to(tl.int64)
        head = kv_head * GROUP + r % GROUP
        # The tile's keys: from the first token's first visible key to the last token's own.
        start = tl.maximum(length - num_new + (0 if HAS_MASKS else first_token) + 1 - window, 0) + kv_tile * size
        end = tl.minimum(start + size, length - num_new + tl.minimum(first_token + TOKENS, num_new))
        seen, own = (position - window + 1, position), None
        if HAS_MASKS:
            # k mask tokens for each real token come after all real ones; a group sees the keys of its real token, and
            # its own.
            k_masks = tl.load(num_masks + request)
            num_real = num_new // (k_masks + 1)
            after = token - num_real
            is_mask = after >= 0
            group = tl.where(is_mask, after // tl.maximum(k_masks, 1), token)
            last_real = length - num_new + group
            first_own = tl.where(is_mask, length - num_new + num_real + group * k_masks, position + 1)
            in_text = tl.where(is_mask, last_real + 1 + after % tl.maximum(k_masks, 1), position)
            seen, own = (in_text - window + 1, last_real), (first_own, position)
        queries = tl.load(
            q + (row * q_row_stride + head * q_head_stride)[:, None] + d[None, :], mask=is_row[:, None], other=0.0
        )
        cache = (keys, values, k_scales, v_scales)
        if copied is None:
            where = (tables + tl.load(table_starts + request), kv_head, BLOCK_SIZE, HKV, D)
        else:
            where = (key_row, num_copied + key_row, kv_head * D)  # type: ignore[assignment]
        maximum, total, weighted = attend_to_keys(
            queries, cache, copied, where, kv_head, start, end, seen, own, scale, softcap, TILE
        )
        result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]

        first_state = tl.load(output_indptr + row, mask=is_row, other=0)
        is_split = tl.load(output_indptr + row + 1, mask=is_row, other=0) > first_state  # the same in all rows
        result_row = row * (HKV * GROUP) + head
        tl.store(out + result_row[:, None] * D + d[None, :], result, mask=(is_row & ~is_split)[:, None])
        state = (first_state + kv_tile).to(tl.int64) * (HKV * GROUP) + head
        tl.store(partial + state[:, None] * D + d[None, :], result, mask=(is_row & is_split)[:, None])
        tl.store(partial_log + state, maximum + tl.log2(total), mask=is_row & is_split)


def planned_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    table_starts: torch.Tensor,
    lengths: torch.Tensor,
    plan: DevicePlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    num_masks: torch.Tensor | None = None,
    tiling: PrefillTiling,
    copies: tuple[bool, bool] = (True, True),
    workspace: PlannedWorkspace,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`shared.ops.attention.naive_attention` of each sequence's new tokens over a paged KV cache.

    Args:
        q: ``[T, Hq, D]``, the new tokens of all sequences end to end; rows and heads may be strided.
        keys, values, tables, table_starts, k_scales, v_scales, scale, window, softcap: as
            :func:`shared.kernels.attention.planned_attention.planned_decode`.
        lengths: int32 ``[B]``, the tokens of each sequence, the new ones included; must equal the planned lengths.
        plan: from :func:`shared.attention.plan.plan_prefill`, with the same window and the tiling's tokens per tile.
        num_masks: int32 ``[B]``, mask tokens for each real token of a sequence, fewer than the window; they come after
            its real ones (phase 11.1). The plan must have ``has_masks``. None: there are none. Only kernels take it.
        tiling: from :func:`shared.kernels.attention.planned_tiling.prefill_tiling`.
        copies: for a tiling that copies keys: whether some requests' keys are copied, and whether some are not.
        out: output buffer, ``[T, Hq, D]`` contiguous; None: allocated.

    Returns:
        ``[T, Hq, D]`` in the dtype of q. Raises ValueError for a plan that does not fit the launch.
    """
    T, Hq, D = q.shape
    _, block_size, Hkv, _ = keys.shape
    group = Hq // Hkv
    if out is None:
        out = torch.empty(T, Hq, D, dtype=q.dtype, device=q.device)
    memory = (keys, values, tables, table_starts, lengths)
    if not launches(q):
        if num_masks is not None:
            raise ValueError("mask tokens need a GPU here; the op is shared.tracks.multi_token.ops.masked_attention")
        num_new = plan.query_indptr.diff().tolist()
        of_sequences = (*memory[:3], table_starts.tolist(), lengths.tolist(), num_new)
        return attend_by_sequence(q, *of_sequences, scale, window, softcap, out, k_scales, v_scales)
    if T == 0:
        return out
    workspace.check(plan)
    if window is not None and workspace.copied is not None and not workspace.copied.has_windows:
        raise ValueError(f"the matrix of copied keys has no tiles of zeros, which a window of {window} needs")
    if plan.num_rows != T or plan.tokens_per_tile != tiling.tokens(group):
        raise ValueError(
            f"the plan is of {plan.num_rows} tokens in tiles of {plan.tokens_per_tile}, and there are {T} in tiles of "
            f"{tiling.tokens(group)}"
        )
    window = NO_WINDOW if window is None else window
    scale, softcap = in_base_2(scale, softcap)
    first_rows: torch.Tensor | None = None
    launched: list[PrefillTiling | CopiedTiling] = [tiling]
    copied, copied_tiling = workspace.copied, tiling.copied
    if copied is not None and copied_tiling is not None and copies[0]:
        copy_keys(*memory, plan.query_indptr, window, copied, copied_tiling.tile)
        first_rows, launched = copied.first_rows, [tiling] * copies[1]
        if copied_tiling.is_specialized:
            if softcap is not None or num_masks is not None or k_scales is not None:
                raise ValueError("specialized warps take no softcap, no mask tokens and no scales of keys")
            specialized_prefill(
                q, copied, lengths, plan, scale=scale, window=window, tiling=copied_tiling, workspace=workspace, out=out
            )
        else:
            launched = [copied_tiling, *launched]
    for cut in launched:
        tiles = None if copied is None or cut is tiling else copied.tiles(cut.tile, D)
        launch(
            planned_prefill_kernel, (Hkv, plan.capacity),
            q, *memory, k_scales, v_scales, num_masks, tiles, 0 if copied is None else copied.num_rows, first_rows,
            plan.num_items, plan.split_size, plan.request_indices, plan.query_tile_indices, plan.kv_tile_indices,
            plan.query_indptr, plan.output_indptr, out, workspace.partial, workspace.partial_log,
            scale, softcap, window, q.stride(0), q.stride(1),
            HAS_MASKS=num_masks is not None, BLOCK_SIZE=block_size, HKV=Hkv, GROUP=group, TOKENS=tiling.tokens(group),
            D=D, ROWS=max(DOT_ROWS, next_power_of_two(tiling.rows)), TILE=cut.tile,
            num_warps=cut.num_warps, num_stages=cut.num_stages,
        )  # fmt: skip
    if plan.is_split:
        merge_states(workspace.partial, workspace.partial_log, plan.output_indptr, out)
    return out
