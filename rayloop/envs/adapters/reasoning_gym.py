"""Tasks of reasoning-gym: rows of the package's generators, answers judged by its scorers.

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
"""Tasks that run programs from their data, or that hold other tasks: refused."""


CONSTANTS = ("0", "1", "True", "False", "x", "no answer")
"""Answers that are wrong for every item, except for the items whose answer they are.

A scorer that pays one of them in full pays a guess: in 0.1.25 game_of_life_halting pays any text,
and coin_flip the first digits of the answer.
"""
_NOT_FINITE = re.compile(r"(?<![a-z])[+-]?(?:nan|inf|infinity)[ij]?(?![a-z])", re.IGNORECASE)
"""A number that is not finite.

A difference to it is not finite either, and complex_arithmetic pays that in full.
"""


class ReasoningGymRows:
    """Reads rows ``{task, seed, index, config}`` of the package's data sets.

    A row stands for item ``index`` (0) of the data set ``task`` with this seed and config; ``size``
    is the data set's (index + 1). The prompt is the item's question, and the metrics are split by
    task.
    """

    class Settings(SettingsModel):
        """The messages before a question."""

        system: str = "default"
        """The package's prompt that asks for ``<answer>``; empty for none.

        DeepSeekZero, default, simple, direct or chain_of_draft.
        """
        shots: int = Field(0, ge=0)
        """Solved questions before each question: the first items of its data set.

        No row may name one of these.
        """

        @model_validator(mode="after")
        def _check_installed(self) -> Self:
            needs("reasoning_gym", "reasoning-gym")
            from reasoning_gym.utils import SYSTEM_PROMPTS

            if self.system and self.system not in SYSTEM_PROMPTS:
                raise ValueError(
                    f"{self.system!r} is not a prompt of the package: {', '.join(SYSTEM_PROMPTS)}"
                )
            return self

    def __init__(self, settings: Settings) -> None:
        from reasoning_gym.utils import SYSTEM_PROMPTS

        self._system: tuple[Message, ...] = ()
        if settings.system:
            self._system = (Message("system", (SYSTEM_PROMPTS[settings.system],)),)
        self._shots = settings.shots

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """Return the row as a task.

        Raises DataFailure, also for tasks of ``EVALUATING`` and ``RUNNING``, and for an item whose
        scorer pays one of ``CONSTANTS`` in full.
        """
        dataset, entry = _entry(row, where)
        guess = _paid_guess(dataset, entry)
        if guess is not None:
            truth = str(entry["answer"])
            raise DataFailure(
                where,
                f"the scorer of {row['task']} pays 1 for {guess!r} where {truth!r:.60} is right:"
                " leave it out",
            )
        name = row["task"]
        index = row.get("index") or 0
        if index < self._shots:
            raise DataFailure(
                where,
                f"index {index} is one of the {self._shots} solved questions"
                " (data.reader.with.shots)",
            )
        messages = list(self._system)
        for shot in range(self._shots):
            solved = dataset[shot]
            messages.append(Message("user", (solved["question"],)))
            messages.append(Message("assistant", (solved["answer"],)))
        messages.append(Message("user", (entry["question"],)))
        task_id = str(row.get("id") or f"{name}/{row['seed']}/{index}")
        extra = {column: row.get(column) for column in ("task", "seed", "index", "size", "config")}
        return Task(task_id, tuple(messages), entry["answer"], name, extra)


class ReasoningGymScore:
    """The score that the package's scorer gives to the last ``<answer>``, from 0 to 1.

    The row's item is generated again for it. An answer that the scorer cannot read, or a number
    that is not finite where none is asked for, gets 0 and the flag ``unreadable``. The component
    ``exact`` is 1 for a score of 1.
    """

    class Settings(SettingsModel):
        """Where the answer is."""

        whole: bool = False
        """The whole last text is the answer, without ``<answer>``.

        Many scorers give a part to an answer with words around it.
        """

        @model_validator(mode="after")
        def _check_installed(self) -> Self:
            needs("reasoning_gym", "reasoning-gym")
            return self

    def __init__(self, settings: Settings) -> None:
        self._whole = settings.whole

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """Score the last text. Raises DataFailure for a task that has no row's columns."""
        from reasoning_gym.utils import extract_answer

        dataset, entry = _entry(task.extra, task.id)
        text = context.texts[-1] if context.texts else ""
        answer = text.strip() if self._whole else extract_answer(text)
        value = _score(dataset, answer, entry)
        is_readable = math.isfinite(value)
        components = {
            "answered": float(answer is not None),
            "exact": float(is_readable and value >= 1),
        }
        if not is_readable:
            return Scored(0.0, components, ("unreadable",))
        return Scored(value, components)


def _score(dataset: Any, answer: str | None, entry: Mapping[str, Any]) -> float:
    """Return the scorer's value; NaN for an answer that it cannot read.

    Raises errors that the policy's text cannot have caused.
    """
    if answer and _NOT_FINITE.search(answer) and not _NOT_FINITE.search(str(entry["answer"])):
        return math.nan
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception as error:
        # Scorers raise any error for a text that does not have the form of an answer.
        if blame(error) is not Blame.POLICY:
            raise
        return math.nan


def _paid_guess(dataset: Any, entry: Mapping[str, Any]) -> str | None:
    """Return one of ``CONSTANTS`` that is not the item's answer and is still paid in full."""
    for guess in CONSTANTS:
        if _same_answer(guess, str(entry["answer"])):
            continue
        # NaN is not at least 1.
        if _score(dataset, guess, entry) >= 1:
            return guess
    return None


def _same_answer(guess: str, answer: str) -> bool:
    """Return whether they are the same text, or the same number."""
    if guess.casefold() == answer.strip().casefold():
        return True
    try:
        return float(guess) == float(answer)
    except ValueError:
        return False


def _entry(row: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """Return the data set and its item. Raises DataFailure."""
    name = row.get("task")
    seed = row.get("seed")
    index = row.get("index") or 0
    config = row.get("config") or {}
    if name in EVALUATING:
        raise DataFailure(
            where,
            f"the scorer of {name} evaluates the policy's text as Python, outside the sandbox:"
            " leave it out",
        )
    if name in RUNNING:
        raise DataFailure(
            where,
            f"{name} runs programs of its data, or holds other tasks: name a single task",
        )
    are_numbers = isinstance(seed, int) and isinstance(index, int)
    if not isinstance(name, str) or not are_numbers or not isinstance(config, Mapping):
        raise DataFailure(
            where,
            f"task {name!r}, seed {seed!r}, index {index!r}, config {config!r}: a name, numbers, a"
            " mapping",
        )
    size = row.get("size") or index + 1
    if not isinstance(size, int) or not 0 <= index < size:
        raise DataFailure(where, f"index {index} lies outside the data set of size {size!r}")
    # Parquet fills columns with nulls.
    options = {key: value for key, value in config.items() if value is not None}
    try:
        dataset = _dataset(name, seed, size, json.dumps(options, sort_keys=True))
        return dataset, dataset[index]
    except Exception as error:
        # The package's generator raises any error for a config.
        raise DataFailure(
            where, f"reasoning-gym cannot make {name}: {type(error).__name__}: {error}"
        ) from error


@lru_cache(maxsize=256)
def _dataset(name: str, seed: int, size: int, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))
