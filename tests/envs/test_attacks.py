"""What code cannot do to the run, at the levels that a run may use, as root and as another user.

The weakest level is measured for docs/security.md only: ``python -m tests.envs.attack_runner
--table``.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from rayloop.sandbox import levels
from rayloop.sandbox.options import Level
from tests.envs import attack_runner
from tests.envs.attacks import FURTHER, OF_THE_NOTES
from tests.envs.attacks_second import ATTACKS, SECOND

pytestmark = [pytest.mark.env, pytest.mark.timeout(300)]
THROUGH = {
    Level.FILTERED: {
        "stat of a file",
        "readlink of a link elsewhere",
        "stat of what /proc shows of processes",
        "the machine's name, memory, load",
    },
    Level.NAMESPACES: set(),
}
"""Level -> attacks that it does not hold: Landlock knows nothing of metadata, and the machine's
name is everybody's.
"""
COLUMNS = [column for column in attack_runner.columns() if column[0] in THROUGH]

measured = functools.cache(attack_runner.measure)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize(("level", "who"), COLUMNS)
def test_an_attack_is_held_and_costs_its_own_call_only(level: Level, who: str, name: str) -> None:
    if levels.reached().short_of(level):
        pytest.skip(str(levels.reached()))
    result = measured(level, who)[name]
    assert (result != "held") == (name in THROUGH[level]), result


def test_there_are_the_attacks_of_the_notes_and_as_many_again() -> None:
    assert len(OF_THE_NOTES) == 47
    assert len(FURTHER) > 47
    assert len(SECOND) == 73
    assert len(ATTACKS) == len(OF_THE_NOTES) + len(FURTHER) + len(SECOND)


def test_the_page_says_what_each_level_holds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    counts = [len(ATTACKS) - len(THROUGH[level]) for level in THROUGH for _ in ("user", "root")]
    (row,) = (
        line for line in page.splitlines() if line.startswith(f"| **held, of {len(ATTACKS)}** |")
    )
    assert [int(cell.strip(" *")) for cell in row.split("|")[4:-1]] == counts
