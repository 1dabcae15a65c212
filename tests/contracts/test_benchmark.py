"""What a recipe's training reward pays, its benchmarks read: no answer is right in training and
wrong when it is measured.
"""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rayloop import recipes
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import ImageRef, Task, Trajectory, Turn
from rayloop.rewards.saved import EMPTY_TRAJECTORY
from rayloop.run.config import RunConfig, read
from tests.support.runs import ROOT

SHOWN = ImageRef("", 1920, 1080, (1, 1092 // 14, 1932 // 14), 0)
"""A screenshot that the model was shown as 1932 x 1092."""
LOOKED = replace(
    EMPTY_TRAJECTORY,
    turns=(Turn("prompt", (), (SHOWN,)), Turn("assistant", (), (), (), executed=None)),
)
BOX, PIXELS, THOUSANDTHS = "0.25, 0.25, 0.5, 0.5", "483, 273, 966, 546", "250, 250, 500, 500"
BOXES = tuple(
    form.format(box)
    for box in (BOX, PIXELS, THOUSANDTHS, "480, 270, 960, 540")
    for form in (
        "<bbox>[{}]</bbox>",
        '```json\n[{{"bbox_2d": [{}], "label": "x"}}]\n```',
        "It is at [{}] .",
        "bbox: [{}]",
        "<box>{}</box>",
        "<reasoning>[1]</reasoning><bbox>[{}]</bbox>",
        "[{}]",
        '{{"bbox": [{}]}}',
        "<click>{}</click>",
        "<point>{}</point>",
    )
)
OPTIONS = tuple(
    form.format(said)
    for said in ("B", "(B)", "blue", "B. blue", "(B) blue", "b", "A")
    for form in (
        "<answer>\\boxed{{{}}}</answer>",
        "<answer>\n\\boxed{{{}}}\n</answer>",
        "<answer>{}</answer>",
        "{}",
        "I see. {}",
    )
)
NUMBERS = tuple(
    form.format(said)
    for said in ("12", "12.0", "12%", "12.3", "twelve", "13", "$12")
    for form in (
        "<think>It is.</think><answer>{}</answer>",
        "<answer> {} </answer>",
        "{}",
        "<answer>x</answer><answer>{}</answer>",
    )
)
CHART = {"question": "How many?"}
JUDGED = "reward.source.with.accuracy={use: rayloop.recipes.pyvision.verifiers:OptionReward}"
"""In place of the judge, whose verdict no benchmark repeats."""


@dataclass(frozen=True)
class Case:
    """A training configuration, benchmarks of its recipe, a task, answers, and the component that
    says ``right`` in each. ``changes`` of the training; ``kept``: of the evaluation too, which has
    the same command line. ``unread``: forms that training pays and the benchmark's published rule
    does not.
    """

    config: str
    benchmarks: tuple[str, ...]
    task: Task
    answers: tuple[str, ...]
    right: str
    changes: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


SCREENS = Task("t", (), [0.25, 0.25, 0.5, 0.5], extra={"instruction": "x"})
QUESTION = Task("t", (), "B", extra={"question": "Which colour?\n(A) red\n(B) blue\n(C) green"})
CASES = (
    *(
        Case(
            f"arc_vision/{name}",
            ("screenspot", "screenspot_v2", "screenspot_pro"),
            SCREENS,
            BOXES,
            "iou",
        )
        for name in ("arc_vision", "presets/faithful", "quickstart", "quickstart_original")
    ),
    Case(
        "arc_vision/arc_vision",
        ("screenspot",),
        SCREENS,
        BOXES,
        "iou",
        kept=("reward.source.with.variant=library",),
    ),
    Case(
        "arc_vision/arc_vision",
        ("screenspot",),
        SCREENS,
        BOXES,
        "iou",
        kept=("reward.source.with.pixels=thousandths",),
    ),
    *(
        Case(
            f"pyvision/{name}",
            ("vstar", "hr_bench_4k", "hr_bench_8k"),
            QUESTION,
            OPTIONS,
            "accuracy",
            (JUDGED,),
        )
        for name in ("pyvision", "deepeyes")
    ),
    Case(
        "pyvision/quickstart",
        ("vstar", "hr_bench_4k", "hr_bench_8k"),
        QUESTION,
        OPTIONS,
        "accuracy",
    ),
    Case(
        "chart_rvr/quickstart",
        ("chartqa", "plotqa"),
        Task("t", (), "12", extra=CHART),
        NUMBERS,
        "accuracy",
        unread=("%", "$", "twelve"),
    ),
)
READ_IN_PLAY = {"arpo", "desktop", "digits"}
"""Recipes without a benchmark that reads answers: an environment says what is right, or there is
none.
"""


def scored(config: RunConfig, case: Case, text: str, trajectory: Trajectory) -> float:
    source: Any = config.reward.source.build()
    context = ScoreContext(0, [text])
    if config.reward.per == "group":
        made = source.score_group([trajectory], case.task, [context])
    else:
        made = source.score(trajectory, case.task, context)
    outcome = asyncio.run(made) if inspect.isawaitable(made) else made
    outcome = outcome[0] if config.reward.per == "group" else outcome
    assert isinstance(outcome, Scored), outcome
    return outcome.components[case.right]


def configured(case: Case, benchmark: str | None) -> RunConfig:
    """The training's configuration, or with a benchmark laid over it."""
    file = ROOT / f"recipes/{case.config}.yaml"
    if benchmark is None:
        return read(file, [*case.changes, *case.kept])
    return read(file, list(case.kept), [recipes.benchmarks()[benchmark]])


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.config.replace("/", "-") + "".join(case.kept)) for case in CASES],
)
def test_what_training_pays_the_benchmarks_read(case: Case) -> None:
    paid = [
        text for text in case.answers if scored(configured(case, None), case, text, LOOKED) > 0.99
    ]
    assert paid, "training pays some of them"
    for name in case.benchmarks:
        config = configured(case, name)
        unread = [text for text in paid if scored(config, case, text, LOOKED) <= 0.99]
        assert unread == [text for text in paid if any(form in text for form in case.unread)], name


def test_each_recipe_has_a_case_or_none_of_its_benchmarks_reads_answers() -> None:
    folders = {Path(path).parent.parent.name for path in recipes.benchmarks().values()}
    assert {case.config.partition("/")[0] for case in CASES} | READ_IN_PLAY >= folders
