"""Automata over bytes: how they are made, joined, bounded and minimized."""
