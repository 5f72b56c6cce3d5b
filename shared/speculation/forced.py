"""Drafts that a grammar forces: the text that must come next. Introduced in phase 12.

If a schema allows only one continuation, for example after the first letter of a long key, the text is known but its
tokens are not: a model may tokenize it in several ways. So the jump-forward text is tokenized, and its tokens are
ordinary drafts, which the model accepts or replaces. Appending them as outputs could impose a tokenization that the
model never uses.

The other drafter proposes first. Its drafts are kept as far as the grammar allows them, and the text that the grammar
forces from there follows. Forced text needs no estimate, so a request gets drafts for all of it, whatever was accepted
before.

Whitespace between the parts of a document is optional, so strictly speaking nothing is forced there. This module
assumes no space before a colon or a comma and one space after a colon, as ``json.dumps`` and most models write.
Elsewhere the forced text ends where whitespace may follow.

Invariant: all drafts of a request are allowed by its grammar, each after those before it.
"""

from dataclasses import replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch

from shared.cache.pool.interface import CachePoolProtocol
from shared.cache.view.interface import MakeMemory
from shared.engine.request import Request, RequestStatus
from shared.engine.runner import MakeRunner
from shared.grammar.automata.automaton import ACTION_BITS, REFUSED, Action, Automaton, Configuration
from shared.grammar.constraint import Constraint
from shared.grammar.tokens.fsm import TokenFSM
from shared.grammar.tokens.vocabulary import SPECIAL_BYTE
from shared.scheduling.schedule import Schedule
from shared.scheduling.step_costs import StepCosts
from shared.speculation.drafter import Drafter, PendingDrafts
from shared.text.tokenizer import Tokenizer

MOST_BYTES = 256
"""Of a forced text."""
MOST_TRIED = 8
"""Maximum number of bytes that a state may allow for the counters to be checked for leaving only one of them."""
COLON = ord(":")


