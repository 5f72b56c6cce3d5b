"""The workshop: exercises cut out of the reference, and the learner's own code run in its place.

Nothing is written twice. The reference marks the lines of an exercise, ``lesson.toml`` names the tests that notice it,
and everything here (skeletons, checks, solutions, hand-outs, grades) is made from those two.
"""
