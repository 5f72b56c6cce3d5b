"""The exponents that a number may be written with, as steps from part to part. Introduced in phase 12.

A number is written with an exponent only where its size is then known: without restriction if its value does not
matter, and otherwise as Python writes the shortest form of a float, below 1e-4 or from 1e16 on. Exponents end at 307,
or at 99 after more than one digit, so that no number overflows the range of a float (``1E400`` is refused).
"""

ALL = "0123456789"
EXPONENTS = {
    "free": (("-", "minus"), ("+", "plus"), ("012", "two more"), ("3", "3"), ("456789", "one more")),
    "long": (("-", "minus"), ("+", "last but one"), (ALL, "one more")),
    "minus": ((ALL, "two more"),),
    "last but one": ((ALL, "one more"),),
    "plus": (("012", "two more"), ("3", "3"), ("456789", "one more")),
    "two more": ((ALL, "one more"),),
    "one more": ((ALL, "no more"),),
    "3": (("0", "30"), ("123456789", "no more")),
    "30": (("01234567", "no more"),),
    "either": (("-", "-"), ("+", "+")),
    "tiny": (("-", "-"),),
    "huge": (("+", "+"),),
    "-": (("0", "-0"), ("12", "-1"), ("3", "+3"), ("456789", "last")),
    "-0": (("56789", "no more"),),
    "-1": ((ALL, "one more"),),
    "+": (("1", "+1"), ("2", "+2"), ("3", "+3"), ("456789", "last")),
    "+1": (("6789", "one more"), ("012345", "last")),
    "+2": ((ALL, "one more"),),
    "+3": (("0", "30"), ("123456789", "no more")),
    "last": ((ALL, "no more"),),
}
EXPONENT_ENDS = ("two more", "one more", "no more", "3", "30")
