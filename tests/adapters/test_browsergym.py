"""BrowserGym's MiniWoB++ tasks, in the Python that has the package: what pays, what is no action,
what fails, and a step.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayloop.core.failures import EnvironmentFailed, EnvironmentHung
from rayloop.core.types import EndReason
from tests.adapters.conftest import Train, hostile_played, played
from tests.envs.programs import needs
from tests.support import hostile_turns
from tests.support.runs import ROOT

PYTHON = ROOT / ".venv-browsergym/bin/python"
pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(280),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="browsergym is not installed here (make test-adapters installs it)",
    ),
    needs("chromium-headless-shell"),
]


def kind(**changes: Any) -> dict[str, Any]:
    options = {
        "run": f"{ROOT}/rayloop/envs/agents/browsergym_env.py:play",
        "python": str(PYTHON),
        "preload": ["openai", "browsergym.miniwob", "browsergym.utils.obs"],
        "deadline": 120,
        **changes,
    }
    return {"use": "rayloop.envs.agent_env:AgentEnv", "with": options}


def row(task: str = "click-test", seed: int = 1, **columns: Any) -> dict[str, Any]:
    return {"task": f"miniwob.{task}", "seed": seed, "see": "axtree", **columns}


def browsers() -> list[psutil.Process]:
    """Those below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "chrom" in process.name() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def lines(processes: list[psutil.Process]) -> list[tuple[psutil.Process, list[str]]]:
    """The command of each that lives, read before any is killed, as they end one another."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            if line := process.cmdline():
                found.append((process, line))
    return found


def button(name: str) -> Callable[[str], str]:
    """Clicks the button that the newest tree shows by this name."""

    def says(seen: str) -> str:
        bid = re.findall(rf"\[(\w+)\] button '{name}'", seen)[-1]
        return f"I click('{bid}')"

    return says


@pytest.mark.parametrize("seed", range(5))
def test_the_page_pays(seed: int) -> None:
    made = played(kind(), row(seed=seed), button("Click Me!"))
    assert (made.end_reason, made.env_result) == (EndReason.DONE, 1.0), made
    assert [turn.sampled for turn in made.turns].count(True) == 1
    assert not browsers()


def test_a_screenshot_is_shown_and_a_wrong_click_pays_nothing() -> None:
    right, wrong = (
        played(kind(), row("click-test-2", see="screenshot axtree"), button(name))
        for name in ("ONE", "TWO")
    )
    assert (right.env_result, wrong.env_result) == (1.0, 0.0)
    (image,) = [image for turn in right.turns for image in turn.images]
    assert (image.width, image.height) == (498, 321), "332 x 214, half as large again"


@pytest.mark.parametrize(("success_at", "paid"), [({}, 1), ({"success_at": None}, 3)])
def test_one_of_three_cards_is_the_greatest(success_at: dict[str, Any], paid: int) -> None:
    """The page gives .1 for a wrong card, and BrowserGym makes 1 of every reward above 0."""
    results = [
        played(kind(), row("find-greatest", steps=4, **success_at), chooses_card(number)).env_result
        for number in range(3)
    ]
    assert results.count(1.0) == paid
    assert results.count(0.0) == 3 - paid


CARDS = ("13", "15", "17")
"""BrowserGym's ids of the page's cards, which the tree leaves out."""


def chooses_card(number: int) -> Callable[[str], str]:
    """Clicks the card of that number, from the left, and then Submit."""
    clicks: list[str] = []

    def says(seen: str) -> str:
        if not clicks:
            (submit,) = re.findall(r"\[(\d+)\] button 'Submit'", seen)
            clicks.extend([f"click('{submit}')", f"click('{CARDS[number]}')"])
        return clicks.pop() if clicks else "noop()"

    return says


def test_what_is_no_action_is_answered_and_never_run(tmp_path: Path) -> None:
    made_by = tmp_path / "made"
    wrong = [
        f"open({str(made_by)!r}, 'w').close()",
        f"click(open({str(made_by)!r}, 'w'))",
        "page.context.browser.close()",
        "noop(1e12)",
        "click('no such')",
        "I do not know.",
    ]
    left, seen = list(wrong), list[str]()

    def says(text: str) -> str:
        seen.append(text)
        return left.pop(0) if left else button("Click Me!")(text)

    made = played(kind(), row(), says)
    assert (made.env_result, [turn.sampled for turn in made.turns].count(True)) == (
        1.0,
        len(wrong) + 1,
    )
    assert seen[-1].count("user\nError: ") == len(wrong)
    assert "Invalid action type 'noop'" in seen[-1]
    assert "Received an empty action" in seen[-1]
    assert not made_by.exists()


def test_the_last_step_ends_the_episode_with_what_it_earned() -> None:
    made = played(kind(), row(steps=2), lambda _: "scroll(0, 1)")
    assert (made.end_reason, made.env_result) == (EndReason.DONE, 0.0)
    assert [turn.sampled for turn in made.turns].count(True) == 2


def test_hostile_answers_are_scored() -> None:
    texts = [*hostile_turns.moves()[::6], *hostile_turns.texts(6)[::12]]
    assert hostile_played(kind(), row("enter-text", steps=8), texts)


@pytest.mark.parametrize("part", ["browser", "renderer"])
def test_a_browser_that_dies_is_never_a_reward(part: str) -> None:
    def says(seen: str) -> str:
        for one, line in lines(browsers()):
            kinds = [
                word.removeprefix("--type=") for word in line if word.startswith("--type=")
            ] or ["browser"]
            if line[0] != "/bin/sh" and kinds == [part]:
                one.kill()
        return button("Click Me!")(seen)

    with pytest.raises(EnvironmentFailed, match=r"closed|crashed|deadline"):
        played(kind(deadline=60), row(), says)
    assert not browsers()


def test_a_page_that_is_missing_is_never_a_reward(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="ERR_FILE_NOT_FOUND"):
        played(kind(env={"MINIWOB_URL": f"file://{tmp_path}/"}), row(), button("Click Me!"))


def test_an_agent_that_must_end_takes_its_browser_along() -> None:
    def says(seen: str) -> str:
        for one in browsers():
            one.suspend()
        return button("Click Me!")(seen)

    with pytest.raises(EnvironmentHung, match="deadline"):
        played(kind(deadline=30), row(), says)
    assert not browsers()


@pytest.mark.parametrize("preload", [["browsergym.miniwob"], []])
def test_a_python_without_the_package_is_named_with_what_to_do(preload: list[str]) -> None:
    say = (
        f"No module named 'browsergym'.*: {sys.executable} -m pip install browsergym-miniwob"
        " miniwob openai\n"
    )
    with pytest.raises(EnvironmentFailed, match=say):
        played(kind(python=sys.executable, preload=preload), row(), button("Click Me!"))


def test_a_step_is_trained(picture_model: Path, train: Train) -> None:
    run = train(
        picture_model,
        [
            {"prompt": "Look.", "task": "miniwob.click-test", "seed": seed, "steps": 2}
            for seed in range(4)
        ],
        data__reader={"use": "rayloop.data.dataset:ChatRows"},
        environment={"episodes_at_once": 2, "episode": {"environment": kind(), "max_turns": 2}},
    )
    assert run.metrics[0]["rollout/turns/mean"] == 2
