"""Which requests run in a step: the waiting queue, admission, and the split between prefill and decode."""
