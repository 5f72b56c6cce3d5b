"""The attention benchmark: its cases, its peers, and the sweep over tilings."""
