"""Walks the bytes of tokens through the automaton of a row, one token per thread. Introduced in phase 12.

:mod:`shared.grammar.automata.automaton` defines the automaton and its scalar walk; :mod:`shared.grammar.tokens.pool`
packs its tables. Frames that a token pushes stay in registers; frames below them, which it pops, are read from the row.
The rare actions are guarded by a branch that all threads of a program take or skip together.

Invariant: the walk reads and never writes the row; :mod:`shared.grammar.tokens.device` defines the row's layout.
"""

from shared.grammar.automata.automaton import DIGITS_ENDED, MAX_BLANKS, MAX_DEPTH, SPACE_ENDED, UNBOUNDED
from shared.grammar.tokens import device
from shared.grammar.tokens.pool import HEADER
from shared.grammar.tokens.vocabulary import MAX_OPENED
from shared.kernels.launch import tl, triton

BASE, STATE = tl.constexpr(device.BASE), tl.constexpr(device.STATE)
FEWEST, MOST, BLANKS = tl.constexpr(device.FEWEST), tl.constexpr(device.MOST), tl.constexpr(device.BLANKS)
HEIGHT, SEEN = tl.constexpr(device.HEIGHT), tl.constexpr(device.SEEN)
FRAMES, SEENS = tl.constexpr(device.FRAMES), tl.constexpr(device.SEENS)
KEPT, ROW = tl.constexpr(device.KEPT), tl.constexpr(device.ROW)
DEPTH = tl.constexpr(MAX_DEPTH)
MOST_BLANKS = tl.constexpr(MAX_BLANKS)
ENDED = tl.constexpr(SPACE_ENDED)
LAST_DIGIT = tl.constexpr(DIGITS_ENDED)
ENDLESS = tl.constexpr(UNBOUNDED)
COLUMNS = tl.constexpr(HEADER)
assert MAX_OPENED == 4, "the walk has registers for four frames"


