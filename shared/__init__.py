"""The library of the course. Every component exists here once; each module was introduced by exactly one phase."""
