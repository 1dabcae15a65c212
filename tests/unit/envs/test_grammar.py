"""The action grammar: what each text is, that none raises, that what is written is read again, and
where its points land.
"""

from __future__ import annotations

import random
import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloop.envs.grammar.actions import (
    Action,
    Actions,
    CallUser,
    Click,
    Drag,
    Finish,
    HoldKey,
    Hotkey,
    Hover,
    LongPress,
    Mistake,
    OpenApp,
    PhoneButton,
    Point,
    Scroll,
    Sleep,
    Type,
)
from rayloop.envs.grammar.calls import FUNCTIONS, KEYS, NAMED
from rayloop.envs.grammar.scanner import read
from rayloop.envs.grammar.screens import Pointing
from rayloop.envs.grammar.ui_tars import Spelling, write, written
from tests.support.growth import grows_with_length

AT = Point(966, 546)
SPELLINGS: tuple[Spelling, ...] = ("box", "box_tokens", "point")
READ: dict[str, tuple[Action, ...]] = {
    "click(start_box='(966,546)')": (Click(AT),),
    "click(start_box='<|box_start|>(966, 546)<|box_end|>')": (Click(AT),),
    "click(point='<point>966 546</point>')": (Click(AT),),
    "click(start_box='(960,540,972,552)')": (Click(AT),),
    "click(start_box='[966,546]')<|im_end|>": (Click(AT),),
    'left_single( start_box = "(966,546)" )': (Click(AT),),
    "left_double(point='<point>966 546</point>')": (Click(AT, times=2),),
    "right_single(start_box='(-3.5,1)')": (Click(Point(-3.5, 1), "right"),),
    "drag(start_box='(1,2)', end_box='(3,4)')": (Drag(Point(1, 2), Point(3, 4)),),
    "drag(start_point='<point>1 2</point>', end_point='<point>3 4</point>')": (
        Drag(Point(1, 2), Point(3, 4)),
    ),
    "select(end_box='(3,4)',start_box='(1,2)')": (Drag(Point(1, 2), Point(3, 4)),),
    "scroll(start_box='(966,546)', direction='left')": (Scroll("left", AT),),
    "scroll(direction='Down')": (Scroll("down"),),
    "scroll(start_box='(966,546)', end_box='(1,2)')": (Drag(AT, Point(1, 2)),),
    "select(start_box='(966,546)')": (Click(AT),),
    "select(start_box='(966,546)', end_box='(1,2)')": (Drag(AT, Point(1, 2)),),
    "type(content='pop rock', start_box='(966,546)')": (Click(AT), Type("pop rock")),
    "hotkey(hotkey='ctrl v')": (Hotkey(("ctrl", "v")),),
    "press(press='arrowup')": (Hotkey(("up",)),),
    "long_press(start_box='(966,546)', time='2')": (LongPress(AT, 2),),
    "hotkey(key='ctrl c')": (Hotkey(("ctrl", "c")),),
    "hotkey(key='Ctrl+ArrowLeft')": (Hotkey(("ctrl", "left")),),
    "hotkey(key='ctrl +')": (Hotkey(("ctrl", "+")),),
    "press(key='Return')": (Hotkey(("enter",)),),
    "keydown(key='shift')\nrelease(key='shift')": (HoldKey("shift"), HoldKey("shift", down=False)),
    "type(content='python main\\n')": (Type("python main\n"),),
    "type(content='nnn')": (Type("nnn"),),
    "type(content='it's')": (Type("it's"),),
    "type(content='it\\'s a \\\"b\\\" \\\\ \\x')": (Type('it\'s a "b" \\ \\x'),),
    'type(content="hello")': (Type("hello"),),
    "type(content='set point=3')": (Type("set point=3"),),
    "type(content='f()\n\ng()')": (Type("f()\n\ng()"),),
    "type(content='f('a')')": (Type("f('a')"),),
    "type(content='äöü€日本')": (Type("äöü€日本"),),
    "click(start_box='(966,546)')\n\ntype(content='a')": (Click(AT), Type("a")),
    "wait()": (Sleep(),),
    "wait(time='5')": (Sleep(),),
    "finished()": (Finish(),),
    "finished(content='it's done')": (Finish("it's done"),),
    "call_user()": (CallUser(),),
    "hover(start_box='(966,546)')": (Hover(AT),),
    "long_press(point='<point>966 546</point>')": (LongPress(AT),),
    "open_app(app_name='Mail') press_home()press_back()": (
        OpenApp("Mail"),
        PhoneButton("home"),
        PhoneButton("back"),
    ),
}
WRONG = {
    "": "no line begins with 'Action:'",
    "Thought: x": "no line begins with 'Action:'",
    "Action:": "no action follows",
    "Action: click()": "click needs the argument 'start_box'",
    "Action: click(start_box='(1,2,3)')": "must be a point",
    "Action: click(start_box='(nan,1)')": "must be a point",
    "Action: click(start_box='(1e9,1)')": "must be a point",
    "Action: click(start_box='(٣,1)')": "must be a point",
    "Action: click(start_box=5)": "start_box must be a text in quotes",
    "Action: click('(1,1)')": "click takes start_box='...'",
    "Action: click(start_box='(1,1)', start_box='(1,1)')": "is given 'start_box' twice",
    "Action: click(start_box='(1,1)'": "the text ends within an action",
    "Action: click(start_box='(1,1)": "the quote of start_box is never closed",
    "Action: click": "the text ends within an action",
    "Action: os.system(start_box='(1,1)')": "unknown action 'os'",
    "Action: __import__('os')": "unknown action '__import__'",
    "Action: wait() 'x'": "an action was expected",
    "Action: wait(seconds='5')": "wait takes time='...'",
    "Action: press_home(key='a')": "press_home takes no arguments",
    "Action: hotkey(key='')": "must be 1 to 4 keys",
    "Action: hotkey(key='a b c d e')": "must be 1 to 4 keys",
    "Action: press(key='os.system')": "there is no key",
    "Action: scroll(start_box='(1,1)', direction='in')": "must be one of up, down, left, right",
    "Action: scroll(start_box='(1,1)')": (
        "scroll needs the argument 'direction', or 'start_box' and 'end_box'"
    ),
    "Action: hotkey(key='a', hotkey='b')": "given 'hotkey' twice",
}


