"""The completions of a step on a terminal: two of one group with their rewards, whatever a model
wrote.
"""

from __future__ import annotations

import io
import json
import time
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from rayloop.run.records.rollouts import RolloutRecord, RolloutTurn
from rayloop.view.completions import LINE_COLUMNS, MAX_TEXT_CHARACTERS, completions
from rayloop.view.progress import Progress

IMAGE = {"sha256": "3f2a12cd" + 56 * "0", "width": 160, "height": 210}
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b5n\rover\x08\x00"
BIDI = "\u202eevil\u202c \u2067שלום\u2069 مرحبا \u200f"


def record(
    sample: int,
    reward: float | None,
    *texts: str,
    group: int = 1,
    task: str = "arc/7",
    **changes: Any,
) -> RolloutRecord:
    seen = RolloutTurn("user", "seen", False, (IMAGE,))
    turns = [turn for text in texts for turn in (RolloutTurn("assistant", text, True), seen)]
    credit = None if reward is None else reward - 0.5
    found = {
        "prompt": "<|im_start|>user\nWhat is it?<|im_end|>\n",
        "images": ({**IMAGE, "path": "/data/page 1.png"},),
    }
    return RolloutRecord(
        group=group,
        sample=sample,
        attempt=0,
        task=task,
        source="",
        turns=tuple(turns[:-1]),
        end_reason="done",
        reward=reward,
        advantage=credit,
        **{**found, **changes},
    )


def said(found: dict[str, Any], terminal: int = 0, encoding: str = "utf-8") -> str:
    """What is printed for these completions: on a terminal so many columns wide, or else to a file."""
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, newline="")
    options = (
        {"force_terminal": True, "width": terminal, "color_system": None}
        if terminal
        else {"force_terminal": False}
    )
    with Progress(
        9, "T=1", "greedy", Console(file=out, highlight=False, soft_wrap=True, **options)
    ) as progress:  # type: ignore[arg-type]
        progress.step({"step": 1.0, "reward/mean": 0.5})
        progress.samples(found)
    out.flush()
    return raw.getvalue().decode(encoding)


def test_the_best_and_the_worst_of_the_first_group_that_differs_are_shown_in_four_lines() -> None:
    same = [record(sample, 0.0, "none of these", group=1) for sample in range(2)]
    records = [*same, record(0, None, "lost", group=2), record(1, 0.25, "in between", group=2)]
    records += [
        record(2, 1.0, "click(3)", "done\n\nnow", group=2),
        record(3, 0.5, "in between", group=2),
    ]
    step, *lines = said(completions(records, 2)).splitlines()
    assert step == "step 1/9  reward 0.500"
    assert lines == [
        "  task arc/7: [image page 1.png 160x210] What is it?",
        "  sample  reward advantage  completion",
        "  #2       1.000    +0.500  click(3) | [image 3f2a12cd 160x210] | done now",
        "  #0        none         -  lost",
    ]
    assert len(said(completions(records, 4)).splitlines()) == 1 + 6
    assert "#2" in said(completions(records, 1)).splitlines()[-1]
    assert completions(same, 2)["rows"][0][0] == 0, (
        "a group without a difference is better than nothing"
    )


@pytest.mark.parametrize(
    "hostile",
    [
        ESCAPES,
        BIDI,
        "\ud800 half",
        "a\u2028b\u2029c\x85d",
        "</script>[bold]not markup[/]",
        "漢字" * 200,
        "e" + "\u0301" * 5000,
        "\x1b[31m" * 200_000,
        "x" * 2**20,
        "word\n" * 200_000,
    ],
)
@pytest.mark.parametrize("terminal", [0, 60])
def test_hostile_texts_stay_in_their_line_and_steer_nothing(hostile: str, terminal: int) -> None:
    records = [
        record(0, 1.0, hostile, prompt=hostile),
        record(1, 0.0, "right", hostile, task=hostile),
    ]
    found = completions(records, 2)
    assert len(json.dumps(found)) < 40 * MAX_TEXT_CHARACTERS, (
        "little travels to the terminal's process"
    )
    text = said(found, terminal)
    kept = (
        text.replace("\x1b[?25l", "")
        .replace("\x1b[?25h", "")
        .replace("\x1b[2K", "")
        .replace("\x1b[1A", "")
    )
    assert [c for c in kept if not c.isprintable() and c not in "\r\n"] == [], (
        "rich itself only moves its table"
    )
    assert max(cell_len(line) for line in kept.splitlines()) <= (terminal or LINE_COLUMNS)
    if not terminal:
        assert len(text.splitlines()) == 1 + 4
    assert "\\x1b]0;" in text or hostile != ESCAPES
    assert "\\u202ee" in text or hostile != BIDI


def test_a_terminal_shows_those_of_the_newest_step_below_its_table_and_latin_1_gets_what_it_can_write() -> (
    None
):
    found = completions([record(0, 1.0, "日本 é"), record(1, 0.0, "no")], 2)
    last = said(found, 80).rpartition("reward\n")[2]
    assert last.index("1/9") < last.index("#0") < last.index("#1")
    assert "\\u65e5\\u672c é" in said(found, encoding="latin-1")


def test_the_cost_of_a_step_does_not_grow_with_the_texts() -> None:
    """A step takes seconds; the smallest of some tries is that of this code, not of other work on
    the machine.
    """
    records = [
        record(sample, float(sample), *["\x1b" * 2**20] * 4, prompt="<|im_start|>" * 2**16)
        for sample in range(8)
    ]
    tries = []
    for _ in range(5):
        began = time.thread_time()
        said(completions(records, 2))
        tries.append(time.thread_time() - began)
    assert min(tries) < 0.05
