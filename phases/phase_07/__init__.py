"""Phase 7: chunked prefill.

Problem: a step with a long prompt takes as long as a hundred decode steps, and every decoding request waits for it.
Idea: compute a prompt in chunks, and run the tokens of decoding requests and the chunks in one forward, which reads
each weight once for all of them. Cost: the first token of a long prompt arrives a little later, since its steps are
shared, and each chunk reads the keys of all chunks before it again.
"""
