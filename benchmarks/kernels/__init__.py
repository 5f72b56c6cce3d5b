"""The kernels' benchmark: its cases, their check, and the sweep over tilings."""
