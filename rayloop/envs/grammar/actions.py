"""Actions on a screen, as data.

Points are in the model's unit until ``Pointing.on`` (``screens.py``) makes them pixels.
"""

from dataclasses import dataclass
from typing import Literal

Direction = Literal["up", "down", "left", "right"]


@dataclass(frozen=True)
class Point:
    """A place on the screen, counted from the left and from the top."""

    x: float
    y: float


@dataclass(frozen=True)
class Click:
    """``times`` clicks of a button."""

    at: Point
    button: Literal["left", "right"] = "left"
    times: int = 1


@dataclass(frozen=True)
class Hover:
    """The pointer goes there and stays."""

    at: Point


@dataclass(frozen=True)
class LongPress:
    """A finger that stays down, on a touch screen."""

    at: Point


@dataclass(frozen=True)
class Drag:
    """The left button goes down at ``start`` and up at ``end``."""

    start: Point
    end: Point


@dataclass(frozen=True)
class Scroll:
    """The wheel turns at ``at``, or where the pointer is when that is None."""

    direction: Direction
    at: Point | None = None


@dataclass(frozen=True)
class Hotkey:
    """Keys that go down in this order and up in the other; one key is a key press.

    The names are in ``calls.py``.
    """

    keys: tuple[str, ...]


@dataclass(frozen=True)
class HoldKey:
    """A key goes down (``down``), or up."""

    key: str
    down: bool = True


@dataclass(frozen=True)
class Type:
    """A text is typed where the focus is.

    A new line in it is the Enter key; the grammar's "submit" is one at the end.
    """

    text: str


@dataclass(frozen=True)
class Sleep:
    """Wait for the screen to change.

    UI-TARS means five seconds; each environment has a setting for it.
    """


@dataclass(frozen=True)
class Finish:
    """The policy is done, with an answer where the task asks for one."""

    answer: str = ""


@dataclass(frozen=True)
class CallUser:
    """The policy gives up.

    It asks for the user (``call_user``), or says that something is broken (``error_env``).
    """

    reason: str = ""


@dataclass(frozen=True)
class OpenApp:
    """Start a program by its name, on a phone."""

    name: str


@dataclass(frozen=True)
class PhoneButton:
    """Press the home or the back button of a phone."""

    name: Literal["home", "back"]


Action = (
    Click
    | Hover
    | LongPress
    | Drag
    | Scroll
    | Hotkey
    | HoldKey
    | Type
    | Sleep
    | Finish
    | CallUser
    | OpenApp
    | PhoneButton
)


@dataclass(frozen=True)
class Actions:
    """One turn of the policy: its thought, and at least one action.

    The actions are in the order in which they are carried out.
    """

    thought: str
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Mistake:
    """Why a text is not a turn.

    ``reason`` is for the policy, ``position`` counts characters, ``near`` is the text there.
    """

    reason: str
    position: int
    near: str

    def __str__(self) -> str:
        where = f", at {self.near!r}" if self.near else ", at the end"
        return f"{self.reason}{where} (character {self.position})"
