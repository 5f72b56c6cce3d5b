"""Phase 9: graphs and overlap.

Problem: launching a small decode step takes the host longer than running it takes the GPU, and between two steps the
GPU waits for planning and text. Idea: record the launches of a step once per size and replay them with one call; plan
and launch the next step while this one runs, with input ids that stay on the device. Cost: steps are padded to a few
sizes, capturing takes seconds and memory at start-up, and a request that ends by a token is computed once more than
necessary.
"""
