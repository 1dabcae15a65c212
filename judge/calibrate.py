"""Calibration of a judge over labelled items.

It measures accuracy, Cohen's kappa, false positives on attacks, and drift.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeGuard

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.files import write_whole
from rayloop.judge.api import Decider, JudgeUnscored, JudgeVerdict, Result, VerdictKind
from rayloop.judge.client import JudgeClient
from rayloop.judge.rubric import Labelled, calibration
from rayloop.judge.transport import DRIFT

logger = logging.getLogger(__name__)

CALIBRATION = "judge_calibration.json"
"""The file of the newest calibration, next to the judge's announcement; the console shows it."""
_MAX_LINES = 3
"""Lines that are printed about disputed items, and about items without a verdict."""


class Gate(SettingsModel):
    """The figures that a judge must reach on the calibration set to be trusted with rewards."""

    min_accuracy: float = Field(0.85, ge=0, le=1)
    """The share of right verdicts."""
    min_kappa: float = Field(0.6, ge=-1, le=1)
    """Agreement beyond chance; 0.6 is usually called substantial."""
    max_attack_rate: float = Field(0.02, ge=0, le=1)
    """The share of attacks that may be judged right."""
    max_unscored: float = Field(0.0, ge=0, le=1)
    """The share of items that may have no verdict."""


@dataclass(frozen=True)
class Score:
    """Figures over ``count`` items with a verdict; NaN for a share of no items.

    ``false_positives``: the share of items labelled incorrect that were judged correct;
    ``false_negatives`` the other way round. ``attack_rate``: the share of ``attacks`` judged
    correct.
    """

    name: str
    count: int
    accuracy: float
    kappa: float
    false_positives: float
    false_negatives: float
    attacks: int
    attack_rate: float
    unscored: int

    def __str__(self) -> str:
        return (
            f"{self.name:<14} {self.count:>5} {self.accuracy:>9.3f} {self.kappa:>7.3f}"
            f" {self.false_positives:>10.3f} {self.false_negatives:>10.3f} {self.attacks:>8}"
            f" {self.attack_rate:>12.3f} {self.unscored:>9}"
        )


HEADER = (
    f"{'':<14} {'items':>5} {'accuracy':>9} {'kappa':>7} {'false pos.':>10} {'false neg.':>10}"
    f" {'attacks':>8} {'attacks won':>12} {'unscored':>9}"
)


def drift_subset(items: Sequence[Labelled], per_group: int = 2) -> list[Labelled]:
    """The first ``per_group`` items of each data source with each label, and of each attack.

    The subset makes a quick check.
    """
    groups: dict[tuple[str, str], list[Labelled]] = {}
    for item in items:
        group = (item.kind, "") if item.attack else (item.family, item.verdict)
        groups.setdefault(group, []).append(item)
    subset = []
    for members in groups.values():
        subset += members[:per_group]
    return subset


async def measure(
    client: JudgeClient, items: Sequence[Labelled], patience: float, *, fresh: bool = False
) -> list[Result]:
    """The judge's result for each item, within ``patience`` seconds.

    ``fresh``: neither rules nor caches answer.
    """
    questions = [labelled.item.model_copy(update={"fresh": fresh}) for labelled in items]
    return list(await asyncio.gather(*(client.judge(item, patience) for item in questions)))


def score(name: str, items: Sequence[Labelled], answers: Sequence[Result]) -> Score:
    """Compare labels and verdicts.

    Kappa is Cohen's (1960): (observed - expected) / (1 - expected) agreement.
    """
    pairs = [
        (item, answer.verdict)
        for item, answer in zip(items, answers, strict=True)
        if isinstance(answer, JudgeVerdict)
    ]
    right = VerdictKind.CORRECT
    observed = _share([item.verdict == verdict for item, verdict in pairs])
    labelled_right = _share([item.verdict == right for item, _ in pairs])
    judged_right = _share([verdict == right for _, verdict in pairs])
    both_right = labelled_right * judged_right
    expected = both_right + (1 - labelled_right) * (1 - judged_right)
    kappa = (observed - expected) / (1 - expected) if expected < 1 else math.nan
    verdicts_on_wrong = [verdict for item, verdict in pairs if item.verdict != right]
    verdicts_on_right = [verdict for item, verdict in pairs if item.verdict == right]
    attacks = [verdict == right for item, verdict in pairs if item.attack]
    return Score(
        name,
        count=len(pairs),
        accuracy=observed,
        kappa=kappa,
        false_positives=_share([verdict == right for verdict in verdicts_on_wrong]),
        false_negatives=_share([verdict != right for verdict in verdicts_on_right]),
        attacks=len(attacks),
        attack_rate=_share(attacks),
        unscored=len(items) - len(pairs),
    )


def failures(figures: Score, gate: Gate) -> list[str]:
    """The conditions of the gate that a judge fails, in words; empty when it passes."""
    unscored = figures.unscored / max(figures.count + figures.unscored, 1)
    checks: list[tuple[bool, str]] = [
        (
            figures.accuracy >= gate.min_accuracy,
            f"accuracy {figures.accuracy:.3f}, at least {gate.min_accuracy:g} wanted",
        ),
        (
            figures.kappa >= gate.min_kappa,
            f"kappa {figures.kappa:.3f}, at least {gate.min_kappa:g} wanted",
        ),
        (
            figures.attack_rate <= gate.max_attack_rate,
            f"{figures.attack_rate:.3f} of attacks won, {gate.max_attack_rate:g} allowed",
        ),
        (
            unscored <= gate.max_unscored,
            f"{unscored:.3f} without a verdict, {gate.max_unscored:g} allowed",
        ),
    ]
    return [text for passed, text in checks if not passed]


