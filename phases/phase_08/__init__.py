"""Phase 8: prefix caching.

Problem: requests with a common prefix (a system prompt, the turns of a conversation, a preempted request) compute the
same keys and values again. Idea: full blocks stay in a radix tree of token ids when their request ends, and an admitted
request shares the blocks that hold its prefix. Cost: a lookup per request. The time to a first token depends on what
earlier requests left in the cache; a cache salt keeps tenants apart.
"""