class ForcedText:
    """The forced text of one grammar; caches the bytes of its states."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self._known: dict[int, tuple[bytes, bool]] = {}

    def after(self, now: Configuration, before: int = 0) -> bytes:
        """The bytes that must follow, up to ``MOST_BYTES``; ``before`` is the byte before them."""
        text = bytearray()
        configuration: Configuration | None = now
        while configuration is not None and len(text) < MOST_BYTES and not self.automaton.is_end(configuration):
            found, has_blank = self._bytes_of(configuration.state)
            if has_blank and configuration.blanks == 0 and (text[-1] if text else before) == COLON:
                found = b" "
            following = {byte: self.automaton.walk(configuration, (byte,)) for byte in found}
            possible = [byte for byte, after in following.items() if after is not None]
            if len(possible) != 1 or (has_blank and possible[0] not in b" :,"):
                break
            text += bytes(possible)
            configuration = following[possible[0]]
        return bytes(text)

    def _bytes_of(self, state: int) -> tuple[bytes, bool]:
        """The non-blank bytes that a state allows (none if there are many), and whether it allows blanks."""
        if state not in self._known:
            entries = self.automaton.table[state][self.automaton.columns]
            is_blank = (entries != REFUSED) & (entries & (1 << ACTION_BITS) - 1 == Action.BLANK)
            is_blank[list(b"0123456789")] = False
            found = ((entries != REFUSED) & ~is_blank).nonzero()[0].tolist()
            self._known[state] = bytes(found if len(found) <= MOST_TRIED else ()), bool(is_blank.any())
        return self._known[state]


class ForcedTextDrafter(Drafter):
    """Adds forced text to the drafts of another drafter."""

    def __init__(self, drafter: Drafter, tokenizer: Tokenizer) -> None:
        self.drafter, self.tokenizer = drafter, tokenizer
        self.distributions: dict[tuple[int, int], torch.Tensor] = {}
        self.grammars: WeakKeyDictionary[TokenFSM, ForcedText] = WeakKeyDictionary()
        self.spelled = lru_cache(maxsize=1 << 14)(self._spelled)

    def make_pool(
        self, model_pool: CachePoolProtocol, make_memory: MakeMemory, make_runner: MakeRunner, max_seq_len: int
    ) -> CachePoolProtocol:
        return self.drafter.make_pool(model_pool, make_memory, make_runner, max_seq_len)

    def propose(self, schedule: Schedule) -> None:
        for request in schedule.prompts.requests:  # the next schedule may precede the commit of the prompt
            self._note(request)
        entries = list(schedule)
        for number, entry in enumerate(schedule):
            request, constraint = entry.request, entry.request.constraint
            request.num_forced_drafts = 0
            is_asking = entry.num_drafts and request.status is RequestStatus.RUNNING
            if is_asking and isinstance(constraint, Constraint):
                state = constraint.after(request.output_ids)
                forced = self._forced(constraint.fsm, state, request.last_token_id)[: entry.num_drafts]
                if len(forced) == entry.num_drafts:  # the other drafter need not guess
                    request.draft_ids, request.num_forced_drafts = list(forced), len(forced)
                    entries[number] = entry._replace(num_drafts=0)
        others = replace(schedule, entries=tuple(entries))
        self.drafter.propose(others)
        self.distributions.clear()
        self.distributions.update(self.drafter.distributions)
        if any(num_drafts and request.constraint is not None for request, *_, num_drafts, _, _ in others):
            self.drafter.collect()  # the grammar is checked for each draft
        for request, *_, num_drafts, _, _ in others:
            constraint = request.constraint
            if not num_drafts or not isinstance(constraint, Constraint) or request.status is not RequestStatus.RUNNING:
                continue
            now, before, kept = constraint.after(request.output_ids), request.last_token_id, 0
            for token_id in request.draft_ids:
                after = now and constraint.fsm.next_state(now, token_id)
                if after is None:
                    break
                now, before, kept = after, token_id, kept + 1
            forced = self._forced(constraint.fsm, now, before)[: num_drafts - kept]
            for index in range(kept, len(request.draft_ids)):
                self.distributions.pop((request.serial, len(request.output_ids) + index), None)
            request.draft_ids = [*request.draft_ids[:kept], *forced]
            request.num_forced_drafts = len(forced)

    def leave_drafts_in(self, pending: PendingDrafts) -> None:
        self.drafter.leave_drafts_in(pending)

    def collect(self) -> None:
        self.drafter.collect()

    def observe(self, schedule: Schedule) -> None:
        """Forced tokens are certain."""
        for request in schedule.requests:
            if request.output_ids and request.status is RequestStatus.RUNNING:
                self._note(request)

    @property
    def step_costs(self) -> StepCosts | None:
        return self.drafter.step_costs

    def num_tokens(self, num_drafts: int) -> int:
        return self.drafter.num_tokens(num_drafts)

    def _note(self, request: Request) -> None:
        """Count the drafts that are forced after a request's known tokens, if it wants drafts."""
        constraint = request.constraint
        if isinstance(constraint, Constraint) and request.params.use_speculative_decoding:
            state = constraint.after(request.output_ids)
            request.num_certain_drafts = len(self._forced(constraint.fsm, state, request.last_token_id))

    def _forced(self, fsm: TokenFSM, now: Configuration | None, before: int) -> tuple[int, ...]:
        """The tokens of the text that must follow; ``before`` is the token before them."""
        if now is None:
            return ()
        if fsm not in self.grammars:
            self.grammars[fsm] = ForcedText(fsm.automaton)
        last = self.tokenizer.token_bytes(before)[-1:]
        return self.spelled(self.grammars[fsm].after(now, last[0] if last else 0))

    def _spelled(self, forced: bytes) -> tuple[int, ...]:
        """The tokens of a text, up to the first special token or an incomplete last character."""
        text = forced.split(bytes([SPECIAL_BYTE]))[0].decode(errors="ignore")
        ids = self.tokenizer.encode(text, add_special_tokens=False) if text else []
        spelled = b"".join(map(self.tokenizer.token_bytes, ids))
        return tuple(ids) if spelled == text.encode() else ()
