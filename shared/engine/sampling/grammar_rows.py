"""The grammar states of a batch's requests, on the device that samples their tokens. Introduced in phase 12.

A request has the same row here as in the sampler's token counts (:mod:`shared.engine.sampling.penalty_tables`). Each
row is tagged with its request and the number of its outputs. On a mismatch the host replays the outputs and uploads the
state, so new requests, preempted requests and repeated steps need no special case. If the tag matches, nothing is
uploaded: two launches, recorded with the draw, advance the rows and compute their masks. Each row's mask has its own
memory, so the next step computes masks only for rows that are new in it.

A request with n drafts has n + 1 rows, one for each number of accepted drafts. After acceptance, each row advances by
the token sampled in it, and the next step continues from the row with the accepted drafts.

Invariants: a tagged row holds its request's state after exactly the tagged number of outputs; a row has no tag while a
draw is changing it; the mask of a row in ``masked`` matches its state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import numpy as np
import torch

from shared.engine.executor.staging import upload
from shared.engine.sampling.drawing import Edit
from shared.grammar.automata.automaton import Integers
from shared.grammar.constraint import Constraint
from shared.grammar.tokens.device import KEPT, ROW, GrammarTokens, pack_row
from shared.grammar.tokens.fsm import TokenFSM
from shared.grammar.tokens.pool import GrammarPool
from shared.kernels.sampling.grammar_advance import grammar_advance
from shared.kernels.sampling.grammar_mask import grammar_mask, remove_refused
from shared.sampling.sampler import SamplingRow
from shared.scheduling.schedule import NextRows

Keys = tuple[list[int], tuple[int, ...], list[int], list[bool]]
"""For some rows: table_rows, serials of their requests, numbers of outputs, and whether they have a grammar."""
_KEY = attrgetter("serial", "index", "constraint")
_NUM_DRAFTS = attrgetter("num_drafts")


@dataclass(frozen=True)
class Entered:
    """The m rows of a batch that have a grammar.

    Attributes:
        numbers: int32 ``[m]``, their indices in the batch.
        slots: int32 ``[m]``, the table row of each; its address depends only on m.
    """

    numbers: torch.Tensor
    slots: torch.Tensor


class GrammarRows:
    """The configurations of up to ``num_rows`` rows, with their masks; a :data:`shared.engine.sampling.drawing.Step`.

    Args:
        grammar_pool: the tables of the grammars, on the device.
    """

    def __init__(self, num_rows: int, grammar_pool: GrammarPool) -> None:
        self.grammar_pool = grammar_pool
        self.upload = partial(upload, device=grammar_pool.tables.device)
        self.rows = torch.zeros(num_rows, ROW, dtype=torch.int32, device=grammar_pool.tables.device)
        self.entered: dict[int, tuple[int, int]] = {}  # by row: the request's serial and its number of outputs
        self.next: Keys | None = None  # used if the same rows sample again
        self.run: tuple[int, int] | None = None  # the rows' run, and the tokens since it began
        self.num_after = 0  # the tokens since the indices of ``next``
        self.held: Keys | None = None  # ``next``, while a draw changes the rows of the same run
        self.free_run = -1  # a run without grammars
        self.grammars: dict[int, TokenFSM] = {}  # by base; read only if no kernel runs
        self.tokens: GrammarTokens | None = None  # of the first grammar's vocabulary, which all grammars share
        self.keys: Keys = [], (), [], []
        self.has_drafts = False
        self.words = torch.empty(0)  # int32 [num_rows, tokens.num_words], the bits of the tokens that each row allows
        self.masked: set[int] = set()
        self.chosen = self.rows.new_zeros(2 * num_rows)  # for the rows that were entered: row numbers, then slots
        nothing = torch.empty(0)
        self.last: tuple[tuple[list[int], list[int]], Entered] = ([], []), Entered(nothing, nothing)

    def __call__(self, rows: Sequence[SamplingRow], table_rows: Sequence[int]) -> Edit | None:
        """Mask the rows with a grammar, and advance them by the sampled tokens."""
        entered = self.enter(rows, table_rows)
        if entered is None:
            return None
        apply, follow = partial(self.remove_refused, entered), partial(self.follow, entered)
        if self.has_drafts:
            return Edit(apply, True, follow=follow)
        return Edit(apply, True, len(entered.slots), partial(self.advance, entered), follow)

    def enter(self, rows: Sequence[SamplingRow], table_rows: Sequence[int]) -> Entered | None:
        """Compute the masks of the rows with a grammar, after the outputs and drafts of each; None if there are none.

        Args:
            table_rows: the table row of each row; those of a request are adjacent.
        """
        run = (rows.run.number, rows.num_after) if isinstance(rows, NextRows) else None
        if run is not None and run[0] == self.free_run:
            return None
        if self.next is not None and run is not None and run == self.run:  # each row follows its own token
            self.held, self.next = self.next, None
            return self.last[1]
        self.keys = self._keys(rows, table_rows)
        table_rows, expected, self.next = self.keys[0], self._expected(), None
        self.run, self.held = run, None
        if expected == self.keys and not any(map(_NUM_DRAFTS, rows)):  # each row follows its own token
            return self.last[1]
        for table_row, serial, index, has_grammar in zip(*(expected or ((), (), (), ())), strict=True):
            if has_grammar:
                self.entered[table_row] = serial, index
        if True not in self.keys[-1]:
            self.free_run = -1 if run is None else run[0]
            return None
        sent, moved, chains = dict[int, Integers](), dict[int, int](), dict[int, list[int]]()
        numbers, slots = list[int](), list[int]()
        for number, (row, table_row) in enumerate(zip(rows, table_rows, strict=True)):
            constraint = row.constraint
            if not isinstance(constraint, Constraint):
                self.entered.pop(table_row, None)
                continue
            if row.num_drafts == 0:
                known = self._forget(table_row, row.serial).get(row.index)
                if known is None:
                    state = constraint.after(row.output_ids)
                    if state is None:  # after the end: the token sampled here is dropped
                        continue
                    assert constraint.base is not None
                    # older rows of the request may follow a draft that was rejected
                    self.entered = {at: tag for at, tag in self.entered.items() if tag[0] != row.serial}
                    sent[table_row] = pack_row(constraint.base, state)
                    self.grammars[constraint.base] = constraint.fsm
                elif known != table_row:
                    moved[table_row] = known
                chains[table_row] = []
            if table_row - row.num_drafts in chains:
                self.entered.pop(table_row, None)  # also another request's, which has left the row
                numbers.append(number)
                slots.append(table_row)
                if row.draft_id is not None:
                    chains[table_row - row.num_drafts].append(row.draft_id)
        if not numbers:
            return None
        self._find(sent, moved, chains, numbers, slots)
        return self.last[1]

    def remove_refused(self, entered: Entered, logits: torch.Tensor) -> torch.Tensor:
        """Set the logits ``[n, V]`` of refused tokens to -inf, in place."""
        assert self.tokens is not None
        remove_refused(self.words, entered.slots, entered.numbers, self.tokens, logits)
        return logits

    def advance(self, entered: Entered, ids: torch.Tensor) -> None:
        """Advance each entered row by its sampled token and compute the next masks, unless some rows follow drafts: few
        of those continue.

        Args:
            ids: int64 ``[n]``, one for each row.
        """
        chosen = None if len(entered.slots) == len(ids) else entered.numbers
        self._walk(entered.slots, entered.slots, ids, chosen)
        if not self.has_drafts:
            self._mask(entered.slots)

    def follow(self, entered: Entered, ids: torch.Tensor) -> None:
        """Tag the rows after their advance. Rows after drafts advance here: their ids are those after acceptance."""
        if self.has_drafts:
            self.advance(entered, ids)
        if self.run is not None:
            self.run = self.run[0], self.run[1] + 1
        if self.held is not None:
            self.next, self.held, self.num_after = self.held, None, self.num_after + 1
            return
        (numbers, slots), _ = self.last
        self.masked = set() if self.has_drafts else set(slots)
        table_rows, serials, indices, has_grammar = self.keys
        if len(numbers) < has_grammar.count(True):
            chosen = set(numbers)
            has_grammar = [number in chosen for number in range(len(table_rows))]
            self.run = None
        self.next, self.num_after = (table_rows, serials, indices, has_grammar), 1

    def forget(self) -> None:
        """Discard all rows: they follow drafts, some of which were not accepted."""
        self.entered.clear()
        self.next = self.held = None

    def _expected(self) -> Keys | None:
        """``next``, with the indices that its rows have now."""
        if self.next is None:
            return None
        table_rows, serials, indices, has_grammar = self.next
        return table_rows, serials, [index + self.num_after for index in indices], has_grammar

    def _keys(self, rows: Sequence[SamplingRow], table_rows: Sequence[int]) -> Keys:
        serials, indices, constraints = zip(*map(_KEY, rows), strict=True)
        return list(table_rows), serials, list(indices), [constraint is not None for constraint in constraints]

    def _forget(self, table_row: int, serial: int) -> dict[int, int]:
        """Discard the rows of the request that samples in ``table_row``; returns their indices by number of outputs."""
        found: dict[int, int] = {}
        while self.entered.get(table_row, (None, 0))[0] == serial:
            found[self.entered.pop(table_row)[1]] = table_row
            table_row += 1
        return found

    def _find(
        self,
        sent: dict[int, Integers],
        moved: dict[int, int],
        chains: dict[int, list[int]],
        numbers: list[int],
        slots: list[int],
    ) -> None:
        """Set the rows: ``sent`` comes from the host, ``moved`` from other rows; rows after drafts advance from
        these."""
        if self.tokens is None:
            vocabulary = next(iter(self.grammars.values())).vocabulary
            self.tokens = GrammarTokens.of(vocabulary, self.rows.device)
            self.words = self.rows.new_zeros(len(self.rows), self.tokens.num_words)
        if moved:
            targets, sources = self.upload(torch.tensor([list(moved), list(moved.values())])).unbind()
            self.rows[targets] = self.rows[sources]
            self.rows[:, KEPT].index_fill_(0, targets, 0)  # their mask bits belong to other rows
        if sent:
            configurations = self.upload(torch.from_numpy(np.stack(list(sent.values()))))
            self.rows[self.upload(torch.tensor(list(sent)))] = configurations
        chains = {table_row: drafts for table_row, drafts in chains.items() if drafts}
        self.has_drafts = bool(chains)
        self.masked.difference_update(sent, moved)
        if chains:
            self.masked.clear()
            most = max(map(len, chains.values()))
            ids = torch.tensor([[*drafts, *[0] * (most - len(drafts))] for drafts in chains.values()])
            first = self.upload(torch.tensor(list(chains), dtype=torch.int32))
            self._walk(first, first + 1, self.upload(ids))
        if self.last[0] != (numbers, slots):
            m = len(slots)
            self.last = ([], []), self.last[1]
            self.chosen[: 2 * m].copy_(self.upload(torch.tensor([*numbers, *slots], dtype=torch.int32)))
            self.last = (numbers, slots), Entered(self.chosen[:m], self.chosen[m : 2 * m])
        due = [slot for slot in slots if slot not in self.masked]
        all_slots = self.last[1].slots
        if due:
            self._mask(all_slots if due == slots else self.upload(torch.tensor(due, dtype=torch.int32)))
            self.masked.update(due)

    def _mask(self, slots: torch.Tensor) -> None:
        """Compute the masks of rows."""
        assert self.tokens is not None
        grammar_mask(self.grammar_pool.tables, self.tokens, self.rows, slots, self.words, self.grammars)

    def _walk(
        self, sources: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor, chosen: torch.Tensor | None = None
    ) -> None:
        assert self.tokens is not None
        arguments = (self.grammar_pool.tables, self.tokens, self.rows, sources, targets, ids, self.grammars)
        grammar_advance(*arguments, chosen)
