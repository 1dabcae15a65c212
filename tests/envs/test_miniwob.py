"""MiniWoB++ pages in a real Chromium: seeds, rewards, what ends an episode, and that every page
starts.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rayloop.chat.rendering import Renderer
from rayloop.config.model import ModelSettings
from rayloop.core.failures import DataFailure
from rayloop.core.protocols import Observation
from rayloop.core.types import Message, Task
from rayloop.engines.tiny_vlm import write_tiny_vlm
from rayloop.envs.grammar.actions import GoBack
from tests.envs.programs import needs
from tests.unit.conftest import SMALL, SMALL_VISION, TEXTS
from tests.unit.envs.test_episode import END, request, run

pytest.importorskip("playwright", reason="make test-env installs playwright")

from rayloop.envs.browser.miniwob import MiniWob, pages

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap")]


def task(page: Any, seed: Any = 1) -> Task:
    return Task(
        "t", (Message("user", ("Do this: {instruction}",)),), extra={"page": page, "seed": seed}
    )


@contextmanager
def playing(page: str, seed: Any = 1, **settings: Any) -> Iterator[tuple[MiniWob, Observation]]:
    environment = MiniWob(MiniWob.Settings.model_validate(settings))
    try:
        yield environment, environment.reset(task(page, seed))
    finally:
        environment.close()


def shown(observation: Observation | None) -> tuple[str, Image.Image]:
    """Text and screenshot of the last message."""
    assert observation is not None
    message = observation.messages[-1]
    [source] = message.images
    assert source.data is not None
    return " ".join(p for p in message.parts if isinstance(p, str)), Image.open(
        io.BytesIO(source.data)
    ).convert("RGB")


def pixels(observation: Observation | None) -> str:
    return hashlib.sha256(shown(observation)[1].tobytes()).hexdigest()


def test_the_page_gives_the_instruction_and_the_reward() -> None:
    with playing("click-test") as (environment, first):
        text, image = shown(first)
        assert text == "Do this: Click the button."
        assert image.size == (160, 210)
        assert environment.evaluate() == 0
        x, y = centre(environment, "button")
        ended = environment.step(f"Action: click(start_box='({x},{y})')")
        assert ended.done
        assert environment.evaluate() == 1


def test_a_wrong_click_is_the_pages_own_verdict() -> None:
    for success_at, expected in ((None, -1), (1, 0)):
        with playing("click-test-2", success_at=success_at) as (environment, _):
            x, y = centre(environment, "button:nth-of-type(2)")
            assert environment.step(f"Action: click(start_box='({x},{y})')").done
            assert environment.evaluate() == expected


def test_a_finished_episode_is_not_begun_again() -> None:
    """Behind the end lies a START button all over the page; a click on it would draw a new problem."""
    with playing("click-test") as (environment, _):
        x, y = centre(environment, "button")
        click = f"click(start_box='({x},{y})')"
        assert environment.step(f"Action: {click}\n\n{click}\n\n{click}").done
        assert environment.step(f"Action: {click}").done
        assert environment.evaluate() == 1


def test_equal_seeds_look_equal_and_others_do_not() -> None:
    seen = {}
    for seed in (1, 1, 2):
        with playing("click-button", seed) as (_, first):
            seen.setdefault(seed, set()).add((shown(first)[0], pixels(first)))
    assert len(seen[1]) == 1
    assert seen[1].isdisjoint(seen[2])


def test_the_members_of_a_group_begin_in_one_state_and_equal_actions_keep_it(
    tmp_path: Path,
) -> None:
    renderer = Renderer(
        ModelSettings(path=str(write_tiny_vlm(tmp_path, TEXTS, **SMALL, **SMALL_VISION)))
    )
    with playing("click-checkboxes") as (environment, _):
        x, y = centre(environment, "input")
    look, click = "Action: wait()", f"Action: click(start_box='({x},{y})')"

    def states(act: str, seed: int) -> tuple[str, ...]:
        said, asked = (
            [(act, END), (look, END)],
            request(task("click-checkboxes", seed), max_tokens=200),
        )
        limits = {"max_turns": 2, "max_tokens": 5000, "step_timeout": 60}
        return run(renderer, MiniWob(MiniWob.Settings()), said, asked, **limits)[0].states

    first, again, other, elsewhere = (
        states(click, 1),
        states(click, 1),
        states(look, 1),
        states(click, 2),
    )
    assert first == again
    assert len(set(first)) == 2
    assert other[0] == first[0] != elsewhere[0]
    assert other[1] != first[1]


def test_a_text_that_is_no_action_is_answered_with_the_reason() -> None:
    with playing("click-test") as (environment, _):
        for text in (
            "I think.",
            "Action: fly()",
            "Action: press_home()",
            "Action: wait()" + "\n\nwait()" * 8,
        ):
            result = environment.step(text)
            assert result.error
            assert not result.done
            assert result.observation is not None
            assert result.error in str(result.observation.messages[0].parts)
        with pytest.raises(ValueError, match="stays on its page"):
            environment._carry_out([GoBack()])
        assert environment.step("Action: finished(content='')").done
        assert environment.evaluate() == 0


def test_a_row_must_name_a_page_and_a_seed() -> None:
    for page, seed in (("no-such-page", 1), (None, 1), ("../core/core", 1), ("click-test", None)):
        environment = MiniWob(MiniWob.Settings())
        with pytest.raises(DataFailure):
            environment.reset(task(page, seed))
        environment.close()


def test_all_pages_are_known() -> None:
    assert len(pages()) == 133


def centre(environment: MiniWob, selector: str) -> tuple[int, int]:
    """Of an element, in the unit of the model: pixels of the resized screen."""
    tab, host = environment._tab, environment._host
    assert tab is not None
    assert host is not None
    asked = (
        "(b => [b.x + b.width / 2, b.y + b.height / 2])(document.querySelector('#wrap"
        f" {selector}').getBoundingClientRect())"
    )
    x, y = host.run(tab.evaluate(asked), 10)
    columns, rows = environment._settings.pointing.size(
        environment.size.width, environment.size.height
    )
    return round(x * columns / environment.size.width), round(y * rows / environment.size.height)


@pytest.mark.timeout(500)
def test_every_page_starts_and_takes_a_click() -> None:
    """All at once, as many as there is room for: this is also how a full browser is worked with."""

    def play(page: str) -> tuple[str, str]:
        try:
            with playing(page, 3) as (environment, first):
                text, image = shown(first)
                size = (environment.size.width, environment.size.height)
                result = environment.step("Action: click(start_box='(90,120)')")
                sound = (
                    image.size == size
                    and len(image.getcolors(1 << 20) or []) > 1
                    and len(text) > len("Do this: ")
                )
                return (
                    page,
                    (
                        ""
                        if sound and result.error is None and -1 <= environment.evaluate() <= 1
                        else "is odd"
                    ),
                )
        except Exception as error:
            return page, repr(error)

    with ThreadPoolExecutor(12) as threads:
        found = dict(threads.map(play, pages()))
    assert {page: why for page, why in found.items() if why} == {}


def test_without_reload_the_next_episode_is_played_in_the_same_tab() -> None:
    tabs = []
    for seed in (1, 2, 1):
        with playing("click-button", seed, reload=False) as (environment, first):
            tabs.append((environment._tab, pixels(first)))
    (a, first_look), (b, other_look), (c, again) = tabs
    assert a is b is c
    assert first_look == again != other_look
    with (
        playing("click-button", 1, reload=False) as (one, _),
        playing("click-button", 1, reload=False) as (two, _),
    ):
        assert one._tab is a
        assert two._tab is not a


@pytest.mark.parametrize("page", ["click-tab", "click-dialog-2"])
def test_what_was_clicked_before_in_a_tab_leaves_no_trace_on_its_next_episode(page: str) -> None:
    chance, seen = random.Random(0), set()
    for episode in range(40):
        with playing(page, 30, reload=False) as (environment, first):
            seen.add(pixels(first))
            for _ in range(3):
                environment.step(
                    "Action:"
                    f" click(start_box='({chance.randrange(5, 155)},{chance.randrange(55, 205)})')"
                )
        with playing(page, episode, reload=False):
            pass
    assert len(seen) == 1


def test_without_room_another_page_is_loaded_into_a_tab_that_is_free() -> None:
    crowded = {"reload": False, "browser": {"pages": 1}}
    with playing("click-test", 1, **crowded) as (environment, alone):
        tab, alone = environment._tab, pixels(alone)
    with playing("click-button", 1, **crowded) as (environment, _):
        assert environment._tab is tab
    with playing("click-test", 1, **crowded) as (environment, again):
        assert environment._tab is tab
        assert pixels(again) == alone
