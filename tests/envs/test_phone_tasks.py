"""The shipped phone's tasks in a real Chromium: solved with a finger, and only so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from rayloop.core.failures import DataFailure
from rayloop.core.protocols import Observation
from rayloop.core.types import Message, Task
from rayloop.envs.grammar.actions import Drag, Point, Type
from tests.envs.pages import host
from tests.envs.programs import needs

pytest.importorskip("playwright", reason="make test-env installs playwright")

from rayloop.envs.browser.phone import Phone, tasks

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap"), pytest.mark.timeout(300)]

SETTINGS: dict[str, Any] = {
    "language": "android_world",
    "observe": ["elements"],
    "settle": 0.05,
    "scale": 1,
}
WIDTH, SCROLLS = 360, 6


class Hand:
    """Acts by the texts of what is on the screen, in AndroidWorld's language."""

    def __init__(self, environment: Phone, first: Observation) -> None:
        self.environment = environment
        self.lines = self.shown(first)

    def shown(self, observation: Observation | None) -> list[str]:
        assert observation is not None
        text = observation.messages[-1].parts[-1]
        assert isinstance(text, str)
        return text.splitlines()

    def does(self, kind: str, **arguments: Any) -> None:
        result = self.environment.step(json.dumps({"action_type": kind, **arguments}))
        assert result.error is None, result.error
        self.lines = self.shown(result.observation)

    def value(self, expression: str) -> Any:
        tab = self.environment._tab
        assert tab is not None
        return host(self.environment).run(tab.evaluate(expression), 10)

    def index(self, text: str) -> int:
        """The number of the element with a text, which is scrolled to."""
        for _ in range(SCROLLS):
            for number, line in enumerate(self.lines):
                if f"'{text}" in line:
                    return number
            self.does("scroll", direction="down")
        raise AssertionError(f"{text} is not among {self.lines}")

    def tap(self, *texts: str) -> None:
        for text in texts:
            self.does("click", index=self.index(text))

    def hold(self, text: str) -> None:
        self.does("long_press", index=self.index(text))

    def write(self, field: str, text: str) -> None:
        self.tap(field)
        result = self.environment._carry_out((Type(text, clear=True),))
        self.lines = self.shown(result.observation)

    def saves(self, **fields: str) -> None:
        """Fill in the fields of a form, and save it."""
        for field, text in fields.items():
            self.write(field, text)
        self.tap("Save")


Drawn = Mapping[str, str]
Solution = Callable[[Hand, Drawn], None]


def brighten(hand: Hand, drawn: Drawn) -> None:
    hand.tap("Settings")
    middle = hand.environment._elements[str(hand.index("Brightness"))]
    hand.environment._carry_out((Drag(middle, Point(WIDTH - 2, middle.y)),))


def add_contact(hand: Hand, drawn: Drawn) -> None:
    hand.tap("Contacts", "Add")
    hand.saves(Name=drawn["name"], Number=drawn["number"])


def change_number(hand: Hand, drawn: Drawn) -> None:
    hand.tap("Contacts", drawn["name"], "Edit")
    hand.saves(Number=drawn["number"])


def send_message(hand: Hand, drawn: Drawn) -> None:
    hand.tap("Messages", "Add", drawn["name"])
    hand.write("Message", drawn["text"])
    hand.does("keyboard_enter")


def switch_alarm(hand: Hand, drawn: Drawn) -> None:
    hand.tap("Clock")
    for time, is_on in {"06:30": True, "08:00": False, "21:45": True}.items():
        if is_on != (time == drawn["time"]):
            hand.tap(f"{time}: {'on' if is_on else 'off'}")


def set_alarm(hand: Hand, drawn: Drawn) -> None:
    hand.tap("Clock", "Add")
    hand.saves(Time=drawn.get("time", "4:50"))


