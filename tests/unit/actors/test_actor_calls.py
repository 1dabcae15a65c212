"""Calls between processes are checked by the type checker: what it refuses, and that no call goes
around it.
"""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from rayloop.actors.handles import submit
from tests.support.local import LocalActor

ROOT = Path(__file__).parents[3]
HELPER = Path("actors/handles.py")

PROGRAM = """
from rayloop.actors.handles import Handle, create, resolved, submit, submit_split
from rayloop.actors.policy import PolicyRank
from rayloop.actors.reference import ReferenceActor
from rayloop.actors.reward import RewardActor
from rayloop.actors.rollout import RolloutActor
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.cluster.supervision.pool import Calls, Pool
from rayloop.core.groups import Outcome
from rayloop.core.groups import Ref
from rayloop.core.types import Task, Trajectory, Version


async def calls(
    pool: Pool[RewardActor], rank: Handle[PolicyRank], group: PolicyGroup, payload: Ref[Trajectory], task: Task
) -> None:
    said = {line}
    outcomes: list[Outcome] = said
"""


def mypy(tmp_path: Path, *lines: str) -> str:
    """What mypy, with the settings of this project, says of a program for each of these lines."""
    files = []
    for number, line in enumerate(lines):
        files.append(tmp_path / f"calls_{number}.py")
        files[-1].write_text(PROGRAM.replace("{line}", line), encoding="utf-8")
    config = [
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *config, *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_type_checker_refuses_wrong_calls(tmp_path: Path) -> None:
    pool = "await Calls(pool, deadline=5.0, attempts=2)"
    said = mypy(
        tmp_path,
        f"{pool}.call(RewardActor.score, task, 3, resolved(payload))",
        "await group.all(PolicyRank.export, Version(0, 0))",
        f"{pool}.call(RewardActor.scores, task, 3, resolved(payload))",
        f"{pool}.call(RewardActor.score, 3, task, resolved(payload))",
        f"{pool}.call(RewardActor.score, task)",
        f"{pool}.call(RewardActor.score, task, 3, payload)",
        f"{pool}.call(RolloutActor.generate, resolved(payload), task, 3)",
        f'{pool}.call("score", task, 3, resolved(payload))',
        "(await group.all(PolicyRank.perturb, 3), None)[1]",
        "await submit(rank, PolicyRank.load, 3)",
        "create(PolicyRank, {}, 3)",
    )
    errors = {
        number: [
            line for line in said.splitlines() if f"calls_{number}.py" in line and "error:" in line
        ]
        for number in range(11)
    }
    assert not errors[0], said
    assert "Incompatible types in assignment" in errors[1][0], "the answer has a type"
    expected = {
        2: '"type[RewardActor]" has no attribute "scores"',
        3: 'Argument 2 to "call" of "Calls" has incompatible type "int"; expected "Task"',
        4: 'Missing positional argument "step"',
        5: 'incompatible type "Ref[Trajectory]"; expected "Trajectory"',
        6: 'incompatible type "Callable[[RolloutActor, ',
        7: 'incompatible type "str"; expected "Callable[[RewardActor',
        8: 'Argument 2 to "all" of "PolicyGroup" has incompatible type "int"; expected "str"',
        9: 'No overload variant of "submit" matches argument types',
        10: 'incompatible type "int"; expected "RankSettings"',
    }
    for number, words in expected.items():
        assert any(words in line for line in errors[number]), f"{words}\n\n{said}"


def test_no_call_goes_around_the_helper() -> None:
    """``handle.method.remote(...)``, with or without options, and ``getattr(handle, name)``:
    unchecked, so in one file only.
    """
    around = []
    for package in ("actors", "cluster"):
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found = {
                node.lineno
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and unchecked(node)
            }
            around += [f"{path.relative_to(ROOT)}:{line}" for line in sorted(found)]
    inside = [place for place in around if place.startswith(f"{HELPER}:")]
    assert len(inside) == 1, "the helper itself is seen"
    assert around == inside, "begin the call with actors/handles.py:submit, which is checked"


def unchecked(call: ast.Call) -> bool:
    """Whether this is a call of a method of an actor by Ray's own means; making an actor or running
    a task is none.
    """
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "remote"):
        return False
    callee: ast.expr = call.func.value
    if (
        isinstance(callee, ast.Call)
        and isinstance(callee.func, ast.Attribute)
        and callee.func.attr == "options"
    ):
        callee = callee.func.value
    if isinstance(callee, ast.Call):
        return isinstance(callee.func, ast.Name) and callee.func.id == "getattr"
    return isinstance(callee, ast.Attribute)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("handle.score.remote(1)", True),
        ("self.ranks[0].score.options(num_returns=2).remote(1)", True),
        ("getattr(handle, method).remote(1)", True),
        ("getattr(handle, method).options(num_returns=2).remote(1)", True),
        ("ray.remote(num_cpus=0)(fit).remote(1)", False),
        ("ray.remote(Actor).options(num_cpus=0).remote(1)", False),
        ("submit(handle, Actor.score, 1)", False),
    ],
)
def test_what_goes_around_is_recognised(text: str, wrong: bool) -> None:
    assert (
        any(unchecked(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        == wrong
    )


class Adder:
    async def add(self, a: int, *, b: int) -> int:
        return a + b


async def added() -> int:
    return await submit(LocalActor(Adder()), Adder.add, 1, b=2)  # type: ignore[arg-type]


def test_a_call_arrives() -> None:
    assert asyncio.run(added()) == 3
