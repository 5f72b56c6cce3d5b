"""What differs between an engine's result and the reference's, as messages of assertions."""

import torch


def wrong_rows(ours: torch.Tensor, expected: torch.Tensor, bound: float) -> str:
    """Which rows of ``ours [T, n]`` err by more than ``bound``, and how the first of them begins."""
    errors = (ours - expected).float().square().mean(-1).sqrt() / expected.float().square().mean(-1).sqrt()
    wrong = (~(errors <= bound)).nonzero()[:, 0].tolist()
    if not wrong:
        return "every row is within its bound"
    first = wrong[0]
    shown = {"expected": expected[first, :5].tolist(), "got": ours[first, :5].tolist()}
    beginnings = [f"  {name:9}" + "  ".join(f"{number:8.4f}" for number in numbers) for name, numbers in shown.items()]
    return "\n".join(
        [
            f"{len(wrong)} of {len(ours)} tokens differ from transformers'; the first is token {first}",
            f"  its error is {errors[first]:.1e} of its size, and rounding explains {bound:.0e}; it begins",
            *beginnings,
        ]
    )


def wrong_tokens(ours: list[int], expected: list[int], prompt: str) -> str:
    """The first token in which an answer differs from the reference's."""
    pairs = enumerate(zip(ours, expected, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(expected)))
    got, wanted = ([*tokens, None][place] for tokens in (ours, expected))
    if got is None or wanted is None:
        return f"the answer to {prompt!r} has {len(ours)} tokens instead of {len(expected)}"
    return f"after {prompt!r}, token {place} is {got}; transformers generates {wanted}"