@pytest.mark.parametrize("text", READ)
def test_every_spelling_is_read(text: str) -> None:
    assert read(f"Thought: so\nAction: {text}") == Actions("so", READ[text])


@pytest.mark.parametrize("text", WRONG)
def test_a_mistake_says_what_and_where(text: str) -> None:
    found = read(text)
    assert isinstance(found, Mistake)
    assert WRONG[text] in found.reason
    assert text[found.position :].startswith(found.near)
    assert str(found).startswith(found.reason)


def test_a_mistake_points_at_its_own_action() -> None:
    text = "Action: wait()\nclick(start_box='(1,1)')\npush(start_box='(2,2)')"
    assert read(text) == Mistake(
        "unknown action 'push'", text.index("push"), "push(start_box='(2,2)')"
    )


def test_what_is_thought_stays_a_thought() -> None:
    thought = "'''\nimport os\nos.system('id')\n'''\nAction: wait()\nno, \"Action: wait()\""
    assert read(f"Thought: {thought}\nAction: click(start_box='(1,1)')") == Actions(
        thought, (Click(Point(1, 1)),)
    )
    assert read("Action:click(start_box='(1,1)')") == Actions("", (Click(Point(1, 1)),))
    assert read("I click. Action: wait()") == Actions("I click.", (Sleep(),))
    assert read("Action: type(content='Action: wait()')") == Actions("", (Type("Action: wait()"),))


numbers = st.integers(-5000, 5000).map(float)
points = st.builds(Point, numbers, numbers)
keys = st.sampled_from(sorted(KEYS - {"+"}))
any_action: st.SearchStrategy[Action] = st.one_of(
    st.builds(Click, points, st.just("left"), st.integers(1, 2)),
    st.builds(Click, points, st.just("right")),
    st.builds(Hover, points),
    st.builds(LongPress, points),
    st.builds(Drag, points, points),
    st.builds(Scroll, st.sampled_from(["up", "down", "left", "right"]), st.none() | points),
    st.builds(Hotkey, st.lists(keys, min_size=1, max_size=4).map(tuple)),
    st.builds(HoldKey, keys, st.booleans()),
    st.builds(Type, st.text()),
    st.builds(Finish, st.text()),
    st.builds(CallUser, st.text()),
    st.builds(OpenApp, st.text()),
    st.builds(PhoneButton, st.sampled_from(["home", "back"])),
    st.just(Sleep()),
)


@given(st.lists(any_action, min_size=1, max_size=4), st.sampled_from(SPELLINGS))
@settings(max_examples=300, deadline=None)
def test_what_is_written_is_read_again(actions: list[Action], spelling: Spelling) -> None:
    turn = Actions("so", tuple(actions))
    assert read(write(turn, spelling)) == turn


def test_the_canonical_spelling() -> None:
    turn = Actions("Both.", (Click(AT), Type("it's\n")))
    assert (
        write(turn)
        == "Thought: Both.\nAction: click(start_box='(966,546)')\n\ntype(content='it\\'s\\n')"
    )
    assert write(Actions("", (Sleep(),))) == "Action: wait()"
    assert (
        written(Drag(Point(1, 2), Point(3, 4)), "point")
        == "drag(start_point='<point>1 2</point>', end_point='<point>3 4</point>')"
    )
    with pytest.raises(ValueError, match="no name for Click"):
        written(Click(AT, times=3))


