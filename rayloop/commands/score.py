"""``score``: a recipe's reward on saved completions, without a run, a model or Ray."""

import argparse
import asyncio
import inspect
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rayloop import recipes
from rayloop.config.settings import Component
from rayloop.config.yaml_source import parse_value
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind
from rayloop.core.protocols import ScoreContext
from rayloop.core.threads import complete
from rayloop.data.rows import rows
from rayloop.measure.intervals import calibration_error, interval
from rayloop.rewards.functions import as_outcome, infrastructure_errors
from rayloop.rewards.saved import OfflineScoring, Saved

BATCH_ROWS = 512
"""Rows that are scored at the same time, so that an embedder or a judge gets batches."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    names = recipes.having("score")
    parser.add_argument("recipe", metavar="RECIPE", choices=names, help=", ".join(names))
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="JSONL or parquet with completions and truths, or a run's rollouts",
    )
    parser.add_argument(
        "--variant", metavar="V", help="definition of the rewards (default: the recipe's first)"
    )
    parser.add_argument(
        "--reward", metavar="NAME", help="one component instead of the whole reward"
    )
    setting = "a setting of the reward, for example tolerance=0.1; may be repeated"
    parser.add_argument(
        "--with", dest="options", action="append", default=[], metavar="KEY=VALUE", help=setting
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one JSON line per row on stdout and a summary on stderr.

    Returns 0; raises ConfigError.
    """
    scoring: OfflineScoring = import_module(f"rayloop.recipes.{arguments.recipe}.score").SCORING
    variant = arguments.variant or scoring.variants[0]
    reward = scoring.aliases.get(arguments.reward, arguments.reward)
    for option, value, choices in (
        ("--variant", variant, scoring.variants),
        ("--reward", reward, scoring.rewards),
    ):
        if value is not None and value not in choices:
            raise ConfigError(f"{option} {value}: {arguments.recipe} has {', '.join(choices)}")
    source = built(scoring, variant, reward, arguments.options)
    summary = complete(score(arguments.file, scoring, source, variant, reward))
    for line in summary.lines(scoring, variant):
        print(line, file=sys.stderr)
    return 0


def built(scoring: OfflineScoring, variant: str, reward: str | None, options: Sequence[str]) -> Any:
    """The reward with its settings. Raises ConfigError that names the setting."""
    settings = scoring.settings(variant, reward)
    for option in options:
        name, equals, text = option.partition("=")
        *path, last = name.split(".")
        if not equals or not all((*path, last)):
            raise ConfigError(
                f"--with {option}: expected KEY=VALUE, for example --with tolerance=0.1"
            )
        place = settings
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--with {option}: {part} has no keys")
        place[last] = parse_value(text, f"--with {name}")
    use = scoring.others.get(variant, scoring.use)
    try:
        return Component.model_validate({"use": use, "with": settings}).build()
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            key = ".".join(map(str, problem["loc"])) or scoring.use
            problems.append(f"{key}: {problem['msg']}")
        raise ConfigError("the reward's settings:\n  " + "\n  ".join(problems)) from error


