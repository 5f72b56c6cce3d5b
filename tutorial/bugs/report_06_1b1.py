"""One long context makes the whole batch slow.

A batch of equal lengths decodes at full speed. With one context of 32,000 tokens among fifteen short ones, the step
takes much longer than its bytes need, and our profiler shows most multiprocessors idle while a few go on reading. The
plan tells the same: one program reads several times its share.
"""

import numpy as np

from shared.attention.descriptor import Grid
from shared.attention.plan import plan_decode

grid = Grid(resident=16, unit=64, least_split=64)
worst = 0.0
for lengths in ([2000] * 16, [32000] + [200] * 14, [32000] + [200] * 15):
    plan = plan_decode(lengths, grid)
    share = sum(lengths) / grid.resident
    most = min(int(plan.split_size[0]), int(np.max(lengths)))
    print(f"{len(lengths)} requests: a program reads up to {most:6,} keys, an equal share is {share:6,.0f}")
    worst = max(worst, most / share)
raise SystemExit(worst > 2.1)
