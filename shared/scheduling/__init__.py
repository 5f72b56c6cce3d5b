"""Which requests run in a step: the queue, admission, and who gets a token."""
