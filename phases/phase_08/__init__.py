"""Phase 8: prefix caching.

Problem: requests that begin alike (a system prompt, the turns of a conversation, a preempted request) compute the same
keys and values again. Idea: full blocks stay in a radix tree of token ids when their request ends, and an admitted
request shares those that hold its prefix. Cost: a lookup per request, and what is cached depends on what was computed
before, so the time to a first token does too; a cache salt keeps tenants apart.
"""
