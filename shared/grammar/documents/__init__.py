"""From shapes to an automaton's rules: JSON values, objects, arrays and strings."""