@dataclass
class ScoreSummary:
    """Figures over all rows of a file."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    sure: list[tuple[float, float]] = field(default_factory=list)
    """The stated confidence of each answer, and 1.0 if it is right."""
    flags: Counter[str] = field(default_factory=Counter)
    unscored: Counter[str] = field(default_factory=Counter)
    saved: list[Saved] = field(default_factory=list)
    seconds: float = 0.0
    """CPU seconds of scoring, without reading and writing."""
    components: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        if isinstance(outcome, Unscored):
            self.unscored[outcome.kind] += 1
            return
        self.flags.update(outcome.flags)
        self.components += len(outcome.components)
        if "confidence" in outcome.components and "right" in outcome.components:
            self.sure.append((outcome.components["confidence"], outcome.components["right"]))
        for name, value in {"reward": outcome.value, **outcome.components}.items():
            self.values[name].append(value)

    def lines(self, scoring: OfflineScoring, variant: str) -> Iterator[str]:
        """The summary, line by line."""
        scored = len(self.values["reward"])
        unscored = sum(self.unscored.values())
        yield f"{scored} scored ({variant}), {unscored} unscored{_counts(self.unscored)}"
        width = max(map(len, self.values))
        for name, values in self.values.items():
            if values:
                mean, low, high = interval(values)
                bounds = "too few for an interval" if low is None else f"[{low:.4f}, {high:.4f}]"
                number = "" if len(values) == scored else f"  of {len(values)}"
                yield f"  {name:<{width}}  {mean:.4f}  {bounds}{number}"
        if self.sure:
            confidences = [confidence for confidence, _ in self.sure]
            error = calibration_error(confidences, [right for _, right in self.sure])
            yield f"expected calibration error of {len(self.sure)} stated confidences: {error:.4f}"
        if self.flags:
            yield f"flags{_counts(self.flags)}"
        if self.seconds:
            yield (
                f"{self.seconds:.3f} s of CPU for scoring: {scored / self.seconds:,.0f}"
                f" completions/s, {self.components / self.seconds:,.0f} components/s"
            )
        yield from scoring.notes(self.saved, variant)


def _counts(counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    return ": " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


async def score(
    path: Path, scoring: OfflineScoring, source: Any, variant: str, reward: str | None
) -> ScoreSummary:
    """Score and print each row in the file's order.

    Raises ConfigError for a file that cannot be read.
    """
    summary = ScoreSummary()
    completions = _read(path, scoring)
    while True:
        batch = list(islice(completions, BATCH_ROWS))
        if not batch:
            return summary
        began = time.process_time()
        outcomes = await _outcomes(source, [saved for _, saved in batch], reward)
        summary.seconds += time.process_time() - began
        for (where, saved), outcome in zip(batch, outcomes, strict=True):
            summary.add(outcome)
            if isinstance(saved, Saved):
                summary.saved.append(saved)
            sys.stdout.write(json.dumps(_line(where, saved, outcome, scoring, variant)) + "\n")


def _read(path: Path, scoring: OfflineScoring) -> Iterator[tuple[str, Saved | DataFailure]]:
    """Each row with its place; for a row that cannot be read the failure."""
    for where, row in rows(path):
        if isinstance(row, DataFailure):
            yield where, row
        elif not isinstance(row, Mapping):
            yield where, DataFailure(where, f"expected an object, found {type(row).__name__}")
        else:
            try:
                yield where, scoring.read(row, where)
            except DataFailure as failure:
                yield where, failure


async def _outcomes(
    source: Any, batch: Sequence[Saved | DataFailure], reward: str | None
) -> list[Outcome]:
    """The outcome of each completion, of one component only if ``reward`` names it.

    An exception is an outcome without a reward.
    """
    results: list[Any] = [
        saved if isinstance(saved, DataFailure) else _result(source, saved) for saved in batch
    ]
    places = [place for place, result in enumerate(results) if inspect.isawaitable(result)]
    answers = await asyncio.gather(*(results[place] for place in places), return_exceptions=True)
    for place, answer in zip(places, answers, strict=True):
        results[place] = answer
    return [_component(_outcome(result, source), reward) for result in results]


def _result(source: Any, saved: Saved) -> Any:
    """The reward's result, which may be awaitable, or its exception."""
    try:
        transcript = saved.row.get("transcript")
        if not isinstance(transcript, str):
            transcript = None
        context = ScoreContext(saved.step, saved.texts, transcript=transcript)
        return source.score(saved.trajectory, saved.task, context)
    except Exception as error:
        return error


def _outcome(result: Any, source: Any) -> Outcome:
    """The outcome of a result or an exception.

    Raises ConfigError, and an exception that is not an Exception.
    """
    if not isinstance(result, BaseException):
        return as_outcome(result)
    if isinstance(result, DataFailure):
        return Unscored(UnscoredKind.BAD_DATA, str(result))
    if isinstance(result, ConfigError) or not isinstance(result, Exception):
        raise result
    is_unavailable = isinstance(result, infrastructure_errors(source))
    kind = UnscoredKind.REWARD_UNAVAILABLE if is_unavailable else UnscoredKind.GRADER_ERROR
    return Unscored(kind, f"{type(result).__name__}: {result}")


def _component(outcome: Outcome, reward: str | None) -> Outcome:
    """The outcome with the component ``reward`` as its value; the outcome itself for None."""
    if reward is None or isinstance(outcome, Unscored):
        return outcome
    if reward not in outcome.components:
        return Unscored(UnscoredKind.NOT_APPLICABLE, f"this variant has no component {reward}")
    value = outcome.components[reward]
    return Scored(value, {reward: value}, outcome.flags)


def _line(
    where: str, saved: Saved | DataFailure, outcome: Outcome, scoring: OfflineScoring, variant: str
) -> Mapping[str, Any]:
    row = where.rpartition(":")[2]
    line: dict[str, Any] = {"row": int(row) if row.isdigit() else where}
    if isinstance(saved, Saved):
        line |= {"id": saved.task.id, "answer": scoring.answer(saved, variant)}
    if isinstance(outcome, Unscored):
        return line | {"unscored": str(outcome.kind), "reason": outcome.reason}
    return line | {
        "value": outcome.value,
        "components": dict(outcome.components),
        "flags": list(outcome.flags),
    }
