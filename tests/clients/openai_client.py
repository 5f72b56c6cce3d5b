"""What OpenAI's Python client must read of a server, for any version of it: ``openai_client.py URL MODEL``.

It runs in the environment of that client, so it imports nothing of this repository.
"""

import sys
from typing import Any

import openai


def main(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)
    ask: Any = {"model": model, "max_tokens": 8, "temperature": 1, "seed": 3}
    text = client.completions.create(prompt="Once", **ask)
    chunks = list(client.completions.create(prompt="Once", stream=True, **ask))
    assert text.usage is not None
    assert text.usage.completion_tokens == 8 or text.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].text for chunk in chunks) == text.choices[0].text
    assert chunks[-1].choices[0].finish_reason == text.choices[0].finish_reason

    messages: Any = [{"role": "user", "content": "Hello"}]
    said = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **ask)
    pieces = list(client.chat.completions.create(messages=messages, stream=True, **ask))
    assert said.usage is not None
    assert said.usage.completion_tokens == 8 or said.choices[0].finish_reason == "stop"
    assert said.choices[0].logprobs is not None
    tokens = said.choices[0].logprobs.content or []
    assert len(tokens) == said.usage.completion_tokens
    for token in tokens:
        assert len(token.top_logprobs) == 2, "exactly as many as asked for; the sampled one stands beside them"
        assert token.logprob <= token.top_logprobs[0].logprob <= 0
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == said.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == said.choices[0].finish_reason

    several = client.completions.create(model=model, prompt=["a", "b"], n=2, best_of=2, max_tokens=4, seed=1)
    alone = client.completions.create(model=model, prompt="b", max_tokens=4, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[2].text == alone.choices[0].text
    echoed = client.completions.create(model=model, prompt="abc", echo=True, logprobs=1, max_tokens=1)
    assert echoed.choices[0].text.startswith("abc")
    assert echoed.choices[0].logprobs is not None
    assert echoed.choices[0].logprobs.token_logprobs is not None
    assert echoed.choices[0].logprobs.token_logprobs[0] is None


if __name__ == "__main__":
    main(*sys.argv[1:])
