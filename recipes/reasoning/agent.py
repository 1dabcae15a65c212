"""An agent that knows nothing of rayloop: it asks its question, and asks once more when the answer
is long.
"""

from typing import Any

from openai import OpenAI


def play(messages: list[Any]) -> None:
    """One question; its last answer is scored."""
    client, said = OpenAI(), list(messages)
    for _ in range(2):
        answer = (
            client.chat.completions.create(model="policy", messages=said).choices[0].message.content
            or ""
        )
        if len(answer.split()) <= 2:
            break
        said += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "Give the answer alone."},
        ]