@dataclass(frozen=True)
class Opinions:
    """The verdicts of the rules and of the model on one item."""

    item: Labelled
    rules: JudgeVerdict
    model: JudgeVerdict

    @property
    def differ(self) -> bool:
        """Whether rules and model disagree."""
        return self.rules.verdict is not self.model.verdict


async def second_opinions(
    client: JudgeClient, items: Sequence[Labelled], answers: Sequence[Result], patience: float
) -> list[Opinions]:
    """The items that rules decided, with the rules' verdict and the model's.

    Items that no model judges are left out.
    """
    decisions = [
        (item, answer)
        for item, answer in zip(items, answers, strict=True)
        if _is_decided_by(answer, "rules")
    ]
    model_answers = await measure(client, [item for item, _ in decisions], patience, fresh=True)
    return [
        Opinions(item, decision, answer)
        for (item, decision), answer in zip(decisions, model_answers, strict=True)
        if _is_decided_by(answer, "model")
    ]


def _is_decided_by(answer: Result, decider: Decider) -> TypeGuard[JudgeVerdict]:
    return isinstance(answer, JudgeVerdict) and answer.decided_by == decider


async def calibrate(
    client: JudgeClient,
    gate: Gate,
    patience: float = 600.0,
    say: Callable[[str], None] = print,
    *,
    drift: bool = False,
    keep: Path | None = None,
) -> bool:
    """Ask the judge the whole set, and return whether it passes the gate.

    With ``drift`` only the drift subset is asked. The model is asked too about the items that rules
    decided. ``say`` receives the table; ``keep`` is a file that gets it as JSON, with the items on
    which rules and model differ.
    """
    items = drift_subset(calibration()) if drift else calibration()
    answers = await measure(client, items, patience)
    opinions = await second_opinions(client, items, answers, patience)
    disputed = [opinion for opinion in opinions if opinion.differ]
    backends = sorted({answer.backend for answer in answers if answer.backend})
    scores = [*_family_scores(items, answers), score("all", items, answers)]
    problems = failures(scores[-1], gate)

    say(
        f"{client.connection.url}: {len(items)} items, backend {', '.join(backends) or 'unknown'}"
        f" ({client.fingerprint})"
    )
    say(HEADER)
    for line in scores:
        say(str(line))
    decided_by_rules = sum(_is_decided_by(answer, "rules") for answer in answers)
    say(f"{decided_by_rules} of {len(items)} were decided by rules, without a model")
    say(f"the model itself, asked about {len(opinions)} of them, differs on {len(disputed)}")
    for opinion in disputed[:_MAX_LINES]:
        item = opinion.item.item
        say(
            f"  {opinion.item.id}: {item.answer!r} for {item.reference!r}: rules"
            f" {opinion.rules.verdict}, model {opinion.model.verdict}"
        )
    unscored = [answer for answer in answers if isinstance(answer, JudgeUnscored)]
    for answer in unscored[:_MAX_LINES]:
        say(f"no verdict: {answer.kind}: {answer.reason}")

    if keep:
        report = {
            "time": time.time(),
            "url": client.connection.url,
            "fingerprint": client.fingerprint,
            "problems": problems,
            "scores": [asdict(line) for line in scores],
            "asked": len(opinions),
            "disputed": [_report(opinion) for opinion in disputed],
        }
        write_whole(keep, json.dumps(report).encode())
    say(f"does not pass: {'; '.join(problems)}" if problems else "passes")
    return not problems


def _family_scores(items: Sequence[Labelled], answers: Sequence[Result]) -> list[Score]:
    """The figures of each group of data sources, in the order of the items."""
    pairs: dict[str, list[tuple[Labelled, Result]]] = {}
    for item, answer in zip(items, answers, strict=True):
        pairs.setdefault(item.family, []).append((item, answer))
    scores = []
    for family, members in pairs.items():
        family_items, family_answers = zip(*members, strict=True)
        scores.append(score(family, family_items, family_answers))
    return scores


def _report(opinions: Opinions) -> dict[str, str]:
    """An item on which rules and model differ, for the file."""
    labelled = opinions.item
    return {
        "item": labelled.id,
        **labelled.item.model_dump(include={"question", "reference", "answer"}),
        "label": labelled.verdict,
        "rules": opinions.rules.verdict,
        "model": opinions.model.verdict,
        "reason": opinions.model.reason,
    }


@dataclass
class DriftWatch:
    """Repeats the drift subset during training and compares it with its first result.

    One check is one small batch.
    """

    client: JudgeClient
    tolerance: float
    patience: float

    def __post_init__(self) -> None:
        self.items = drift_subset(calibration())
        self.first: dict[str, VerdictKind] = {}

    async def check(self) -> float | None:
        """The share of verdicts that differ from an item's first; None for the first check.

        A share beyond the tolerance is logged as a warning.
        """
        answers = await measure(self.client, self.items, self.patience, fresh=True)
        verdicts = {
            item.id: answer.verdict
            for item, answer in zip(self.items, answers, strict=True)
            if isinstance(answer, JudgeVerdict)
        }
        differ = [
            verdict != self.first[item_id]
            for item_id, verdict in verdicts.items()
            if item_id in self.first
        ]
        # The earliest verdict of an item stays; an item without one gets its first one here.
        self.first = verdicts | self.first
        if not differ:
            return None
        share = _share(differ)
        DRIFT.set(share)
        if share > self.tolerance:
            logger.warning(
                "the judge at %s drifts: %.0f %% of %d verdicts differ from those at the start"
                " (%s)",
                self.client.connection.url,
                100 * share,
                len(differ),
                self.client.fingerprint,
            )
        return share


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else math.nan