@triton.jit
def load_set(pointers, mask):
    """64-bit sets, each made from two numbers."""
    low = tl.load(pointers, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
    return (tl.load(pointers + 1, mask=mask, other=0).to(tl.int64) << 32) | low


@triton.jit
def count_bits(sets):
    sets = sets - ((sets >> 1) & 0x5555555555555555)
    sets = (sets & 0x3333333333333333) + ((sets >> 2) & 0x3333333333333333)
    sets = (sets + (sets >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((sets * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def any_of(lanes):
    return tl.max(lanes.to(tl.int32), 0) > 0


@triton.jit
def load_configuration(grammar, row):
    """Where a walk begins: the offset of the state's row in the table, the state's kind of freedom, the counters
    fewest, most, blanks and seen, and the height of the stack.
    """
    state = tl.load(row + STATE) * tl.load(grammar)
    free = (tl.load(grammar + tl.load(grammar + 1) + state) >> 1) & 3
    low = tl.load(row + SEEN).to(tl.int64) & 0xFFFFFFFF
    seen = (tl.load(row + SEEN + 1).to(tl.int64) << 32) | low
    return state, free, tl.load(row + FEWEST), tl.load(row + MOST), tl.load(row + BLANKS), seen, tl.load(row + HEIGHT)


@triton.jit
def walk(grammar, table, row, state, free, fewest, most, blanks, seen, below, text, start, length, plain_from, chars):
    """Walk tokens ``[BLOCK]`` from the configuration of a row.

    Args:
        grammar: offset of the row's grammar tables.
        table: offset of its table of states.
        state, …, below: from :func:`load_configuration`.
        text, start, length: the bytes of each token, followed by a zero; a length of 0 means no token.
        plain_from: the byte from which each token is plain, so that a free state allows it.
        chars: the characters that begin in it.

    Returns:
        Whether each token is allowed, and where the walk led: state, fewest, most, blanks, seen, the number of the
        row's frames that are left, the number that the token pushed, and these frames with the keys below them.
    """
    zero = length * 0
    state = zero + state
    free = zero + free
    fewest = zero + fewest
    most = zero + most
    blanks = zero + blanks
    below = zero + below
    seen = zero.to(tl.int64) + seen
    own = zero
    frame0, frame1, frame2, frame3 = zero, zero, zero, zero
    seen0, seen1, seen2, seen3 = seen, seen, seen, seen
    is_read = length < 0
    is_live = length > 0
    left = chars  # characters that begin from here on
    bytes_from = text + start
    byte = tl.load(bytes_from).to(tl.int32)
    # a byte is loaded two steps ahead, and its column one step ahead, so nothing waits
    ahead = tl.load(bytes_from + 1).to(tl.int32)
    column = tl.load(grammar + COLUMNS + byte)
    d = tl.full([], 0, tl.int32)
    reached = tl.full([], 1, tl.int32)
    while reached > 0:
        later = tl.load(bytes_from + d + 2).to(tl.int32)
        next_column = tl.load(grammar + COLUMNS + ahead)
        is_first = (byte & 0xC0) != 0x80  # of a character; also after the token's end
        leaves = is_live & is_first & (tl.where(free > 0, plain_from, length) <= d)
        is_read = is_read | (leaves & ((free != 2) | (left <= most)))
        is_live = is_live & (leaves == 0)
        left -= is_first.to(tl.int32)
        entry = tl.load(table + (state + column), mask=is_live, other=-1)
        is_live = is_live & (entry >= 0)
        action = (entry >> 2) & 7
        argument = entry >> 5
        # 0: all have ended; 1: all moved by GOTO; 2: some by COUNT
        reached = tl.max(tl.where(is_live, action + 1, 0), 0)
        moves = is_live & (action == 0)
        if reached > 1:
            is_count = is_live & (action == 1)
            is_live = is_live & ((is_count == 0) | (most > 0))
            fewest = tl.where(is_count, tl.maximum(fewest - 1, 0), fewest)
            most = tl.where(is_count & (most != ENDLESS), most - 1, most)
            moves = is_live & (action <= 1)
        state = tl.where(moves, argument, state)
        free = tl.where(moves, entry & 3, free)
        blanks = tl.where(moves, 0, blanks)
        if reached > 2:
            # BLANK
            is_blank = is_live & (action == 6)
            is_digit = (byte >= 48) & (byte <= 57)
            digits = tl.maximum(blanks, ENDED) + 1
            run = tl.where(blanks > ENDED, 0, blanks)
            starts_run = (run == 0) & ((byte == 32) | (byte == 10))
            extends = (run > 0) & (run <= MOST_BLANKS) & ((byte == 32) | (byte == 9))
            counts = is_digit & (digits <= LAST_DIGIT)
            is_live = is_live & ((is_blank == 0) | starts_run | extends | counts)
            following = tl.where(is_digit, digits, tl.where(extends, run + 1, tl.where(byte == 32, ENDED, 1)))
            blanks = tl.where(is_blank, following, blanks)
            state = tl.where(is_blank, argument, state)
            free = tl.where(is_blank, 0, free)
            # PUSH
            is_push = is_live & (action == 2)
            if any_of(is_push):
                push = grammar + tl.load(grammar + 2) + 6 * argument
                depth = tl.load(push + 4, mask=is_push, other=0)
                is_push = is_push & (below + own + depth <= DEPTH) & (own < 4)
                is_live = is_live & ((action != 2) | is_push)
                frame = tl.load(push + 1, mask=is_push, other=0)
                frame0 = tl.where(is_push & (own == 0), frame, frame0)
                frame1 = tl.where(is_push & (own == 1), frame, frame1)
                frame2 = tl.where(is_push & (own == 2), frame, frame2)
                frame3 = tl.where(is_push & (own == 3), frame, frame3)
                seen0 = tl.where(is_push & (own == 0), seen, seen0)
                seen1 = tl.where(is_push & (own == 1), seen, seen1)
                seen2 = tl.where(is_push & (own == 2), seen, seen2)
                seen3 = tl.where(is_push & (own == 3), seen, seen3)
                own = own + is_push.to(tl.int32)
                state = tl.where(is_push, tl.load(push, mask=is_push, other=0), state)
                fewest = tl.where(is_push, tl.load(push + 2, mask=is_push, other=0), fewest)
                most = tl.where(is_push, tl.load(push + 3, mask=is_push, other=0), most)
                free = tl.where(is_push, tl.load(push + 5, mask=is_push, other=0), free)
                seen = tl.where(is_push, 0, seen)
                blanks = tl.where(is_push, 0, blanks)
            # POP and CHOOSE
            is_pop = is_live & (action == 3)
            is_choice = is_live & (action == 7)
            if any_of(is_pop | is_choice):
                is_pop = is_pop & (fewest == 0) & (below + own > 0)
                is_judged = is_pop | is_choice
                pop = grammar + tl.load(grammar + 4) + 4 * argument
                clauses = grammar + tl.load(grammar + 5)
                colour = tl.load(pop, mask=is_judged, other=0)
                first = tl.load(pop + 1, mask=is_judged, other=0)
                last = tl.load(pop + 2, mask=is_judged, other=0)
                for n in range(tl.max(last - first, 0)):
                    is_clause = is_judged & (first + n < last)
                    clause = clauses + 10 * (first + n)
                    trigger = load_set(clause + 2, is_clause)
                    num_seen = count_bits(seen & load_set(clause + 4, is_clause))
                    least = tl.load(clause + 6, mask=is_clause, other=0)  # the high half is zero
                    is_broken = is_clause & ((seen & trigger) == trigger) & (num_seen < least)
                    bits = tl.load(clause, mask=is_broken, other=0)
                    colour = colour & ~bits
                    seen = seen | load_set(clause + 8, is_broken)
                is_own = own > 0
                at = below - 1
                from_row = is_pop & (is_own == 0)
                frame = tl.load(row + FRAMES + at, mask=from_row, other=0)
                frame = tl.where(own == 1, frame0, frame)
                frame = tl.where(own == 2, frame1, frame)
                frame = tl.where(own == 3, frame2, frame)
                frame = tl.where(own == 4, frame3, frame)
                frame = tl.where(is_choice, tl.load(pop + 3, mask=is_choice, other=0), frame)
                restored = load_set(row + SEENS + 2 * at, from_row)
                restored = tl.where(own == 1, seen0, restored)
                restored = tl.where(own == 2, seen1, restored)
                restored = tl.where(own == 3, seen2, restored)
                restored = tl.where(own == 4, seen3, restored)
                returns = grammar + tl.load(grammar + 3)
                back = tl.load(returns + frame + colour, mask=is_judged, other=-1)
                is_judged = is_judged & (back >= 0)
                is_pop = is_pop & is_judged
                is_live = is_live & (((action != 3) & (action != 7)) | is_judged)
                below = below - (is_pop & (is_own == 0)).to(tl.int32)
                own = own - (is_pop & is_own).to(tl.int32)
                state = tl.where(is_judged, back >> 2, state)
                free = tl.where(is_judged, back & 3, free)
                seen = tl.where(is_pop, restored, seen)
                fewest = tl.where(is_pop, 0, fewest)
                most = tl.where(is_pop, ENDLESS, most)
                blanks = tl.where(is_judged, 0, blanks)
            # KEY and GUARD
            is_key = is_live & ((action == 4) | (action == 5))
            if any_of(is_key):
                is_guard = is_live & (action == 5)
                is_key = is_live & (action == 4)
                key = grammar + tl.load(grammar + 6) + 6 * argument
                missing = load_set(key + 2, is_key) & ~seen
                is_bounded = tl.load(key + 4, mask=is_key, other=0) != 0
                is_refused = is_key & is_bounded & (missing == 0)
                seen = tl.where(is_key, seen | (missing & -missing), seen)
                guard = grammar + tl.load(grammar + 7) + 8 * argument
                present = (seen | load_set(guard + 4, is_guard)) & load_set(guard + 2, is_guard)
                limit = tl.load(guard + 6, mask=is_guard, other=1)
                is_refused = is_refused | (is_guard & (count_bits(present) >= limit))
                is_live = is_live & (is_refused == 0)
                following = tl.load(key, mask=is_key, other=0) + tl.load(guard, mask=is_guard, other=0)
                state = tl.where(is_key | is_guard, following, state)
                free = tl.where(is_key | is_guard, 0, free)
                blanks = tl.where(is_key | is_guard, 0, blanks)
        byte = ahead
        ahead = later
        column = next_column
        d += 1
    needed = tl.load(table + state, mask=is_read, other=0) >> 3
    is_allowed = is_read & (below + own + needed <= DEPTH)
    return (
        is_allowed, state, fewest, most, blanks, seen, below, own,
        frame0, frame1, frame2, frame3, seen0, seen1, seen2, seen3,
    )  # fmt: skip
