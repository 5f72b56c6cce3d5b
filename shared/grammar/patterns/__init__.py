"""Regular expressions: syntax, classes of characters, and their automata."""
