"""A grammar without the bytes that a vocabulary cannot spell. Introduced in phase 12.

Some vocabularies have no token for a few bytes, such as control characters and the first bytes of rare characters. Then
no text may require such bytes: if only they could continue a text, it could not be finished.
"""

import itertools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.automaton import ACTION_BITS, REFUSED, Action, Automaton
from shared.grammar.limits import Budget, GrammarError


def spellable(automaton: Automaton, is_usable: NDArray[np.bool_], budget: Budget) -> Automaton:
    """The automaton of the texts that consist of usable bytes only, bool ``[256]``. Raises GrammarError if such a text
    could reach a state without an end, or as :class:`Budget` does.
    """
    dead = [
        byte
        for byte in np.flatnonzero(~is_usable).tolist()
        if (automaton.table[:, automaton.columns[byte]] != REFUSED).any()
    ]
    if not dead:
        return automaton
    num_columns = automaton.table.shape[1]
    columns = automaton.columns.copy()
    columns[dead] = num_columns
    refused = np.full((automaton.num_states, 1), REFUSED, np.int32)
    found = replace(automaton, columns=columns, table=np.append(automaton.table, refused, axis=1))
    used = np.unique(columns)
    if len(used) <= num_columns:  # some columns contained only these bytes
        found = replace(found, columns=np.searchsorted(used, columns).astype(np.uint8), table=found.table[:, used])
    budget.spend(found.num_states + 2 * int((found.table != REFUSED).sum()))
    if not _ends_everywhere(found):
        shown = " ".join(f"{byte:02X}" for byte in dead)
        raise GrammarError(
            f"A text of the grammar may need a byte that this model's vocabulary cannot spell ({shown})."
        )
    return found


def _ends_everywhere(automaton: Automaton) -> bool:
    """Whether each reachable state can reach the end of its rule."""
    table = automaton.table
    states, columns = np.nonzero(table != REFUSED)
    entries = table[states, columns]
    actions, arguments = entries & (1 << ACTION_BITS) - 1, entries >> ACTION_BITS
    after: list[list[int]] = [[] for _ in range(automaton.num_states)]  # where a state continues within its rule
    inside: list[list[int]] = [[] for _ in range(automaton.num_states)]  # where the rules that it opens begin
    is_ended = automaton.is_final.copy()
    is_ended[states[actions == Action.POP]] = True
    frames = sorted({*automaton.pushes[:, 1].tolist(), *automaton.pops[:, 3].tolist(), len(automaton.returns)})
    following = dict(itertools.pairwise(frames))
    for state, action, argument in zip(states.tolist(), actions.tolist(), arguments.tolist(), strict=True):
        match Action(action):
            case Action.PUSH:
                first, frame = automaton.pushes[argument, :2].tolist()
                inside[state].append(first)
                after[state] += [to for to in automaton.returns[frame : following[frame]].tolist() if to != REFUSED]
            case Action.KEY:
                after[state].append(int(automaton.keys[argument, 0]))
            case Action.GUARD:
                after[state].append(int(automaton.guards[argument, 0]))
            case Action.CHOOSE:
                frame = int(automaton.pops[argument, 3])
                after[state] += [to for to in automaton.returns[frame : following[frame]].tolist() if to != REFUSED]
            case Action.GOTO | Action.COUNT | Action.BLANK:
                after[state].append(argument)
            case Action.POP:
                pass
    reached = {0}
    waiting = [0]
    while waiting:
        state = waiting.pop()
        for other in {*after[state], *inside[state]} - reached:
            reached.add(other)
            waiting.append(other)
    before: list[list[int]] = [[] for _ in range(automaton.num_states)]
    for state, others in enumerate(after):
        for other in others:
            before[other].append(state)
    waiting = np.flatnonzero(is_ended).tolist()
    while waiting:
        for state in before[waiting.pop()]:
            if not is_ended[state]:
                is_ended[state] = True
                waiting.append(state)
    return bool(is_ended[list(reached)].all())
