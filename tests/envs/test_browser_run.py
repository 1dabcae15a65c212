"""A whole run in browsers, two kinds of them in one batch, in which Chromium is killed: it finishes
all the same.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from rayloop.core.protocols import StepResult
from rayloop.envs.browser import processes
from rayloop.envs.browser.miniwob import MiniWob
from rayloop.envs.browser.web import WebPage
from tests.envs.pages import button, write
from tests.envs.programs import needs
from tests.support.models import grounding_model as grounding_model
from tests.support.runs import eventually, run, settings

pytest.importorskip("playwright", reason="make test-env installs playwright")

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap"), pytest.mark.timeout(600)]

PAGES = ("click-test-2", "click-button", "click-dialog", "focus-text")


def clicked(text: str) -> str:
    """What a model without any training says, as a click somewhere."""
    return f"Action: click(start_box='({20 + len(text) * 7 % 120},{60 + len(text) * 13 % 140})')"


class Clicks(MiniWob):
    def step(self, text: str) -> StepResult:
        return super().step(clicked(text))


class ClicksOnPages(WebPage):
    def step(self, text: str) -> StepResult:
        return super().step(clicked(text))


def browsers(actor: int) -> set[int]:
    """Outermost processes of the browsers below an actor."""
    found = set()
    for pid in processes.tree(actor):
        line = processes.command_line(pid)
        if os.path.basename(line[0] if line else "") == "bwrap" and any(
            "--rayloop-browser" in word for word in line
        ):
            found.add(pid)
    return found


def test_a_run_finishes_though_its_browser_is_killed(grounding_model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "site", good=button("window.done = true"))
    rows = [
        {"prompt": "{instruction}", "environment": "miniwob", "page": page, "seed": n}
        for n, page in enumerate(PAGES)
    ]
    own = {"url": "good.html", "check": "window.done === true", "instruction": "Go."}
    rows += [
        {"prompt": "{instruction}", "environment": "pages", **own, "id": f"own-{n}"}
        for n in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    here = "tests.envs.test_browser_run"
    config = settings(
        tmp_path,
        grounding_model,
        data={"train": str(tmp_path / "rows.jsonl")},
        environment={
            "language": "ui_tars",
            "kinds": {
                "miniwob": {"use": f"{here}:Clicks"},
                "pages": {
                    "use": f"{here}:ClicksOnPages",
                    "with": {"folder": str(folder), "width": 168, "height": 224},
                },
            },
            "episode": {"max_turns": 3},
        },
    )
    with run(config) as made:
        made.until(lambda: made.metrics, "a step", 330)
        actor = made.actor("EnvironmentActor").pid
        before = browsers(actor)
        pids = set(processes.tree(actor)) - {actor}
        assert before
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        made.until(lambda: browsers(actor) - before, "another browser")
        pids |= set(processes.tree(actor)) - {actor}
        made.ends(0)
        assert made.metrics[-1]["step"] == 3
        eventually(
            lambda: not any(map(processes.renders, pids)), "the pages' processes are gone", 10
        )
