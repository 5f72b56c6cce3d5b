"""The library of the course. Every component lives here once; each module was introduced by exactly one phase."""
