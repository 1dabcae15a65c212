"""What a policy may write to break what it is played with: texts, calls of tools, moves, code.

Nothing of it may leave an episode without a score (tests/contracts/test_hostile.py).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rayloop.envs.grammar.calls import FUNCTIONS

HUGE = 10_000
"""Characters of the largest texts."""
NUMBERS = (
    "0",
    "-0",
    "-1",
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "-Infinity",
    "9" * 400,
    "1" * 4300,
    "1" * 5000,
    "0x10",
    "1_000",
    "٣",
    "½",
    "1e308",
    "50%",
    "1/0",
    "1,000",
    ".5",
    "--1",
    "1e",
)
NAMES = (
    "self",
    "cls",
    "function",
    "timeout",
    "args",
    "kwargs",
    "arguments",
    "tool",
    "name",
    "/",
    "*",
    "**",
    "",
    " ",
    "a b",
    "1",
    "class",
    "_",
    "_x",
    "__class__",
    "__init__",
    "λ",
    "\u0000",
    "a\nb",
    "'",
    '"',
    "x" * HUGE,
    "state",
    "screen",
    "text",
    "image",
    "None",
    "lambda",
    "__dict__",
    "__proto__",
    "\ud800",
    "\u202e",
    "\x1b[2J",
    "\ufeff",
)
"""Of arguments: parameters of Python's own and of ours, keywords, and what no identifier is."""
FRAGMENTS = (
    "<answer>",
    "</answer>",
    "\\boxed{",
    "}",
    "{",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<code>",
    "</code>",
    "```python\n",
    "```",
    "<use_tool>",
    "</use_tool>",
    "<bbox>",
    "</bbox>",
    "<confidence>",
    "</confidence>",
    "<type>",
    "<table>",
    "</table>",
    "```json",
    "Action: ",
    "Thought: ",
    "click(",
    "start_box='(",
    "type(content='",
    "drag(start_box='",
    "hotkey(key='",
    "scroll(direction='",
    "finished(content='",
    "wait()",
    ")",
    "(",
    "[",
    "]",
    ",",
    ":",
    '"',
    "'",
    "\\",
    "\n",
    " ",
    "\0",
    "\u2028",
    "\ufffd",
    "😀",
    "İ",
    "ﬀ",
    "A",
    "yes",
    "\\frac{",
    "\\sqrt{",
    "^",
    "_",
    "\\pi",
    "%",
    "°",
    "<|im_end|>",
    "<|image_pad|>",
    "<|vision_start|>",
    '{"by": ',
    "[up]",
    *NUMBERS,
)


