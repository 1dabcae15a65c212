"""Actions on a screen, as data: what the policies of all action languages may ask for.

Points are in the model's unit until ``Pointing.on`` (``screens.py``) makes them pixels.
"""

from dataclasses import dataclass
from typing import Any, Literal

Direction = Literal["up", "down", "left", "right"]
Button = Literal["left", "right", "middle", "back", "forward"]


@dataclass(frozen=True)
class Point:
    """A place on the screen, counted from the left and from the top."""

    x: float
    y: float


@dataclass(frozen=True)
class Mark:
    """The number or the letter of an element, where a screen shows its elements with marks."""

    name: str


Place = Point | Mark


@dataclass(frozen=True)
class Click:
    """``times`` clicks of a button, at a place or where the pointer is.

    ``keys`` are held down during the clicks, and likewise in other actions.
    """

    at: Place | None = None
    button: Button = "left"
    times: int = 1
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hover:
    """The pointer goes there and stays."""

    at: Place
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class LongPress:
    """A finger that stays down, on a touch screen; ``seconds`` None: the usual time."""

    at: Place
    seconds: float | None = None


@dataclass(frozen=True)
class Drag:
    """The left button goes down at ``start``, moves along ``path``, and up at ``end``.

    ``start`` None: it begins where the pointer is.
    """

    start: Point | None
    end: Point
    path: tuple[Point, ...] = ()
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Swipe:
    """A finger goes from ``start`` to ``end``, or ``amount`` of the screen in a direction.

    A finger that goes up shows what is below.
    """

    start: Point | None = None
    end: Point | None = None
    direction: Direction | None = None
    amount: float | None = None


@dataclass(frozen=True)
class Scroll:
    """The wheel turns at ``at``, or where the pointer is when that is None.

    ``amount`` None: the usual distance. ``fraction`` is of the screen's height, or of its width for
    a scroll to the side.
    """

    direction: Direction
    at: Place | None = None
    amount: float | None = None
    unit: Literal["notches", "pixels", "fraction"] = "notches"
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class MouseButton:
    """The left button goes down (``down``), or up, where the pointer is."""

    down: bool


@dataclass(frozen=True)
class Hotkey:
    """Keys that go down in this order and up in the other; one key is a key press.

    The names are in ``calls.py``.
    """

    keys: tuple[str, ...]


@dataclass(frozen=True)
class HoldKey:
    """A key goes down (``down``), or up; with ``seconds`` it goes down, and up after them."""

    key: str
    down: bool = True
    seconds: float | None = None


@dataclass(frozen=True)
class Type:
    """A text is typed where the focus is; ``clear`` replaces the old text.

    A new line in it is the Enter key; the grammar's "submit" is one at the end.
    """

    text: str
    clear: bool = False


@dataclass(frozen=True)
class SelectOption:
    """An item of a page's list is chosen, by its text."""

    at: Place
    value: str


@dataclass(frozen=True)
class Sleep:
    """Wait for the screen to change.

    UI-TARS means five seconds; each environment has a setting for it, without ``seconds``.
    """

    seconds: float | None = None


@dataclass(frozen=True)
class Screenshot:
    """Nothing happens: a screen follows each turn anyway."""


@dataclass(frozen=True)
class GoBack:
    """A browser goes back to the page before."""


@dataclass(frozen=True)
class OpenUrl:
    """A browser loads a page."""

    url: str


@dataclass(frozen=True)
class Answer:
    """An answer for the user, after which the episode continues."""

    text: str


@dataclass(frozen=True)
class Finish:
    """The policy is done, with an answer where the task asks for one.

    ``success`` False: it says that the task cannot be done.
    """

    answer: str = ""
    success: bool = True


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
    """Press a button of a phone."""

    name: Literal["home", "back", "menu", "recent"]


@dataclass(frozen=True)
class Unsupported:
    """A call of a language that no screen here carries out, such as one for a browser's tabs.

    ``arguments``: names and values, as JSON has them.
    """

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()


Action = (
    Click
    | Hover
    | LongPress
    | Drag
    | Swipe
    | Scroll
    | MouseButton
    | Hotkey
    | HoldKey
    | Type
    | SelectOption
    | Sleep
    | Screenshot
    | GoBack
    | OpenUrl
    | Answer
    | Finish
    | CallUser
    | OpenApp
    | PhoneButton
    | Unsupported
)


@dataclass(frozen=True)
class Actions:
    """One turn of the policy: its thought, and at least one action.

    The actions are in the order in which they are carried out. ``summary`` says in a sentence what
    they do, in languages that have one.
    """

    thought: str
    actions: tuple[Action, ...]
    summary: str = ""


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
