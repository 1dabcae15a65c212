"""Verdicts of a judge that a reward asked: kept with its outcome, and given again by ``replay``.

No torch, no ray.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from rayloop.core.groups import Scored


class Verdicts:
    """The verdicts of one call of a reward, by a digest of the question.

    With ``saved`` they are given again, and no judge is asked; ``missing``: one was not among them.
    """

    def __init__(self, saved: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.saves = saved is None
        self.missing = False
        self._by_key = {str(verdict["key"]): verdict for verdict in saved or ()}

    def keep(self, key: str, outcome: Scored) -> None:
        """Keep what the judge's answer to a question is worth."""
        self._by_key[key] = {
            "key": key,
            "value": outcome.value,
            "components": dict(outcome.components),
            "flags": list(outcome.flags),
            "reason": outcome.reason,
        }

    def saved(self, key: str) -> Scored | None:
        """What was kept; None, and noted as ``missing``, for another question."""
        verdict = self._by_key.get(key)
        if verdict is None:
            self.missing = True
            return None
        flags = tuple(verdict["flags"])
        return Scored(verdict["value"], verdict["components"], flags, reason=verdict["reason"])

    @property
    def all(self) -> tuple[Mapping[str, Any], ...]:
        """All verdicts, as plain values."""
        return tuple(self._by_key.values())


VERDICTS: ContextVar[Verdicts | None] = ContextVar("verdicts", default=None)
"""Where a judge's client keeps, or finds, the verdicts of the present call of a reward."""
