"""Sorting digits: a text-only task that a tiny model learns in minutes.

Makes the rows and reads them.
"""

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
    if train + evaluation > (
        available := sum(10**length for length in range(shortest, longest + 1))
    ):
        raise ValueError(
            f"{train + evaluation} rows asked for, only {available} sequences have these lengths"
        )
    generator = random.Random(derive(seed, "digits"))
    sequences: dict[tuple[int, ...], None] = {}
    while len(sequences) < train + evaluation:
        sequences[tuple(generator.choices(range(10), k=generator.randint(shortest, longest)))] = (
            None
        )
    drawn = [list(sequence) for sequence in sequences]
    return (
        [{"id": f"train-{i}", "digits": digits} for i, digits in enumerate(drawn[:train])],
        [{"id": f"eval-{i}", "digits": digits} for i, digits in enumerate(drawn[train:])],
    )


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
        if not (isinstance(digits, list) and all(type(d) is int and 0 <= d <= 9 for d in digits)):
            raise DataFailure(
                where, f"digits must be a list of integers from 0 to 9, not {digits!r}"
            )
        text = self._settings.prompt.replace("{digits}", " ".join(map(str, digits)))
        return Task(
            str(field(row, "id", where)), (Message("user", (text,)),), sorted(digits), "digits"
        )


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
        right = sum(a == b for a, b in zip(answer, truth, strict=False)) / max(
            len(answer), len(truth)
        )
        return Scored(right, {"exact": float(answer == truth), "format": 1.0})