def share_number(hand: Hand, drawn: Drawn) -> None:
    hand.tap("Contacts", drawn["owner"])
    number = hand.value(f"phone.state.contacts.find(one => one.name === '{drawn['owner']}').number")
    hand.does("navigate_home")
    send_message(hand, {"name": drawn["name"], "text": number})


def write_note(hand: Hand, drawn: Drawn) -> None:
    hand.tap("Notes", "Add")
    hand.saves(Note=drawn["text"])


def held(app: str, item: str, name: str = "name") -> Solution:
    def solve(hand: Hand, drawn: Drawn) -> None:
        hand.does("open_app", app_name=app)
        hand.hold(TOPICS.get(drawn[name], drawn[name]))
        hand.tap(item)

    return solve


TOPICS = {"shopping": "Shopping", "the garden": "Ideas"}
SOLUTIONS: dict[str, Solution] = {
    "open-app": lambda hand, drawn: hand.does("open_app", app_name=drawn["app"].lower()),
    "turn-on": lambda hand, drawn: hand.tap("Settings", drawn["setting"]),
    "brighten": brighten,
    "add-contact": add_contact,
    "delete-contact": held("Contacts", "Delete"),
    "favourite-contact": held("Contacts", "Add to favourites"),
    "change-number": change_number,
    "send-message": send_message,
    "delete-conversation": held("Messages", "Delete"),
    "set-alarm": set_alarm,
    "switch-alarm": switch_alarm,
    "delete-alarm": held("Clock", "Delete", "time"),
    "write-note": write_note,
    "pin-note": held("Notes", "Pin", "topic"),
    "share-number": share_number,
    "alarm-from-note": set_alarm,
}


@contextmanager
def playing(name: str, seed: Any = 0, **settings: Any) -> Iterator[Hand]:
    environment = Phone(Phone.Settings.model_validate({**SETTINGS, **settings}))
    prompt = (Message("user", ("{instruction}",)),)
    try:
        first = environment.reset(Task("t", prompt, extra={"phone": name, "seed": seed}))
        yield Hand(environment, first)
    finally:
        environment.close()


def test_every_shipped_task_has_a_solution() -> None:
    assert set(SOLUTIONS) == set(tasks())


@pytest.mark.parametrize("name", SOLUTIONS)
def test_a_task_is_solved_with_a_finger(name: str) -> None:
    for seed in (1, "val-2"):
        with playing(name, seed) as hand:
            assert hand.environment.evaluate() == 0
            hand.does("wait")
            assert hand.environment.evaluate() == 0
            SOLUTIONS[name](hand, tasks()[name].drawn(seed))
            assert hand.environment.evaluate() == 1, hand.value("JSON.stringify(phone.state)")


def test_what_else_is_changed_counts_against_it() -> None:
    with playing("set-alarm") as hand:
        hand.does("open_app", app_name="Notes")
        hand.hold("Shopping")
        hand.tap("Delete")
        hand.does("navigate_home")
        set_alarm(hand, tasks()["set-alarm"].drawn(0))
        assert hand.environment.evaluate() == 0


def test_what_is_typed_is_never_code() -> None:
    with playing("write-note") as hand:
        hand.tap("Notes", "Add")
        hand.saves(Note='<img src=x onerror="phone.state.notes.pop()"><script>1</script>')
        assert hand.value("document.images.length") == 0
        assert hand.value("phone.state.notes.length") == 3
        assert hand.environment.evaluate() == 0


def test_equal_seeds_give_equal_phones_and_others_do_not() -> None:
    def look(seed: int) -> list[str]:
        with playing("open-app", seed) as hand:
            return hand.lines

    assert look(1) == look(1)
    assert len({tuple(look(seed)) for seed in range(6)}) > 2


def test_a_row_that_names_no_task_is_refused() -> None:
    for name in ("set-alarms", None):
        with pytest.raises(DataFailure, match=r"there is open-app, turn-on"), playing(str(name)):
            pass
