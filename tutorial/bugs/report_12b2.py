"""A request suddenly follows the schema of another one.

Two requests share a schema, and a third has another. When one of the two ends and the third arrives, the other of the
two begins to write what the third's schema wants. It needs a small pool of grammars, or many schemas.
"""

import numpy as np

from shared.grammar.tokens.pool import GrammarPool

pool = GrammarPool(num_bytes=64 * 4, device="cpu")
base = pool.acquire("invoice", np.full(64, 1, np.int32))  # the first request
pool.acquire("invoice", np.full(64, 1, np.int32))  # the second, with the same schema
pool.release("invoice")  # the first ends
print("a third request, with another schema, gets the range at", pool.acquire("weather", np.full(64, 2, np.int32)))
assert base is not None
tables = set(pool.tables[base : base + 64].tolist())
print(f"the second request reads tables of {tables}; its own are {{1}}")
raise SystemExit(tables != {1})
