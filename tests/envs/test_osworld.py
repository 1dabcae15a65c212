"""The OSWorld adapter against a stand-in that fails as OSWorld does
(tests/support/osworld_stand_in): no real machine is used.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayloop.core.failures import DataFailure
from rayloop.core.types import Message, Task
from rayloop.envs.grammar.actions import Actions
from rayloop.envs.grammar.scanner import read
from rayloop.envs.osworld.environment import OSWorld, code, rows
from rayloop.envs.osworld.machines import (
    Machine,
    MachineLost,
    OSWorldMissing,
    OSWorldSettings,
    installed,
    machines_of,
)

pytestmark = pytest.mark.env
STAND_IN = Path(__file__).parents[1] / "support" / "osworld_stand_in"
Make = Callable[..., OSWorld]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    made: list[OSWorldSettings] = []

    def of(**changes: Any) -> OSWorld:
        settings = OSWorldSettings.model_validate(
            {
                "python": sys.executable,
                "cache": str(tmp_path),
                "pause": 0.0,
                "back_off": 0.05,
                "step_timeout": 5.0,
                **changes,
            }
        )
        made.append(settings)
        return OSWorld(settings)

    yield of
    for settings in made:
        machines_of(settings).end()


def task(**stand_in: Any) -> Task:
    config = {
        "id": "t",
        "instruction": "Open it.",
        "config": [],
        "evaluator": {"func": "f"},
        "stand_in": stand_in,
    }
    return Task("t", (Message("user", ("Do: {instruction}",)),), extra={"osworld": config})


def notes(folder: Path, what: str = "") -> list[dict[str, Any]]:
    lines = [
        json.loads(line)
        for line in (folder / "notes.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [line for line in lines if what in ("", line["what"])]


def test_an_episode(make: Make, tmp_path: Path) -> None:
    for _ in range(2):
        environment = make()
        [message] = environment.reset(task()).messages
        assert message.parts[0] == "Do: Open it."
        step = environment.step(
            "Thought: x\nAction: click(start_box='(966,546)')\n\ntype(content='it\\'s')"
        )
        assert step.observation
        assert environment.step("no action").error
        assert environment.step("Action: press_home()").error
        assert environment.step("Action: finished(content='done')").done
        assert environment.evaluate() == 1.0
        environment.close()
    assert len(notes(tmp_path, "booted")) == 1, "a machine that is up is used again"
    sent = [note["action"] for note in notes(tmp_path, "step")]
    assert sent[:3] == [
        "import pyautogui; pyautogui.click(960, 540, clicks=1, interval=0.05, button='left')",
        'import pyautogui; pyautogui.write("it\'s", interval=0.02)',
        "DONE",
    ], "points of the 1932x1092 picture, and each action once"


def test_results_lie_where_osworlds_scripts_look_for_them(make: Make, tmp_path: Path) -> None:
    results = tmp_path / "results/pyautogui/screenshot/ui-tars"
    environment = make(results=str(results), tasks=str(tmp_path))
    (tmp_path / "chrome").mkdir()
    (tmp_path / "chrome/7.json").write_text(
        json.dumps(dict(task().extra["osworld"]) | {"id": "7"}), encoding="utf-8"
    )
    for _ in range(2):
        environment.reset(
            Task("chrome/7", (Message("user", ("{instruction}",)),), extra={"osworld": "chrome/7"})
        )
        environment.step("Action: wait()\n\nhotkey(key='a')")
        environment.step("Action: finished()")
        assert not (results / "chrome/7/result.txt").exists(), (
            "an episode that is not over has no result"
        )
        result = environment.evaluate()
        environment.close()
    assert (results / "chrome/7/result.txt").read_text(encoding="utf-8") == f"{result}\n"
    lines = [
        json.loads(line)
        for line in (results / "chrome/7/traj.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(line["step_num"], line["done"]) for line in lines] == [
        (1, False),
        (2, False),
        (3, True),
    ]
    assert [line["action"] for line in lines] == [
        "WAIT",
        "import pyautogui; pyautogui.hotkey('a')",
        "DONE",
    ]
    environment.reset(task())
    assert (results / "unknown/t").is_dir(), "a task in the row, whose domain is not known"
    environment.close()
    outside = dict(task().extra["osworld"]) | {"id": "../../../out"}
    with pytest.raises(DataFailure, match="is not below"):
        environment.reset(
            Task("t", (Message("user", ("{instruction}",)),), extra={"osworld": outside})
        )
    environment.close()


def test_arpos_own_turns_reach_the_machine(make: Make, tmp_path: Path) -> None:
    environment = make(variant="original", most_actions=3)
    [message, screen] = environment.reset(task()).messages
    assert (message.parts, screen.role) == (("Do: Open it.",), "user")
    assert not environment.step(
        "Action: click(start_box='(966,546)')\n\nscroll(direction='left')"
    ).done
    assert environment.step("Action: call_user()").done
    assert environment.evaluate() in (0.0, 1.0)
    environment.close()
    assert [note["action"] for note in notes(tmp_path, "step")] == [
        "import pyautogui; pyautogui.click(960, 540, clicks=1, interval=0.05, button='left')",
        "FAIL",
    ]


def test_typed_text_stays_a_text() -> None:
    """Never source: whatever the policy writes is one constant of the program that the machine
    runs.
    """
    for text in (
        "'; import os; os.system('id') #",
        '"""',
        "\\",
        "a\nb",
        "{x}",
        "äöü'); os.system('id'); ('",
        "\u2028",
    ):
        quoted = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
        turn = read(f"Action: type(content='{quoted}')")
        assert isinstance(turn, Actions)
        program = ast.parse(code(turn.actions[0]))
        texts = [
            node.value
            for node in ast.walk(program)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert text in texts
        names = {node.attr for node in ast.walk(program) if isinstance(node, ast.Attribute)}
        assert names <= {"write", "copy", "hotkey"}


def test_a_reset_that_fails_goes_to_other_machines_with_growing_pauses(
    make: Make, tmp_path: Path
) -> None:
    environment = make(machines=2, attempts=9)
    environment.reset(task(resets_fail=8))
    environment.close()
    resets = notes(tmp_path, "reset")
    assert len(resets) == 9
    assert [note["machine"] for note in resets[:2]] in (
        ["machine-0", "machine-1"],
        ["machine-1", "machine-0"],
    )
    pauses = [b["at"] - a["at"] for a, b in pairwise(resets)]
    assert pauses[-1] > 0.05 * 2**7


def test_resets_that_all_fail_are_no_result(make: Make) -> None:
    environment = make(attempts=2)
    with pytest.raises(MachineLost, match=r"2 resets failed.*Connection reset by peer"):
        environment.reset(task(resets_fail=99))
    environment.close()


@pytest.mark.parametrize(
    ("stand_in", "why"),
    [
        ({"setup_fails": True}, "setup of task t failed 5 times"),
        ({"screenshot": "none"}, "no screenshot"),
    ],
)
def test_an_observation_after_a_failed_setup_is_no_start(
    make: Make, stand_in: dict[str, Any], why: str
) -> None:
    environment = make(attempts=1)
    with pytest.raises(MachineLost, match=why):
        environment.reset(task(**stand_in))


@pytest.mark.parametrize(
    ("stand_in", "why"),
    [
        ({"step": "hangs"}, "no answer within"),
        ({"step": "dies"}, "closed"),
        ({"screenshot": "none later"}, "no screenshot"),
    ],
)
def test_a_machine_that_fails_in_a_step_is_replaced(
    make: Make, tmp_path: Path, stand_in: dict[str, Any], why: str
) -> None:
    environment = make(step_timeout=0.5)
    environment.reset(task(**stand_in))
    with pytest.raises(MachineLost, match=why):
        environment.step("Action: wait()")
    environment.close()
    environment = make(step_timeout=0.5)
    environment.reset(task())
    environment.close()
    assert len(notes(tmp_path, "booted")) == 2


def test_an_evaluation_that_raises_is_not_0(make: Make) -> None:
    environment = make()
    environment.reset(task(evaluate="raises"))
    environment.step("Action: finished()")
    with pytest.raises(MachineLost, match="KeyError"):
        environment.evaluate()
    environment.close()


def test_giving_up_is_right_for_what_cannot_be_done(make: Make) -> None:
    for said, result in (("call_user()", 1.0), ("finished()", 0.0)):
        environment = make()
        environment.reset(task(infeasible=True))
        assert environment.step(f"Action: {said}").done
        assert environment.evaluate() == result
        environment.close()


def test_an_action_is_sent_once_though_osworld_may_run_it_twice(make: Make, tmp_path: Path) -> None:
    environment = make()
    environment.reset(task(step="runs twice"))
    environment.step("Action: hotkey(key='ctrl c')")
    assert [note["action"] for note in notes(tmp_path, "step")] == [
        "import pyautogui; pyautogui.hotkey('ctrl', 'c')"
    ]
    environment.close()


def test_an_evaluation_holds_up_no_other_episode(make: Make, tmp_path: Path) -> None:
    first, second = make(machines=2), make(machines=2)
    first.reset(task(evaluate_takes=2.0))
    second.reset(task())
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(first.evaluate)
        time.sleep(0.3)
        second.step("Action: wait()")
        second.evaluate()
        assert not result.done()
        result.result()
    begun = {note["machine"] for note in notes(tmp_path, "booted")}
    assert begun == {"machine-0", "machine-1"}
    for environment in (first, second):
        environment.close()


def test_a_machine_belongs_to_one_process_and_is_waited_for(make: Make) -> None:
    holder, waiter = make(boot_timeout=30.0), make(boot_timeout=30.0)
    holder.reset(task())
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(waiter.reset, task())
        time.sleep(0.5)
        assert not started.done()
        holder.close()
        started.result(20)
    waiter.close()
    stranger = make(
        boot_timeout=0.3, attempts=1, options={"require_a11y_tree": True}
    )  # as another process would
    with pytest.raises(MachineLost, match="became free"):
        stranger.reset(task())


def test_a_boot_that_fails_says_why(make: Make) -> None:
    with pytest.raises(MachineLost, match="not ready after 300 s"):
        make(attempts=1, options={"boot": "fails"}).reset(task())


def test_a_python_without_osworld_is_refused_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        OSWorldMissing,
        match=r"/no/such/python does not start.*pip install desktop-env.*with\.python",
    ) as missing:
        make(attempts=9, back_off=60, python="/no/such/python")
    assert (missing.value.exit_code, isinstance(missing.value, MachineLost)) == (2, True)
    monkeypatch.delenv("PYTHONPATH")
    installed.cache_clear()
    with pytest.raises(OSWorldMissing, match=r"has no desktop_env"):
        make(attempts=9, back_off=60, python=sys.executable)


