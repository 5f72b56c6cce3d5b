"""Structured answers through LangChain and instructor, as users ask for them: ``structured_clients.py URL MODEL``.

It runs in an environment that has one or both of these packages, and imports nothing of this repository:

    python -m venv /tmp/clients && /tmp/clients/bin/pip install langchain-openai instructor
    /tmp/clients/bin/python tests/clients/structured_clients.py http://127.0.0.1:8000 smollm2-135m

It prints the ways that it has tried; a model of random weights will do, since each of them constrains the answer.
"""

import importlib.util
import sys
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Plan(BaseModel):
    """A plan for a day."""

    model_config = ConfigDict(extra="forbid")

    place: Literal["Rome", "Oslo"]
    hours: int = Field(ge=1, le=12)
    note: str | None = Field(default=None, max_length=6)


def langchain(url: str, model: str) -> list[str]:
    """All methods of ``with_structured_output``, and tools bound to a model."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=model, max_tokens=400, max_retries=0, seed=1)
    tried = []
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            for schema in (Plan, Plan.model_json_schema()):
                answer: Any = chat.with_structured_output(schema, method=method, strict=strict).invoke("Plan a day.")
                Plan.model_validate(answer if isinstance(answer, dict) else answer.model_dump())
                tried.append(f"with_structured_output(method={method!r}, strict={strict}, {type(schema).__name__})")
    assert any(_is_object(chat.model_copy(update={"seed": seed})) for seed in range(8))
    tried.append("with_structured_output(method='json_mode')")
    bound = chat.bind_tools([Plan], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke("Plan a day.").tool_calls
    Plan.model_validate(call["args"])
    total: Any = None
    for chunk in bound.stream("Plan a day."):
        total = chunk if total is None else total + chunk
    assert total.tool_calls[0]["args"] == call["args"]
    return [*tried, "bind_tools(tool_choice='any')", "a stream of it"]


def _is_object(chat: Any) -> bool:
    """Whether an answer is some JSON object. One that reaches the limit of tokens is not: nothing bounds an object."""
    import openai
    from langchain_core.exceptions import OutputParserException

    try:
        answer = chat.with_structured_output(None, method="json_mode").invoke("Plan a day, as JSON.")
    except (OutputParserException, openai.LengthFinishReasonError):
        return False
    return isinstance(answer, dict)


def instructed(url: str, model: str) -> list[str]:
    """instructor's modes for OpenAI's API."""
    import instructor
    import openai

    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    tried = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        question: Any = [{"role": "user", "content": "Plan a day."}]
        answer = client.chat.completions.create(
            model=model, messages=question, response_model=Plan, max_tokens=400, max_retries=0, seed=1
        )
        assert isinstance(answer, Plan)
        tried.append(f"instructor {mode.name}")
    return tried


def main(url: str, model: str) -> None:
    for package, run in (("langchain_openai", langchain), ("instructor", instructed)):
        print(*(run(url, model) if importlib.util.find_spec(package) else [f"{package} is not installed"]), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