def call(name: Any, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def values() -> Iterator[Any]:
    """What an argument may be."""
    nested: Any = 1
    for _ in range(400):
        nested = [nested]
    yield from (
        None,
        True,
        False,
        0,
        -1,
        1e308,
        float("nan"),
        float("inf"),
        10**400,
        "",
        "\ud800",
        "\u0000",
        "/etc/passwd",
        "../" * 40,
    )
    yield from (
        [],
        [0],
        [0, 0, 1, 1],
        [1, 1, 0, 0],
        [0, 0, 0, 0],
        [-1, -1, 2, 2],
        [0.5] * 9,
        [[0, 0], [1, 1]],
        [None] * 4,
        ["0"] * 4,
    )
    yield from (
        [float("nan")] * 4,
        [10**400] * 4,
        {},
        {"self": 1},
        nested,
        "x" * HUGE,
        list(range(2000)),
    )


DEEP = 10_000
"""Levels of what is nested too deeply for any reader."""
WIDE = 1_000
"""Elements of lists that are longer than any tool needs."""
CONTROLS = "".join(map(chr, (*range(32), 127, *range(128, 160)))) + "\u200f\u202e\u2066\ufeff\u2028"
"""Control characters, and marks that change the direction of a text."""


def written_values() -> list[str]:
    """JSON of arguments that ``json.dumps`` does not write, or that is too large for ``values``,
    which every argument gets.
    """
    return [
        "1" * 5000,
        "-" + "1" * 5000,
        f"0.{'0' * 5000}1",
        f"{'1' * 5000}.5",
        "1e99999",
        "-1E+400",
        "[" * DEEP + "]" * DEEP,
        '{"a":' * DEEP + "1" + "}" * DEEP,
        f"[{'0.5,' * WIDE}1]",
        f"[{','.join(['[0,0,1,1]'] * 4)}]",
        '["\\ud800", "\\udc00", 1, 1]',
        '{"__class__": {"__init__": 1}, "__class__": null, "\\ud83d": 1}',
        '[{"x": 0}, {"y": 0}, 1, 1]',
        "[true, false, true, true]",
        "[0, 0, -0.0, 5e-324]",
        json.dumps(CONTROLS),
        json.dumps("\u202e" * 1000),
        '"\\u0000\\ud800"',
    ]


def written_calls(name: str, usual: str, first: str) -> list[str]:
    """Calls that ``json.dumps`` does not write: of the tool ``name`` with the JSON ``usual``, and
    its argument ``first``.
    """
    key = json.dumps(first)
    named = json.dumps(name)
    bodies = [
        *(f'{{"name": {named}, "arguments": {{{key}: {value}}}}}' for value in written_values()),
        *(f'{{"name": {named}, "arguments": {value}}}' for value in written_values()),
        f'{{"name": {named}, "name": null, "arguments": {usual}}}',
        f'{{"name": null, "name": {named}, "arguments": {usual}, "arguments": {usual}}}',
        f'{{"name": {named}, "arguments": {{{key}: null, {key}: 1, {key}: [0, 0, 1, 1]}}}}',
        (
            f'{{"name": {named}, "arguments":'
            f" {{{', '.join(f'{chr(34)}{n}{chr(34)}: {n}' for n in range(WIDE))}}}}}"
        ),
        f'{{"name": {json.dumps(name + chr(10))}, "arguments": {usual}}}',
        f'{{"name": {json.dumps(chr(10).join(name))}, "arguments": {usual}}}',
        f'{{"name": {json.dumps(chr(0x202E) + name)}, "arguments": {usual}}}',
        f'{{"name": "\\ud800{name}", "arguments": {usual}}}',
        f'\ufeff{{"name": {named}, "arguments": {usual}}}',
        f'{{"name": {named}, "arguments": {usual}}} {{"name": {named}}}',
        f'[{{"name": {named}, "arguments": {usual}}}]',
        f'{{"name": [{named}], "arguments": {usual}}}',
        f'{{"name": {{"name": {named}}}, "arguments": {usual}}}',
        f'{{"name": {named}, "arguments": {json.dumps(json.dumps(usual))}}}',
        f'{{"name": {named}, "arguments": {json.dumps("{" * DEEP)}}}',
        (
            f'{{"name": {named}, "arguments":'
            f" {json.dumps(' {' + chr(34) + 'a' + chr(34) + ':' + '[' * DEEP + ']' * DEEP + '}')}}}"
        ),
        f'<tool_call>{{"name": {named}, "arguments": {usual}}}',
        f"{{name: {named}}}",
        json.dumps(CONTROLS),
        CONTROLS,
        "null",
        '""',
    ]
    return [f"<tool_call>{body}</tool_call>" for body in bodies]


def calls(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Calls of ``tools`` (schemas as chat templates take them), and calls that are none."""
    found = []
    for tool in tools:
        name, parameters = tool["function"]["name"], tool["function"]["parameters"]
        known = list(parameters.get("properties", {}))
        usual = {
            one: example(parameters["properties"][one]) for one in parameters.get("required", ())
        }
        found += [call(name, usual), call(name, {})]
        found += [call(name, {**usual, odd: 1}) for odd in NAMES]
        found += [call(name, {**usual, one: value}) for one in known for value in values()]
        written = json.dumps(usual)
        found += [
            f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(written)}}}</tool_call>',
            (
                f'<tool_call>{{"name": "{name}", "arguments": {written}, "arguments":'
                " {}}</tool_call>"
            ),
            (
                f'<tool_call>{{"name": "{name}", "arguments": {written[:-1]}, "self": 1, "self":'
                " 2}}</tool_call>"
            ),
            f'<tool_call>{{"name": "{name}", "arguments": {"[" * 900}{"]" * 900}}}</tool_call>',
            f'<tool_call>{{"name": "{name}", "parameters": {written}}}</tool_call>',
            f"<tool_call>{{'name': '{name}', 'arguments': {{}}}}</tool_call>",
            f'<tool_call>{{"name": "{name}"}}</tool_call>',
            f'<tool_call>{{"name": "{name}", "arguments": {written}}}',
            call(name, usual) * 80,
        ]
        found += [
            call(name, value) for value in (None, 1, "x", [usual], '{"a": NaN}', '"{}"', True)
        ]
        found += written_calls(name, written, known[0] if known else "a")
    odd_names: tuple[Any, ...] = (None, 1, [], {}, "", "sub", "__class__", "x" * HUGE)
    return (
        found
        + [call(name, {"a": 1}) for name in odd_names]
        + [f"<tool_call>{number}</tool_call>" for number in NUMBERS]
    )


def example(schema: Mapping[str, Any]) -> Any:
    """A value that the schema of an argument takes."""
    if schema.get("examples"):
        return schema["examples"][0]
    return {"array": [0, 0, 1, 1], "number": 1, "integer": 1, "boolean": True, "object": {}}.get(
        str(schema.get("type")), "x"
    )


def moves() -> list[str]:
    """Actions of games and screens, and texts that are nearly such."""
    points = [f"({x},{y})" for x, y in zip(NUMBERS, reversed(NUMBERS), strict=True)]
    found = [
        *NUMBERS,
        *(f"[{number}]" for number in NUMBERS),
        *(f'{{"by": {number}}}' for number in NUMBERS),
    ]
    found += [f"Thought: x\nAction: click(start_box='{point}')" for point in points]
    found += [f"Action: drag(start_box='{a}', end_box='{b}')" for a, b in pairwise(points)]
    keys = ("", "ctrl", "ctrl " * 40, "f99", "\u0000", "'", "space", "ctrl alt del", "x" * 500)
    found += [f"Action: hotkey(key='{key}')" for key in keys]
    found += [
        f"Action: type(content='{text}')"
        for text in ("", "<", "\\n", "\\'", "\u0000", "İ😀", "$(reboot)", "x" * 3000)
    ]
    found += [
        f"Action: scroll(start_box='(1,1)', direction='{way}')"
        for way in ("up", "UP", "", "in", "left" * 99)
    ]
    odd = (
        "1" * 5000,
        "[0,0,1,1]",
        "(" * 500,
        "1,1,1",
        "1 1",
        "\uff11,\uff12",
        "\u202e1,1",
        "-0.0,1e-400",
        "0.5," * 20_000,
    )
    found += [f"Action: click(start_box='{one}')" for one in odd]
    found += [
        f"Action: type(content='{text}')"
        for text in (CONTROLS.replace("'", ""), "\u202eabc\u202c", "\x1b[2J", "e\u0301" * 99)
    ]
    found += [
        "Action: (start_box='(1,1)')",
        "Action: click\n(start_box='(1,1)')",
        "Action: __class__(point='(1,1)')",
    ]
    found += [
        "Action: click(self='(1,1)')",
        "Action: click(start_box='(1,1)', start_box='(2,2)')",
        "Action: click(**{})",
    ]
    found += [
        "Action: click(start_box=None)",
        "Action: click({'start_box': '(1,1)'})",
        f"Action: {'click(' * 2000}",
    ]
    found += [
        "{" * 10 + "}" * 10,
        '{"by": null}',
        '{"by": 1, "by": "x"}',
        '{"by": "\\ud800"}',
        '{"\\ud800": 1}',
        '{"__class__": 1}',
    ]
    found += [f'{{"by": {value}}}' for value in written_values()]
    found += screen_calls()
    return [
        *found,
        "Action: wait()\n" * 30,
        "Action: finished()",
        "Action: call_user()",
        "Action: ",
        "[up][down]",
        "{" * 3000,
    ]


_WRITTEN = {
    "point": "(12,34)",
    "text": "x",
    "key": "a",
    "keys": "ctrl a",
    "direction": "up",
    "ignored": "5",
    "seconds": "1",
}
"""A value of each kind of argument in the grammar of screens."""


def screen_calls() -> list[str]:
    """Every function of the grammar of screens: with all its arguments, with those that it needs,
    and without any.
    """
    found = []
    for name, signature in FUNCTIONS.items():
        needed = [argument for argument in signature.arguments if argument.required]
        for arguments in (signature.arguments, needed, ()):
            written = ", ".join(
                f"{argument.names[0]}='{_WRITTEN[argument.kind]}'" for argument in arguments
            )
            found.append(f"Action: {name}({written})")
    return list(dict.fromkeys(found))


def phone_calls() -> list[str]:
    """Actions of a phone as JSON of MobileGym's: at the edges, in the wrong order, of no app."""
    points = ([0, 0], [1000, 1000], [500, 500], [1, 999])
    calls = [
        {"action": name, "point": point} for name in ("CLICK", "LONGPRESS") for point in points
    ]
    calls += [{"action": "DOUBLE_TAP", "point": point} for point in points]
    calls += [
        {"action": name, "point1": start, "point2": end}
        for name in ("SWIPE", "DRAG")
        for start in points
        for end in points
    ]
    calls += [{"action": name} for name in ("BACK", "HOME", "RECENT", "ENTER", "BACK", "BACK")]
    apps = ("Clock", "clock ", "", "x" * HUGE, "<b>", "'", '"]);alert(1)//', "\u202e", "\0", "../")
    calls += [{"action": "AWAKE", "value": app} for app in apps]
    calls += [
        {"action": "TYPE", "value": CONTROLS},
        {"action": "TYPE", "value": "x", "clear": True},
    ]
    calls += [{"action": "WAIT", "value": seconds} for seconds in (0, -1, 1e-9)]
    return [json.dumps(one) for one in calls]


def codes() -> list[str]:
    """Turns of an interpreter: what fails, prints much, and gives pictures that are none."""
    bodies = (
        "1/0",
        "print('x' * 10**6)",
        "import sys; sys.exit(3)",
        "raise BaseException",
        "print('\\ud800')",
        "def f(): return f()\nf()",
        "del __builtins__",
        "print(image_clue_0.size)",
        "[",
        "\0",
        "import os; os._exit(1)",
        (
            "import matplotlib.pyplot as plt\nfor _ in range(40): plt.figure(figsize=(1, 1));"
            " plt.plot([1])\nplt.show()"
        ),
        "import matplotlib.pyplot as plt\nplt.figure(figsize=(4000, 1))\nplt.show()",
    )
    return [f"<code>\n```python\n{body}\n```\n</code>" for body in bodies]


def texts(mixtures: int = 60) -> list[str]:
    """Texts for whatever reads texts."""
    rng = random.Random(7)
    mixed = ["".join(rng.choices(FRAGMENTS, k=rng.randint(1, 25))) for _ in range(mixtures)]
    plain = [
        "",
        " ",
        "\n" * 50,
        "\0",
        "\ud7ff😀",
        "9" * 5000,
        "٣" * 50,
        "a" * HUGE,
        "<tool_call>" * 300,
        "<answer>" * 300 + "x",
        "[" * 3000,
    ]
    tagged = [f"<answer>{number}</answer>" for number in NUMBERS] + [
        f"<answer>\\boxed{{{number}}}</answer>" for number in NUMBERS
    ]
    boxes = [f"<bbox>[{number}, 0, {number}, 1]</bbox>" for number in NUMBERS]
    return [*plain, *tagged, *boxes, *grown(), *mixed]


def grown() -> list[str]:
    """Answers that grow in whatever reads them: nested, long, or powers of powers."""
    inside = [
        "9**9**9**9",
        "9^{9^{9^{9}}}",
        "2^{-99999999999}",
        "99999999!",
        "\\frac{1}{" * 1000 + "0" + "}" * 1000,
        "\\sqrt[99999999]{2}",
        "(" * DEEP + ")" * DEEP,
        "-" * DEEP + "1",
        "1e1000000000",
        "1," * WIDE,
        f"[{'0.5,' * WIDE}1]",
        "\\begin{pmatrix}" + "1 & " * 5000 + "\\end{pmatrix}",
        "\\text{" * 2000,
        '{"a":' * DEEP + "1" + "}" * DEEP,
        "１２３",
        "一千",
        "²",
        "\u202e5",
        CONTROLS,
        "e\u0301" * 5000,
    ]
    return [
        *(f"<answer>{one}</answer>" for one in inside),
        *(f"\\boxed{{{one}}}" for one in inside),
        *inside,
    ]
