"""What judges: the seam between the service and rules, our own engine or another server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rayloop.judge.api import BackendLabel, JudgeItem, Result


class Backend(Protocol):
    """``label`` is in every answer; ``model`` is its name, "" for rules; ``fingerprint`` is of all that matters to verdicts."""

    label: BackendLabel
    model: str

    @property
    def fingerprint(self) -> str: ...

    async def refresh(self) -> None:
        """Look again at what verdicts depend on and others may change. Raises InfrastructureFailure when that does not answer."""
        ...

    async def judge(self, items: Sequence[JudgeItem]) -> Sequence[Result]:
        """One result for each item, in order; their rubrics exist. Never raises for what else an item contains.

        Raises ``rayloop.core.failures.InfrastructureFailure`` when nothing can be judged now.
        """
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's whole reply. ``probability`` is that of its verdict token, when the engine gives log-probs."""

    text: str
    probability: float | None = None


class ChatModel(Protocol):
    """A model behind a backend, asked through ``rayloop.judge.grader``. ``name`` and ``settings`` go into the fingerprint."""

    name: str
    settings: Mapping[str, Any]

    async def identity(self) -> Mapping[str, Any]:
        """What is behind the name now, as far as can be known. Raises InfrastructureFailure when it does not answer."""
        ...

    async def reply(self, messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any]) -> Reply:
        """Answer chat messages (OpenAI's form), the output constrained to the JSON schema.

        Raises InfrastructureFailure when the engine fails, DeadlineExceeded when it takes too long, and DataFailure when
        it refuses these messages (too long for it, an image that it cannot read).
        """
        ...
