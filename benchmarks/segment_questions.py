"""Questions with known answers over pages of this repository, for ``benchmarks.segments``. Introduced in phase 9.1.

Invariant: the page of a question holds its ``anchor`` exactly once, and the anchor holds the answer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Question:
    """A question answered by ``anchor`` in a page's text."""

    page: str
    anchor: str
    question: str
    answer: str

    def piece(self, tokenizer: Any, length: int) -> list[int]:
        """``length`` tokens of the page around the anchor. Raises ValueError if the page does not hold it exactly
        once."""
        text = (PAGES / self.page).read_text(encoding="utf-8")
        before, found, after = text.partition(self.anchor)
        if not found or self.anchor in after:
            raise ValueError(
                f"{self.page} must hold {self.anchor!r} exactly once; correct benchmarks/segment_questions.py."
            )
        ids: list[int] = tokenizer.encode(text)
        middle = len(tokenizer.encode(before + found)) - length // 4
        start = max(0, min(middle - length // 2, len(ids) - length))
        return ids[start : start + length]

    def prompt(self, tokenizer: Any) -> list[int]:
        """The question as it follows the documents."""
        ids: list[int] = tokenizer.encode(f"\n\nQuestion: {self.question}\nAnswer:", add_special_tokens=False)
        return ids

    def is_answered(self, text: str) -> bool:
        """Whether the first line of a text contains the answer as a word."""
        words = "".join(letter if letter.isalnum() else " " for letter in short_answer(text).lower()).split()
        return self.answer.lower() in words


def short_answer(text: str) -> str:
    """An answer's first line, which is compared."""
    return text.strip().partition("\n")[0].strip()


QUESTIONS = [
    Question("API.md", "keys are compared in constant time", "In what kind of time are keys compared?", "constant"),
    Question("API.md", "for `--send-timeout` (20 s)", "How many seconds is --send-timeout?", "20"),
    Question("API.md", "holds at most 1 MiB", "How much does a client hold at most that does not read?", "MiB"),
    Question("API.md", "between the frames of the streams", "Between what are large bodies parsed?", "frames"),
    Question("API.md", "On SIGTERM the server stops", "On which signal does the server stop listening?", "SIGTERM"),
    Question(
        "API.md", "None of these waits for a step, however long it takes", "What do none of these wait for?", "step"
    ),
    Question("API.md", "pins and with 1.97.1", "With which version is OpenAI's Python client tested?", "97"),
    Question("API.md", "gives each tenant a salt", "What does a server for several tenants give each tenant?", "salt"),
    Question("PHASE_06.md", "A double free raises `BlockError`", "What does a double free raise?", "BlockError"),
    Question("PHASE_06.md", "has a free list, as a stack", "As what data structure is the free list kept?", "stack"),
    Question("PHASE_06.md", "Kwon et al., SOSP 2023", "In which year was PagedAttention published?", "2023"),
    Question("PHASE_06.md", "KV cache consists of blocks", "Of what does the KV cache consist?", "blocks"),
    Question("PHASE_10.md", "Up to phase 9 a weight has 16 bits", "How many bits has a weight up to phase 9?", "16"),
]
"""The demo model answers each question from its document alone, so a wrong answer is due to the other documents."""
