"""Tasks of reasoning-gym: rows made by the package's generators, answers judged by its scorers.

The extra ``reasoning-gym``.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import Blame, DataFailure, blame
from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Message, Task, Trajectory
from rayloop.envs.adapters.packages import needs

EVALUATING = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
"""Tasks whose scorer evaluates the policy's text as Python, in sympy's parser too: refused."""
RUNNING = ("codeio", "composite")
"""Tasks that run programs from their data, or that hold others: refused."""


CONSTANTS = ("0", "1", "True", "False", "x", "no answer")
"""Answers that are wrong for every item but those that have them.

A scorer that pays one of them in full pays a guess: of 0.1.25 game_of_life_halting pays any text,
and coin_flip the first digits of the answer.
"""
_NOT_FINITE = re.compile(r"(?<![a-z])[+-]?(?:nan|inf|infinity)[ij]?(?![a-z])", re.IGNORECASE)
"""A number that is not finite: a difference to it is not finite either, and complex_arithmetic pays
that in full.
"""


class ReasoningGymRows:
    """Reads rows ``{task, seed, index, config}``: item ``index`` (0) of the package's data set
    ``task`` with this seed and config; ``size`` is the data set's (index + 1). The prompt is the
    item's question, the metrics are split by task.
    """

    class Settings(SettingsModel):
        """What stands before a question."""

        system: str = "default"
        """The package's prompt that asks for ``<answer>``: DeepSeekZero, default, simple, direct,
        chain_of_draft. Empty: none.
        """
        shots: int = Field(0, ge=0)
        """Solved questions before each question: the first items of the same data set.

        No row may name one of these.
        """

        @model_validator(mode="after")
        def _there(self) -> Self:
            needs("reasoning_gym", "reasoning-gym")
            from reasoning_gym.utils import SYSTEM_PROMPTS

            if self.system and self.system not in SYSTEM_PROMPTS:
                raise ValueError(
                    f"{self.system!r} is none of the package's prompts: {', '.join(SYSTEM_PROMPTS)}"
                )
            return self

    def __init__(self, settings: Settings) -> None:
        from reasoning_gym.utils import SYSTEM_PROMPTS

        self._system = (
            (Message("system", (SYSTEM_PROMPTS[settings.system],)),) if settings.system else ()
        )
        self._shots = settings.shots

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row as a task.

        Raises DataFailure, also for tasks of ``EVALUATING`` and ``RUNNING``, and for an item whose
        scorer pays one of ``CONSTANTS`` in full.
        """
        made, entry = _entry(row, where)
        guess = _paid_guess(made, entry)
        if guess is not None:
            truth = str(entry["answer"])
            raise DataFailure(
                where,
                f"the scorer of {row['task']} pays 1 for {guess!r} where {truth!r:.60} is right:"
                " leave it out",
            )
        name, seed, index = row["task"], row["seed"], row.get("index") or 0
        if index < self._shots:
            raise DataFailure(
                where,
                f"index {index} is one of the {self._shots} solved questions"
                " (data.reader.with.shots)",
            )
        solved = [made[shot] for shot in range(self._shots)]
        shown = [
            m
            for one in solved
            for m in (Message("user", (one["question"],)), Message("assistant", (one["answer"],)))
        ]
        extra = {column: row.get(column) for column in ("task", "seed", "index", "size", "config")}
        messages = (*self._system, *shown, Message("user", (entry["question"],)))
        return Task(
            str(row.get("id") or f"{name}/{seed}/{index}"), messages, entry["answer"], name, extra
        )


class ReasoningGymScore:
    """The score that the package's own scorer gives to the last ``<answer>``, from 0 to 1; the row
    is made again for it. An answer that the scorer cannot read, or a number that is not finite
    where none is asked for, gets 0 and the flag ``unreadable``. The component ``exact`` is 1 for a
    score of 1.
    """

    class Settings(SettingsModel):
        """Where the answer is."""

        whole: bool = False
        """The whole last text is the answer, without ``<answer>``.

        Many scorers give a part to an answer with words around it.
        """

        @model_validator(mode="after")
        def _there(self) -> Self:
            needs("reasoning_gym", "reasoning-gym")
            return self

    def __init__(self, settings: Settings) -> None:
        self._whole = settings.whole

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """Raises DataFailure for a task that is none of ``ReasoningGymRows``."""
        from reasoning_gym.utils import extract_answer

        made, entry = _entry(task.extra, task.id)
        text = context.texts[-1] if context.texts else ""
        answer = text.strip() if self._whole else extract_answer(text)
        found = {"answered": float(answer is not None)}
        value = _score(made, answer, entry)
        if not math.isfinite(value):
            return Scored(0.0, {**found, "exact": 0.0}, ("unreadable",))
        return Scored(value, {**found, "exact": float(value >= 1)})


def _score(made: Any, answer: str | None, entry: Mapping[str, Any]) -> float:
    """The scorer's value; NaN for an answer that it cannot read.

    Raises what the policy's text cannot have caused.
    """
    if answer and _NOT_FINITE.search(answer) and not _NOT_FINITE.search(str(entry["answer"])):
        return math.nan
    try:
        return float(made.score_answer(answer, entry))
    except (
        Exception
    ) as error:  # scorers raise whatever comes for a text that has not the form of an answer
        if blame(error) is not Blame.POLICY:
            raise
        return math.nan


def _paid_guess(made: Any, entry: Mapping[str, Any]) -> str | None:
    """One of ``CONSTANTS`` that is not the item's answer and is paid in full all the same."""
    for guess in CONSTANTS:
        if _same_answer(guess, str(entry["answer"])):
            continue
        if _score(made, guess, entry) >= 1:  # which NaN is not
            return guess
    return None


def _same_answer(guess: str, answer: str) -> bool:
    """The same text, or the same number."""
    if guess.casefold() == answer.strip().casefold():
        return True
    try:
        return float(guess) == float(answer)
    except ValueError:
        return False


def _entry(row: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """The data set and its item. Raises DataFailure."""
    name, seed, index = row.get("task"), row.get("seed"), row.get("index") or 0
    config = row.get("config") or {}
    if name in EVALUATING:
        raise DataFailure(
            where,
            f"the scorer of {name} evaluates the policy's text as Python, outside the sandbox:"
            " leave it out",
        )
    if name in RUNNING:
        raise DataFailure(
            where, f"{name} runs programs of its data, or holds other tasks: name a task of its own"
        )
    if not (
        isinstance(name, str)
        and isinstance(seed, int)
        and isinstance(index, int)
        and isinstance(config, Mapping)
    ):
        raise DataFailure(
            where,
            f"task {name!r}, seed {seed!r}, index {index!r}, config {config!r}: a name, numbers, a"
            " mapping",
        )
    size = row.get("size") or index + 1
    if not isinstance(size, int) or not 0 <= index < size:
        raise DataFailure(where, f"index {index} lies outside the data set of size {size!r}")
    given = {
        key: value for key, value in config.items() if value is not None
    }  # parquet fills columns with nulls
    try:
        made = _made(name, seed, size, json.dumps(given, sort_keys=True))
        return made, made[index]
    except Exception as error:  # whatever the package's generator raises for a config
        raise DataFailure(
            where, f"reasoning-gym cannot make {name}: {type(error).__name__}: {error}"
        ) from error


@lru_cache(maxsize=256)
def _made(name: str, seed: int, size: int, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))
