"""A whole run on desktops: some members break theirs, one loses its X server, and the run finishes
all the same.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayloop.core.protocols import StepResult
from rayloop.envs.desktop.environment import DesktopTasks
from rayloop.envs.desktop.session import missing
from rayloop.run.folder import RunFolder
from tests.support.models import grounding_model as grounding_model
from tests.support.runs import eventually, run, settings

LACKS = missing()
pytestmark = [
    pytest.mark.env,
    pytest.mark.skipif(bool(LACKS), reason=f"missing here: {LACKS}"),
    pytest.mark.timeout(600),
]
SOLVES = "Action: type(content='sort Data/fruit.txt > sorted.txt\\n')"
BREAKS = "Action: type(content='kill -9 -1\\n')"


class Types(DesktopTasks):
    """What a model without any training says, as one of two things that a person may type; then the
    episode is ended.
    """

    typed = ""

    def step(self, text: str) -> StepResult:
        if not self.typed:
            self.typed = BREAKS if len(text) % 2 else SOLVES
            return super().step(self.typed)
        return super().step("Action: wait()" if self.typed == BREAKS else "Action: finished()")


def servers(run: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(run).children(recursive=True):
        with suppress(psutil.Error):
            if process.name() == "Xvfb":
                found.append(process)
    return found


def test_a_run_on_desktops(grounding_model: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "{instruction}", "desktop": "sort-lines", "id": f"sort-{n}"} for n in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    size = {"limits": {"width": 320, "height": 240}, "react": 2.0}
    environment: dict[str, Any] = {"use": "tests.envs.test_desktop_run:Types", "with": size}
    config = settings(
        tmp_path,
        grounding_model,
        data={"train": str(tmp_path / "rows.jsonl")},
        environment={
            "language": "ui_tars",
            "episode": {"environment": environment, "max_turns": 4},
        },
        reward={"source": {"use": "rayloop.rewards.environment_result:EnvironmentResult"}},
    )
    with run(config) as made:
        made.until(lambda: made.metrics, "a step", 330)
        actor = made.actor("EnvironmentActor").pid
        for server in eventually(lambda: servers(actor), "a desktop", 60):
            server.kill()
        made.ends(0)
    folder = RunFolder(tmp_path, "run")
    assert [record["step"] for record in folder.metrics] == [1, 2, 3]
    ends: Counter[tuple[str, float]] = Counter()
    for file in folder.rollouts.files().values():
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            ends[record["end_reason"], record["reward"]] += 1
    assert set(ends) == {("done", 1.0), ("action_error", 0.0)}, ends
    lost = [event["why"] for event in folder.events if event["event"] == "episode_failed"]
    assert lost
    assert all("the X server ended" in why or "the other side" in why for why in lost), lost
