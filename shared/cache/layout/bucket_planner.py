"""Attention plans for captured steps. Introduced in phase 9.

A captured launch has a fixed grid, tiling and number of rows; a program reads from the plan what it computes. So these
plans are made for the step's bucket, not for the step: the tiling is the bucket's, the arrays are as long as the
bucket's largest plan, padding has no items, and the merge is launched even if nothing is split.

In a mixed step the number of decoding sequences varies too, and a captured launch cannot begin at a row that varies.
So both launches get all rows. The decoding sequences are the first, so a decode item's sequence is its row; the rows of
the prompts begin after them, as their plan says. The last plan of prompts is kept: a step that verifies drafts (phase
11) has the same new tokens as the one before.

Invariant: a step that fits no bucket is planned as in phase 6.1.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared.attention.descriptor import AttentionPlan
from shared.attention.plan import plan_prefill
from shared.cache.layout.paged import PagedLayout
from shared.cache.layout.planned import AttentionPlanner, LayoutPlans, StepLaunches, StepPlans
from shared.cache.layout.slots import Integers
from shared.engine.batch import Batch
from shared.engine.executor.buckets import Bucket, Buckets
from shared.kernels.attention.planned_tiling import PrefillTiling


@dataclass(frozen=True)
class BucketPlanner(AttentionPlanner):
    """Plans the attention of captured steps."""

    buckets: Buckets = field(kw_only=True)
    last_prefill: dict[tuple[object, ...], dict[int | None, AttentionPlan]] = field(default_factory=dict, compare=False)
    """The plans of the last prompts, keyed by everything that they depend on."""

    def plan(self, num_new: Integers, lengths: Integers, num_decoding: int) -> StepPlans:
        B, n = len(lengths), num_decoding
        bucket = self.buckets.smallest(B, B if n == B else int(num_new.sum()))
        if bucket is None:
            return StepPlans(self._plan_decode(lengths[:n]), self._plan_prefill(num_new[n:], lengths[n:]))
        decode = self._plan_decode(lengths[:n], bucket.num_sequences)
        return StepPlans(decode, {} if bucket.is_decode else self._plan_mixed(num_new[n:], lengths[n:], n, bucket))

    def _plan_mixed(
        self, num_new: Integers, lengths: Integers, num_decoding: int, bucket: Bucket
    ) -> dict[int | None, AttentionPlan]:
        tiling = self.bucket_prefill_tiling(bucket)
        grid = tiling.grid(self.config.num_kv_heads, self.device)
        tokens = tiling.tokens(self.config.num_heads // self.config.num_kv_heads)
        is_exact = self.windows != (None,) or bool((num_new > tokens).any())  # the plan depends on every key
        seen = lengths if is_exact else -(-lengths // grid.unit)
        key = bucket, num_decoding, num_new.tobytes(), seen.tobytes()
        plans = self.last_prefill.get(key)
        if plans is not None:
            return plans
        sizes: dict[str, Any] = {"num_rows": bucket.num_tokens, "num_requests": bucket.num_sequences}
        sizes |= {"capacity": grid.capacity(bucket.num_tokens // tokens + bucket.num_sequences), "is_captured": True}
        sizes |= {"tokens_per_tile": tokens, "first_row": num_decoding, "has_masks": self.has_masks}
        plans = {window: plan_prefill(num_new, lengths, grid, window=window, **sizes) for window in self.windows}
        self.last_prefill.clear()
        self.last_prefill[key] = plans
        return plans

    def launches(self, num_tokens: int, num_sequences: int, num_decoding: int) -> StepLaunches:
        T, B, n = num_tokens, num_sequences, num_decoding
        bucket = self.buckets.smallest(B, T)
        if bucket is None:
            decode = self.decode_tiling(n) if n else None
            return StepLaunches(n, n, decode, self.prefill_tiling(T - n, B - n) if n < B else None)
        decode = self.decode_tiling(bucket.num_sequences)
        prefill = None if bucket.is_decode else self.bucket_prefill_tiling(bucket)
        return StepLaunches(bucket.num_sequences, 0, decode, prefill, is_captured=True)

    def bucket_prefill_tiling(self, bucket: Bucket) -> PrefillTiling:
        """The tiling of the prompts in a mixed bucket, for a single chunk that fills it."""
        return self.prefill_tiling(bucket.num_tokens, 1)

    def padding(self, bucket: Bucket, block_size: int) -> Batch:
        """A full batch for the capture of a bucket, which writes to no slot: new sequences, or a single prompt."""
        B, T = (bucket.num_tokens, bucket.num_tokens) if bucket.is_decode else (1, bucket.num_tokens)
        arrays = (np.arange(B), np.zeros(B, np.int64), np.full(B, T // B), np.full(T, -1))
        blocks = np.full(B, -(-T // B // block_size))  # of each sequence: block 0, whose content does not matter
        starts = np.append(0, blocks.cumsum())
        layout = PagedLayout(*arrays, tables=np.zeros(starts[-1], np.int32), table_starts=starts)
        return padding_batch(LayoutPlans.planned(layout, self))


def padding_batch(layout: PagedLayout) -> Batch:
    """The batch of new tokens that have this layout, without logits."""
    zeros, nothing = np.zeros(len(layout.slot_mapping), np.int64), np.zeros(0, np.int64)
    names = ("padding",) * len(layout.rows)
    return Batch(names, zeros, nothing, zeros, layout.num_new, nothing, nothing, layout)
