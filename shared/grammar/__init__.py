"""Grammars that constrain an output: compilers from regex, choice and JSON Schema, automata, and masks. Phase 12."""
