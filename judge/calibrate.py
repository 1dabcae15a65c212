"""Calibration of a judge over labelled items: accuracy, Cohen's kappa, false positives on attacks,
and drift.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.files import write_whole
from rayloop.judge.api import JudgeUnscored, JudgeVerdict, Result, VerdictKind
from rayloop.judge.client import JudgeClient
from rayloop.judge.rubric import Labelled, calibration
from rayloop.judge.transport import DRIFT

logger = logging.getLogger(__name__)

CALIBRATION = "judge_calibration.json"
"""The newest calibration, beside the judge's announcement: what the console shows."""


class Gate(SettingsModel):
    """What a judge must reach on the calibration set to be trusted with rewards."""

    min_accuracy: float = Field(0.85, ge=0, le=1)
    """The share of right verdicts."""
    min_kappa: float = Field(0.6, ge=-1, le=1)
    """Agreement beyond chance; 0.6 is usually called substantial."""
    max_attack_rate: float = Field(0.02, ge=0, le=1)
    """The share of attacks that may be judged right."""
    max_unscored: float = Field(0.0, ge=0, le=1)
    """The share of items that may have no verdict."""


@dataclass(frozen=True, slots=True)
class Score:
    """Figures over ``count`` items with a verdict; NaN where there is nothing to divide by.

    ``false_positives``: the share of items labelled incorrect that were judged correct;
    ``false_negatives`` the other way round. ``attack_rate``: of ``attacks``.
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
    """The first ``per_group`` items of each data source with each label, and of each kind of
    attack: a quick check.
    """
    groups: dict[tuple[str, str], list[Labelled]] = {}
    for one in items:
        groups.setdefault((one.kind, "") if one.attack else (one.family, one.verdict), []).append(
            one
        )
    return [one for group in groups.values() for one in group[:per_group]]


async def measure(
    client: JudgeClient, items: Sequence[Labelled], patience: float, *, fresh: bool = False
) -> list[Result]:
    """The judge's result for each item, within ``patience`` seconds.

    ``fresh``: neither rules nor caches answer.
    """
    asked = [one.item.model_copy(update={"fresh": fresh}) for one in items]
    return list(await asyncio.gather(*(client.judge(item, patience) for item in asked)))


def score(name: str, items: Sequence[Labelled], answers: Sequence[Result]) -> Score:
    """Compare labels and verdicts.

    Kappa is Cohen's (1960): (observed - expected) / (1 - expected) agreement.
    """
    pairs = [
        (one, answer.verdict)
        for one, answer in zip(items, answers, strict=True)
        if isinstance(answer, JudgeVerdict)
    ]
    right, wrong = VerdictKind.CORRECT, VerdictKind.INCORRECT
    observed = _share([one.verdict == verdict for one, verdict in pairs])
    labelled, judged = (
        _share([one.verdict == right for one, _ in pairs]),
        _share([v == right for _, v in pairs]),
    )
    expected = labelled * judged + (1 - labelled) * (1 - judged)
    attacks = [verdict == right for one, verdict in pairs if one.attack]
    return Score(
        name,
        count=len(pairs),
        accuracy=observed,
        kappa=(observed - expected) / (1 - expected) if expected < 1 else math.nan,
        false_positives=_share([v == right for one, v in pairs if one.verdict == wrong]),
        false_negatives=_share([v == wrong for one, v in pairs if one.verdict == right]),
        attacks=len(attacks),
        attack_rate=_share(attacks),
        unscored=len(items) - len(pairs),
    )


def failures(found: Score, gate: Gate) -> list[str]:
    """The conditions of the gate that a judge fails, in words; empty when it passes."""
    unscored = found.unscored / max(found.count + found.unscored, 1)
    checks: list[tuple[bool, str]] = [
        (
            found.accuracy >= gate.min_accuracy,
            f"accuracy {found.accuracy:.3f}, at least {gate.min_accuracy:g} wanted",
        ),
        (
            found.kappa >= gate.min_kappa,
            f"kappa {found.kappa:.3f}, at least {gate.min_kappa:g} wanted",
        ),
        (
            found.attack_rate <= gate.max_attack_rate,
            f"{found.attack_rate:.3f} of attacks won, {gate.max_attack_rate:g} allowed",
        ),
        (
            unscored <= gate.max_unscored,
            f"{unscored:.3f} without a verdict, {gate.max_unscored:g} allowed",
        ),
    ]
    return [text for passed, text in checks if not passed]


async def second_opinions(
    client: JudgeClient, items: Sequence[Labelled], answers: Sequence[Result], patience: float
) -> list[tuple[Labelled, JudgeVerdict, JudgeVerdict]]:
    """The items that rules decided, each with their verdict and the model's own; without those that
    no model judges.
    """
    ruled = [
        (one, v)
        for one, v in zip(items, answers, strict=True)
        if isinstance(v, JudgeVerdict) and v.decided_by == "rules"
    ]
    again = await measure(client, [one for one, _ in ruled], patience, fresh=True)
    pairs = zip(ruled, again, strict=True)
    return [
        (one, rule, own)
        for (one, rule), own in pairs
        if isinstance(own, JudgeVerdict) and own.decided_by == "model"
    ]


async def calibrate(
    client: JudgeClient,
    gate: Gate,
    patience: float = 600.0,
    say: Callable[[str], None] = print,
    *,
    drift: bool = False,
    keep: Path | None = None,
) -> bool:
    """Ask the judge the whole set (or the drift subset), and the model what rules decided; print
    the table, write it and the items on which rules and model differ to ``keep`` as JSON, and
    return whether it passes the gate.
    """
    items = drift_subset(calibration()) if drift else calibration()
    answers = await measure(client, items, patience)
    by_rule = sum(
        isinstance(answer, JudgeVerdict) and answer.decided_by == "rules" for answer in answers
    )
    opinions = await second_opinions(client, items, answers, patience)
    disputed = [(one, rule, own) for one, rule, own in opinions if rule.verdict is not own.verdict]
    labels = sorted({answer.backend for answer in answers if answer.backend})

    say(
        f"{client.connection.url}: {len(items)} items, backend {', '.join(labels) or 'unknown'}"
        f" ({client.fingerprint})"
    )
    say(HEADER)
    scores = []
    for family in dict.fromkeys(one.family for one in items):
        part = [
            (one, answer)
            for one, answer in zip(items, answers, strict=True)
            if one.family == family
        ]
        scores.append(score(family, [one for one, _ in part], [answer for _, answer in part]))
    whole = score("all", items, answers)
    for line in (*scores, whole):
        say(str(line))

    say(f"{by_rule} of {len(items)} were decided by rules, without a model")
    say(f"the model itself, asked about {len(opinions)} of them, differs on {len(disputed)}")
    for one, rule, own in disputed[:3]:
        say(
            f"  {one.id}: {one.item.answer!r} for {one.item.reference!r}: rules {rule.verdict},"
            f" model {own.verdict}"
        )
    for answer in [answer for answer in answers if isinstance(answer, JudgeUnscored)][:3]:
        say(f"no verdict: {answer.kind}: {answer.reason}")

    problems = failures(whole, gate)
    if keep:
        about = {
            "time": time.time(),
            "url": client.connection.url,
            "fingerprint": client.fingerprint,
            "problems": problems,
        }
        differ = [
            {
                "item": one.id,
                **one.item.model_dump(include={"question", "reference", "answer"}),
                "label": one.verdict,
                "rules": rule.verdict,
                "model": own.verdict,
                "reason": own.reason,
            }
            for one, rule, own in disputed
        ]
        kept = {
            **about,
            "scores": [asdict(of) for of in (*scores, whole)],
            "asked": len(opinions),
            "disputed": differ,
        }
        write_whole(keep, json.dumps(kept).encode())
    say(f"does not pass: {'; '.join(problems)}" if problems else "passes")
    return not problems


class DriftWatch:
    """Repeats the drift subset during training and compares it with its first result.

    One check is one small batch.
    """

    def __init__(self, client: JudgeClient, tolerance: float, patience: float) -> None:
        self.client, self.tolerance, self.patience = client, tolerance, patience
        self.items = drift_subset(calibration())
        self.first: dict[str, VerdictKind] = {}

    async def check(self) -> float | None:
        """The share of verdicts that differ from an item's first, with a warning beyond the
        tolerance; None for the first check.
        """
        answers = await measure(self.client, self.items, self.patience, fresh=True)
        now = {
            one.id: answer.verdict
            for one, answer in zip(self.items, answers, strict=True)
            if isinstance(answer, JudgeVerdict)
        }
        differ = [verdict != self.first[key] for key, verdict in now.items() if key in self.first]
        # The earliest verdict of an item stays; an item that had none yet gets its first one here.
        self.first = now | self.first
        if not differ:
            return None
        changed = _share(differ)
        DRIFT.set(changed)
        if changed > self.tolerance:
            logger.warning(
                "the judge at %s drifts: %.0f %% of %d verdicts differ from those at the start"
                " (%s)",
                self.client.connection.url,
                100 * changed,
                len(differ),
                self.client.fingerprint,
            )
        return changed


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else math.nan
