"""Each command of the pages is executed by a test, or it is said what it needs."""

from __future__ import annotations

from fnmatch import fnmatchcase

from tests.support.commands import ALL, ELSEWHERE, NEEDS, classed, quoted
from tests.support.runs import ROOT


def test_each_command_has_one_place() -> None:
    places = {f"{place}: {command}": classed(command) for command, place in quoted().items()}
    assert len(places) > 100, "the pattern finds nothing any more"
    assert {where: found for where, found in places.items() if len(found) != 1} == {}


def test_what_is_executed_is_on_a_page() -> None:
    assert quoted().keys() >= ALL
    patterns = [*ELSEWHERE, *NEEDS]
    assert [
        pattern
        for pattern in patterns
        if not any(fnmatchcase(command, pattern) for command in quoted())
    ] == []
    assert [test for test in ELSEWHERE.values() if not (ROOT / test).is_file()] == []
