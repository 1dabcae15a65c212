"""The console: plain lines without a terminal, a table of the last steps with one."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cluster.driver_actor import progress as progress_of
from rayloop.view.progress import ROWS, Progress
from rayloop.view.words import describe, doing, span, visible

METRICS = {
    "step": 3.0,
    "reward/mean": 0.25,
    "rollout/trained": 12.0,
    "rollout/trajectories": 16.0,
    "filtered/max_length": 1.0,
    "filtered/all_wrong": 3.0,
    "actor/loss": 0.125,
    "actor/grad_norm": float("nan"),
    "timing_s/gen": 1.26,
    "timing_s/step": 30.0,
    "val/reward/mean": 0.75,
}


def test_plain_lines_show_what_there_is() -> None:
    out = io.StringIO()
    with Progress(20, "T=1", "greedy", Console(file=out, force_terminal=False, soft_wrap=True)) as progress:
        progress.note("run folder [bold]runs/a")
        progress.doing("generating 3/16")
        progress.step(METRICS)
        progress.close({"steps": 3, "ledger": {"trained": 12, "stale": 0}})
    assert out.getvalue().splitlines() == [
        "run folder [bold]runs/a",
        "step 3/20  reward(T=1) 0.250  trained 12/16  filtered 25%  loss 0.1250  grad nan  gen_s 1.3  step_s 30.0  "
        "held_out(greedy) 0.750  about 8 min left",
        "done: steps 3",
        "  ledger: trained 12",
    ]


def test_a_terminal_gets_a_table_of_the_last_steps() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with Progress(20, "T=1", "greedy", console) as progress:
        progress.doing("starting actors 2/5")
        for step in range(1, ROWS + 4):
            progress.step({**METRICS, "step": float(step)})
            progress.note(f"note {step}")
            progress.doing(f"generating {step}/16")
    assert "starting actors 2/5" in out.getvalue()
    assert "generating 7/16  about 6 min left" in out.getvalue()
    final = out.getvalue().rpartition("entropy")[2]
    assert f"{ROWS + 3}/20" in final
    assert "4/20" in final
    assert " 3/20" not in final.replace("13/20", "")
    assert "generating" not in final.rpartition(f"{ROWS + 3}/20")[2], "what was being done is gone at the end"
    assert all(f"note {step}" in out.getvalue() for step in range(1, ROWS + 4))


@pytest.mark.parametrize(("width", "there", "gone"), [
    (130, ["publish", "filtered"], []),
    (80, ["reward", "T=1", "trained/", "16/16", "held-out", "greedy", "0.750", "0.250"], ["publish", "…"]),
    (45, ["reward", "T=1", "trained/", "held-out", "greedy", "0.750", "0.250"], ["loss", "entropy", "…"]),
])  # fmt: skip
def test_a_narrow_terminal_gets_fewer_columns(width: int, there: list[str], gone: list[str]) -> None:
    out = io.StringIO()
    with Progress(
        1000, "T=1", "greedy", Console(file=out, force_terminal=True, width=width, color_system=None)
    ) as progress:
        progress.step(
            {**METRICS, "step": 100.0, "rollout/trained": 16.0, "timing_s/update_actor": 100.0, "actor/entropy": 1.5}
        )
    assert [word for word in there if word not in out.getvalue()] == []
    assert [word for word in gone if word in out.getvalue()] == []
    assert "100/1000" in out.getvalue()


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"event": "starting", "step": 0, "actors": {"rollout": 1, "policy": 2}}, "[0] starting 3 actors: 1 rollout, 2 policy"),
        ({"event": "started", "step": 0, "seconds": 21.3}, "[0] all actors are ready after 21 s"),
        ({"event": "begin", "step": 0, "lineage": 1, "restored": None, "superseded_records": 0},
         "[0] training begins with the start model"),
        ({"event": "begin", "step": 5, "lineage": 2, "restored": "step_5", "superseded_records": 3},
         "[5] training continues from step_5; records of 3 later steps are moved aside"),
        ({"event": "parity", "step": 0, "tokens": 34, "mean": 2.22e-07, "max": 1.19e-06, "images": 0, "swapped": 0.0,
          "tolerance": 0.001},
         "[0] engine and trainer agree: yes, their log-probs differ by 2.22e-07 on average over 34 tokens (0.001 is allowed)"),
        ({"event": "parity", "step": 0, "tokens": 9, "mean": 0.5, "max": 1.0, "images": 4, "swapped": 0.25, "tolerance": 0.001},
         "[0] engine and trainer agree: NO, their log-probs differ by 0.5 on average over 9 tokens (0.001 is allowed); other "
         "images change them by 0.25"),
        ({"event": "evaluated", "step": 1, "val/reward/mean": 0.743, "val/exact/mean": 0.275, "val/a/reward/mean": 0.5,
          "val/control/blind/reward/mean": 0.1, "val/scored": 200.0, "val/unscored": 0.0},
         "[1] held-out: reward 0.743, exact 0.275 over 200 rows"),
        ({"event": "evaluated", "step": 1, "val/reward/mean": 0.7, "val/scored": 10.0, "val/unscored": 2.0},
         "[1] held-out: reward 0.700 over 10 rows; 2 HAVE NO SCORE"),
        ({"event": "already_done", "step": 2, "advice": "raise steps above 2 to go on"},
         "[2] there is nothing left to train: raise steps above 2 to go on"),
        ({"event": "preempted", "step": 2, "ledger": {"trained": 4}},
         "[2] stopped as asked; a checkpoint is there to continue from"),
        ({"event": "quarantined", "path": "a.jsonl:3", "reason": "bad"}, "left out: a.jsonl:3: bad"),
        ({"event": "worker_lost", "step": 2, "role": "reward", "why": "first\nsecond"}, "[2] worker_lost: role reward, why first"),
        ({"event": "reward_raised", "step": 2, "why": "KeyError", "traceback": "Traceback\n  x"},
         "[2] reward_raised: why KeyError\nTraceback\n  x"),
    ],
    ids=lambda value: value["event"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_events_are_told_in_plain_words(event: dict[str, Any], line: str) -> None:
    assert describe(event) == line


def test_what_is_being_done_is_told_with_how_far_it_is() -> None:
    driver = SimpleNamespace(
        timings=SimpleNamespace(phase="start"),
        services=SimpleNamespace(up=2, wanted=5),
        player=SimpleNamespace(playing=11, evaluation=None),
        production=SimpleNamespace(in_flight={1: "group", 2: "group"}, finished=SimpleNamespace(groups=["group"])),
        config=SimpleNamespace(algorithm=SimpleNamespace(group_size=16)),
    )

    def now() -> str:
        return doing(driver.timings.phase, progress_of(driver))

    assert now() == "starting actors 2/5"
    driver.timings.phase = "gen"
    assert now() == "generating 37/48"
    driver.timings.phase = "testing"
    assert now() == "evaluating"
    driver.player.evaluation = 3, 200
    assert now() == "evaluating 3/200"
    driver.timings.phase = "update_actor"
    assert now() == "training"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (240, "4 min"), (7200, "2.0 h")])
def test_durations_are_round(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_control_characters_are_written_out() -> None:
    assert visible("a\tb\nc\x1b]0;title\x07\x9b31m\r ü") == "a\tb\nc\\x1b]0;title\\x07\\x9b31m\\r ü"
