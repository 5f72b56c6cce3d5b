"""What differs between an engine's result and the reference's, as messages of assertions."""


def wrong_tokens(ours: list[int], expected: list[int], prompt: str) -> str:
    """The first token in which an answer differs from the reference's."""
    pairs = enumerate(zip(ours, expected, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(expected)))
    got, wanted = ([*tokens, None][place] for tokens in (ours, expected))
    if got is None or wanted is None:
        return f"the answer to {prompt!r} has {len(ours)} tokens instead of {len(expected)}"
    return f"after {prompt!r}, token {place} is {got}; transformers generates {wanted}"