def test_nothing_stays_when_it_is_closed(make: Make, tmp_path: Path) -> None:
    environment = make()
    environment.reset(task())
    machine = environment._machine
    assert isinstance(machine, Machine)
    process = psutil.Process(machine._process.pid)
    environment.close()
    machines_of(environment._settings).end()
    assert not process.is_running()
    assert notes(tmp_path, "closed")


def test_rows_and_tasks_of_osworlds_folder(make: Make, tmp_path: Path) -> None:
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps({"chrome": ["a"], "os": ["b", "c"]}), encoding="utf-8")
    assert [row["osworld"] for row in rows(listed)] == ["chrome/a", "os/b", "os/c"]
    (tmp_path / "chrome").mkdir()
    config = task().extra["osworld"]
    (tmp_path / "chrome" / "a.json").write_text(json.dumps(config), encoding="utf-8")
    environment = make(tasks=str(tmp_path))
    environment.reset(
        Task("t", (Message("user", ("{instruction}",)),), extra={"osworld": "chrome/a"})
    )
    environment.close()
    for wrong in ("chrome/b", "../../etc/passwd", {"id": "x"}, None):
        with pytest.raises(DataFailure, match="osworld"):
            environment.reset(Task("t", (Message("user", ("x",)),), extra={"osworld": wrong}))
    assert os.listdir(tmp_path / "machine-0")