PIECES = (
    *FUNCTIONS,
    "Action:",
    "\nAction: ",
    "Thought:",
    "(",
    ")",
    "'",
    '"',
    "=",
    ",",
    "\\",
    "\\n",
    "\n\n",
    " ",
    "(1,2)",
    "start_box='(1,2)'",
    "end_box",
    "content='",
    "key='ctrl",
    "direction=",
    "<point>1 2</point>",
    "<|box_start|>",
    "<|box_end|>",
    "<|im_end|>",
    "nan",
    "٣",
    "日",
)


def test_five_thousand_texts_give_a_typed_result_each() -> None:
    chance = random.Random(14)
    kinds = {Actions: 0, Mistake: 0}
    valid = [f"Thought: so\nAction: {text}" for text in READ]
    began = time.monotonic()
    for n in range(5000):
        if n % 3 == 0:
            text = "".join(chance.choice(PIECES) for _ in range(chance.randrange(30)))
        elif n % 3 == 1:
            letters = list(chance.choice(valid))
            for _ in range(chance.randrange(1, 4)):
                letters[chance.randrange(len(letters))] = chance.choice(string.printable)
            text = "".join(letters)
        else:
            text = "Action: " + "".join(
                chr(chance.randrange(1, 0x3000)) for _ in range(chance.randrange(60))
            )
        kinds[type(read(text))] += 1
    assert sum(kinds.values()) == 5000
    assert kinds[Actions] > 100, "the texts are too wild: hardly one is read"
    assert time.monotonic() - began < 10


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5)))
@settings(max_examples=200, deadline=None)
def test_any_text_gives_a_typed_result(pieces: list[str]) -> None:
    assert isinstance(read("Action: " + "".join(pieces)), Actions | Mistake)


@pytest.mark.parametrize(
    "part",
    ["Action:\n", "Action: ", "click(start_box='", "'", "\\", "' , x", " ", "(", "' )", "wait()"],
)
def test_long_texts_are_read_in_time_proportional_to_their_length(part: str) -> None:
    assert grows_with_length(
        read, lambda n: "Action: type(content='" + part * (n // len(part)), 50_000
    )


UI_TARS = {"min_pixels": 100 * 784, "max_pixels": 16384 * 784}
ARPO = {"min_pixels": 3136, "max_pixels": 2_116_800}
FACTOR_32 = {"factor": 32, "min_pixels": 256 * 256, "max_pixels": 16384 * 1024}
TABLE = [
    ((160, 210), UI_TARS, (252, 336)),
    ((160, 210), ARPO, (168, 224)),
    ((160, 210), FACTOR_32, (224, 320)),
    ((1280, 800), UI_TARS, (1288, 812)),
    ((1280, 800), ARPO, (1288, 812)),
    ((1280, 800), FACTOR_32, (1280, 800)),
    ((1920, 1080), UI_TARS, (1932, 1092)),
    ((1920, 1080), ARPO, (1932, 1092)),
    ((1920, 1080), FACTOR_32, (1920, 1088)),
]


@pytest.mark.parametrize(("screen", "limits", "resized"), TABLE)
def test_the_sizes_that_models_see(
    screen: tuple[int, int], limits: dict[str, int], resized: tuple[int, int]
) -> None:
    pointing = Pointing.model_validate(limits)
    assert pointing.size(*screen) == resized
    for x, y in ((0, 0), (screen[0] // 2, screen[1] // 3), (screen[0] - 1, screen[1] - 1)):
        seen = pointing.written(Click(Point(x, y)), *screen)
        assert isinstance(seen, Click)
        landed = pointing.on(seen, *screen)
        assert isinstance(landed, Click)
        assert abs(landed.at.x - x) <= 1
        assert abs(landed.at.y - y) <= 1


def test_points_are_clamped_to_the_screen_and_scaled() -> None:
    pointing = Pointing(**ARPO)
    assert pointing.on(Click(Point(3000, -5)), 1920, 1080) == Click(Point(1919, 0))
    assert pointing.on(Click(Point(966, 546)), 1920, 1080) == Click(Point(960, 540))
    assert pointing.on(Scroll("up"), 1920, 1080) == Scroll("up")
    relative = Pointing(coordinates="relative")
    assert relative.on(Drag(Point(500, 500), Point(1000, 1000)), 160, 210) == Drag(
        Point(80, 105), Point(159, 209)
    )
    assert relative.written(Click(Point(80, 105), "right"), 160, 210) == Click(
        Point(500, 500), "right"
    )


def test_every_key_has_one_name() -> None:
    assert all(
        read(f"Action: press(key={name!r})") == Actions("", (Hotkey((name,)),)) for name in NAMED
    )
