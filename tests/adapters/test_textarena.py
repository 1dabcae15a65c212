"""Games of textarena for one player."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rayloop.config.settings import Component
from rayloop.core.failures import DataFailure
from rayloop.core.types import Message, Task
from tests.adapters.conftest import Train

pytest.importorskip("textarena", reason="make test-adapters installs textarena")
pytestmark = pytest.mark.adapters
GUESS = {"use": "rayloop.envs.adapters.textarena:TextArena", "with": {"id": "GuessTheNumber-v0"}}


def task(seed: Any) -> Task:
    return Task("t", (Message("user", ("Play.",)),), extra={"seed": seed})


def made(name: str = "GuessTheNumber-v0", **options: Any) -> Any:
    return Component(**{**GUESS, "with": {"id": name, "options": options}}).build()


def text(observation: Any) -> str:
    return str(observation.messages[-1].parts[0])


def test_five_games_are_won_by_halving() -> None:
    for seed in range(5):
        game = made()
        first = game.reset(task(seed))
        assert "between 1 and 20" in text(first)
        low, high, step = 1, 20, None
        while step is None or not step.done:
            guess = (low + high) // 2
            step = game.step(f"I say [{guess}]")
            if not step.done:
                assert "between 1 and 20" not in text(step.observation), (
                    "what was shown before is not repeated"
                )
                low, high = (
                    (guess + 1, high)
                    if re.search("higher", text(step.observation))
                    else (low, guess - 1)
                )
        assert (step.reward, game.evaluate()) == (1.0, 1.0)
        game.close()


def test_equal_seeds_are_equal_games_beside_each_other() -> None:
    def moves(seed: int) -> list[str]:
        game = made("2048-v0")
        seen = [text(game.reset(task(seed)))]
        for move in ("[up]", "[left]", "[down]"):
            random.random()  # another episode of the process draws
            step = game.step(move)
            seen.append(text(step.observation) if step.observation else "")
        return seen

    assert moves(1) == moves(1) != moves(2)


def test_moves_that_are_none_are_counted_by_the_game() -> None:
    game = made()
    game.reset(task(1))
    first = game.step("no number")
    assert (first.done, "invalid move" in text(first.observation).lower()) == (False, True)
    last = game.step("again none")
    assert (last.done, "Invalid Move" in last.info["reason"], game.evaluate()) == (True, True, 0.0)


def test_what_cannot_be_played_is_refused() -> None:
    with pytest.raises(ValidationError, match="textarena has no game 'NoSuch-v0'"):
        Component(**{**GUESS, "with": {"id": "NoSuch-v0"}}).options()
    with pytest.raises(DataFailure, match="TicTacToe-v0 is not a game for one player"):
        made("TicTacToe-v0").reset(task(1))
    with pytest.raises(DataFailure, match="seed None"):
        made().reset(task(None))


def test_a_step_is_trained(digits_model: Path, train: Train) -> None:
    rows = [{"prompt": "Play.", "seed": seed} for seed in range(4)]
    run = train(
        digits_model,
        rows,
        data__reader={"use": "rayloop.data.dataset:ChatRows"},
        environment={"episode": {"environment": GUESS, "max_turns": 3}},
    )
    assert 1 <= run.metrics[0]["rollout/turns/mean"] <= 3
