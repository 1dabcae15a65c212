"""An agent that does not use rayloop.

It asks its question, and asks once more when the answer is long.
"""

from typing import Any

from openai import OpenAI


def play(messages: list[Any]) -> None:
    """One question; its last answer is scored."""
    client = OpenAI()
    conversation = list(messages)
    for _ in range(2):
        completion = client.chat.completions.create(model="policy", messages=conversation)
        answer = completion.choices[0].message.content or ""
        if len(answer.split()) <= 2:
            break
        conversation += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "Give the answer alone."},
        ]
