"""The demonstrator and the random player of recipes/arpo, in live pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.envs.programs import needs

pytest.importorskip("playwright", reason="make test-env installs playwright")

from rayloop.envs.grammar.actions import Actions
from rayloop.envs.grammar.scanner import read
from recipes.arpo.demonstrations import TURNS, demonstrated, record
from recipes.arpo.pages import PAGES, WARM_PAGES, rows
from recipes.arpo.random_play import ARM, play

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap")]


@pytest.mark.parametrize("page", WARM_PAGES)
def test_a_demonstrator_that_is_not_hasty_solves_the_page(page: str) -> None:
    played = [demonstrated(row, 0.2) for row in rows("calm", 3, pages=(page,))]
    turns, result = next((turns, result) for turns, result in played if turns)
    assert result == 1.0
    assert isinstance(read(turns[-1]["answer"]), Actions)
    for number, turn in enumerate(turns):
        assert [said["role"] for said in turn["prompt"]] == ["user", "assistant"] * number + ["user"]
        assert len(turn["images"]) == number + 1


def test_a_hasty_one_misses_and_tries_again(tmp_path: Path) -> None:
    solved, turns = record(tmp_path / "warm.parquet", list(rows("hasty", 9)), 1.6)
    assert (tmp_path / "warm.parquet").stat().st_size > 0
    assert 9 < turns <= 9 * TURNS
    assert 0 < solved <= 1


def test_chance_wins_now_and_then() -> None:
    items = play(list(rows("chance", len(PAGES))), turns=4, samples=2)
    assert len(items) == 2 * len(PAGES)
    assert {item.arm for item in items} == {ARM}
    assert 0 < sum(item.reward or 0.0 for item in items) < len(items)
