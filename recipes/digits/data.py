"""Sorting digits: a text-only task that a tiny model learns in minutes.

Makes the rows and reads them.
"""

import operator
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Message, Task, Trajectory, derive
from rayloop.data.messages import field


def rows(
    train: int, evaluation: int, shortest: int, longest: int, seed: int
) -> tuple[list[Any], list[Any]]:
    """Training and evaluation rows {id, digits}; no sequence of digits occurs twice.

    Equal arguments, equal rows. Raises ValueError when there are fewer sequences of these lengths
    than rows asked for.
    """
    if not 1 <= shortest <= longest:
        raise ValueError(
            f"lengths must satisfy 1 <= shortest <= longest, not {shortest} and {longest}"
        )
    available = sum(10**length for length in range(shortest, longest + 1))
    if train + evaluation > available:
        raise ValueError(
            f"{train + evaluation} rows asked for, only {available} sequences have these lengths"
        )
    generator = random.Random(derive(seed, "digits"))
    sequences: dict[tuple[int, ...], None] = {}
    while len(sequences) < train + evaluation:
        length = generator.randint(shortest, longest)
        sequences[tuple(generator.choices(range(10), k=length))] = None
    digits = list(map(list, sequences))
    return _rows("train", digits[:train]), _rows("eval", digits[train:])


def _rows(split: str, sequences: list[list[int]]) -> list[Any]:
    return [{"id": f"{split}-{i}", "digits": digits} for i, digits in enumerate(sequences)]


class DigitRows:
    """Reads rows {id, digits}; the ground truth is the sorted digits."""

    class Settings(SettingsModel):
        prompt: str = "Sort: {digits}"
        """The user's text; ``{digits}`` is replaced by the digits, separated by blanks."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row as a task with sorted digits. Raises DataFailure."""
        digits = field(row, "digits", where)
        if not isinstance(digits, list) or not all(map(_is_digit, digits)):
            raise DataFailure(
                where, f"digits must be a list of integers from 0 to 9, not {digits!r}"
            )
        text = self._settings.prompt.replace("{digits}", " ".join(map(str, digits)))
        messages = (Message("user", (text,)),)
        return Task(str(field(row, "id", where)), messages, sorted(digits), "digits")


def _is_digit(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 9


class SortedAnswers:
    """The supervised answer: the sorted digits, separated by blanks."""

    tokens = ()

    def answer(self, task: Task, rng: random.Random) -> str:
        """The sorted digits."""
        return " ".join(map(str, task.ground_truth))


_ANSWER = re.compile(r"[0-9\s,]*[0-9][0-9\s,]*")


class SortReward:
    """Right positions / max(length of answer, length of truth).

    Components: ``exact`` (all right) and ``format``. An answer that is not just digits, blanks and
    commas scores 0 with the flag ``unparsable``.
    """

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The share of right positions, 0..1."""
        text = context.texts[-1].strip()
        if _ANSWER.fullmatch(text) is None:
            return Scored(0.0, {"exact": 0.0, "format": 0.0}, ("unparsable",))
        answer = [int(digit) for digit in re.findall("[0-9]", text)]
        truth: list[int] = task.ground_truth
        right = sum(map(operator.eq, answer, truth))
        share = right / max(len(answer), len(truth))
        return Scored(share, {"exact": float(answer == truth), "format": 1.0})
