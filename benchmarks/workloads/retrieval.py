"""What a model has to find again in a long context: a needle in text, or the value of a key. Introduced in phase 9.2.

Invariant: a case depends only on the tokenizer, the texts and its number.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from shared.text.tokenizer import Tokenizer

Case = tuple[list[int], list[int], list[int]]
"""The token ids of a context, of the question after it, and of the answer after that."""

NEEDLE, NEEDLE_QUESTION = "\n\nThe secret number of {} is {}.\n\n", "\n\nThe secret number of {} is"
PLACES = ("Lisbon", "the harbour", "Anna", "the red house", "Oslo", "the old library", "Peter", "the bakery")
PAIR, PAIR_QUESTION = "The {} has the number {}.\n", "\nThe {} has the number"
KEYS = """
apple river stone table garden window bridge candle forest mirror pencil basket ladder hammer pillow bottle engine
button carpet desert guitar helmet island jacket kettle lemon magnet needle orange parrot quilt rabbit saddle tunnel
violin wagon zebra anchor barrel camel dragon eagle feather ginger hazel ivory jungle kitten lantern marble napkin
oyster pepper radish salmon tomato turtle velvet walnut yogurt"""
NUM_PAIRS, NUM_ASKED = 40, 12


def needles(tokenizer: Tokenizer, around: Sequence[Path], num_context: int) -> Iterator[Case]:
    """Contexts with a number hidden at eight depths, the question for it, and the answer."""
    for number, place in enumerate(PLACES):
        text = tokenizer.encode(around[number % len(around)].read_text(encoding="utf-8"))[:num_context]
        at, secret = (number + 1) * num_context // (len(PLACES) + 2), str(1000 + 7919 * (number + 3) % 9000)
        needle = tokenizer.encode(NEEDLE.format(place, secret))
        body = [*text[:at], *needle, *text[at : num_context - len(needle)]]
        yield body, *asked(tokenizer, NEEDLE_QUESTION.format(place), secret)


def pairs(tokenizer: Tokenizer, num_context: int) -> Iterator[Case]:
    """Contexts of ``NUM_PAIRS`` keys with a number each, the question for one of them, and the answer."""
    for number in range(NUM_ASKED):
        drawn = random.Random(number)
        keys, numbers = (
            drawn.sample(KEYS.split(), NUM_PAIRS),
            [str(drawn.randrange(1000, 10000)) for _ in range(NUM_PAIRS)],
        )
        body = tokenizer.encode("".join(PAIR.format(*pair) for pair in zip(keys, numbers, strict=True)))
        which = (2 * number + 1) * NUM_PAIRS // (2 * NUM_ASKED)
        yield body[:num_context], *asked(tokenizer, PAIR_QUESTION.format(keys[which]), numbers[which])


def asked(tokenizer: Tokenizer, question: str, answer: str) -> tuple[list[int], list[int]]:
    """The ids of a question, and of the answer after it."""
    ids = tokenizer.encode(question)
    return ids, tokenizer.encode(f"{question} {answer}")[len(ids) :]
