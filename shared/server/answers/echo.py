"""The prompts of a completion, echoed before their continuations. Introduced in phase 4.

Invariant: a prompt sent as text is echoed as that text; the text of ids and the text of their continuation, joined, are
the text of all ids.
"""

from shared.server.answers.answer_stream import AnswerStream
from shared.server.answers.logprobs import Scored
from shared.text.detokenizer import IncrementalDecoder
from shared.text.tokenizer import Tokenizer


class Echo:
    """The prompts as the client sent them; ``has_logprobs``: their tokens' log-probabilities are requested."""

    def __init__(self, tokenizer: Tokenizer, prompts: list[str | list[int]], *, has_logprobs: bool) -> None:
        self._tokenizer, self._prompts, self._has_logprobs = tokenizer, prompts, has_logprobs

    def of(self, choice: AnswerStream, num_choices: int) -> tuple[str, list[Scored]]:
        """The prompt of one of ``num_choices`` choices, and its tokens if log-probabilities are requested."""
        prompt = self._prompts[choice.index * len(self._prompts) // num_choices]
        if isinstance(prompt, str) and not self._has_logprobs:
            return prompt, []
        texts = self._texts(prompt, choice.prompt_ids, is_continued=choice.num_tokens > 0)
        text = prompt if isinstance(prompt, str) else "".join(texts)
        if not self._has_logprobs:
            return text, []
        assert choice.prompt_logprobs is not None
        return text, list(map(Scored, choice.prompt_ids, texts, choice.prompt_logprobs))

    def _texts(self, prompt: str | list[int], prompt_ids: list[int], *, is_continued: bool) -> list[str]:
        """What each token adds to the text; a special token adds its name, unless the tokenizer added it to a text.

        A character that the prompt leaves incomplete counts as part of its continuation.
        """
        decoder, special_ids = IncrementalDecoder(self._tokenizer), self._tokenizer.special_ids
        texts = []
        for token_id in prompt_ids:
            name = self._tokenizer.decode([token_id], skip_special_tokens=False) if token_id in special_ids else ""
            texts.append(name or decoder.push(token_id))
        texts[-1] += decoder.settle() if is_continued else decoder.flush()
        if isinstance(prompt, str) and prompt_ids[0] in special_ids and not prompt.startswith(texts[0]):
            texts[0] = ""
        return texts
