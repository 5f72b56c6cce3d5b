"""How attention is cut into splits that run side by side, and put together again. Introduced in phase 6.1.

``descriptor`` says what a plan is; ``plan`` decides once a step, on the host, which keys each program takes; ``states``
says what attention over a split leaves behind and why any cut gives the same result. The kernels that follow are in
``shared.kernels``.
"""
