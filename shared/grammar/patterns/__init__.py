"""Regular expressions: syntax, character classes, and their automata."""
