"""The console: plain lines without a terminal, a table of the last steps with one."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rayloop.cluster.driver_actor import progress as progress_of
from rayloop.view.formatting import describe, doing, span, visible
from rayloop.view.progress import TABLE_ROWS, Progress

METRICS = {
    "step": 3.0,
    "reward/mean": 0.25,
    "rollout/trained": 12.0,
    "rollout/trajectories": 16.0,
    "filtered/max_length": 1.0,
    "filtered/all_wrong": 3.0,
    "actor/loss": 0.0,
    "actor/grad_norm": float("nan"),
    "actor/entropy": 1.5,
    "perf/tokens_per_second": 871.3,
    "timing_s/gen": 18.0,
    "timing_s/update_actor": 9.0,
    "timing_s/update_weights": 1.4,
    "timing_s/testing": 1.6,
    "timing_s/step": 30.0,
    "val/reward/mean": 0.75,
}


def test_plain_lines_show_what_there_is() -> None:
    out = io.StringIO()
    with Progress(
        20, "T=1", "greedy", Console(file=out, force_terminal=False, soft_wrap=True)
    ) as progress:
        progress.note("run folder [bold]runs/a")
        progress.doing("generating 3/16")
        progress.step(METRICS)
        progress.close({"steps": 3, "ledger": {"trained": 12, "stale": 0}})
    assert out.getvalue().splitlines() == [
        "run folder [bold]runs/a",
        (
            "step 3/20  reward 0.250  trained 12/16  entropy 1.500  grad nan  871 tok/s  30.0 s:"
            " gen 60% train 30% eval 5%  8 min left"
        ),
        "done: steps 3",
        "  ledger: trained 12",
    ]


def lines(*steps: dict[str, float]) -> list[str]:
    out = io.StringIO()
    with Progress(
        100, "T=1", "greedy", Console(file=out, force_terminal=False, soft_wrap=True)
    ) as progress:
        for step in steps:
            progress.step(step)
    return out.getvalue().splitlines()


def test_a_line_says_what_moves_and_not_a_loss_of_nothing_in_about_120_columns() -> None:
    step = {
        "step": 60.0,
        "reward/mean": 0.412,
        "rollout/trained": 128.0,
        "rollout/trajectories": 144.0,
        "actor/loss": 0.0,
        "actor/grad_norm": 0.424,
        "actor/entropy": 0.352,
        "perf/tokens_per_second": 871.3,
        "timing_s/gen": 1.0,
        "timing_s/update_actor": 0.9,
        "timing_s/update_weights": 0.05,
        "timing_s/step": 2.0,
    }
    *_, line = lines(*[step] * 4)
    assert (
        line == "step 60/100  reward 0.412 (+0.000)  trained 128/144  entropy 0.352  grad 0.42  871"
        " tok/s  "
        "2.0 s: gen 50% train 45%  80 s left"
    )
    assert len(line) <= 125
    assert lines({**step, "timing_s/step": 12.0, "timing_s/testing": 10.0})[0].endswith(
        "80 s left"
    ), "few steps evaluate"
    assert "  KL 0.0012  " in lines({**step, "actor/kl": 0.00123})[0]
    assert "  excluded 50%  " in lines({**step, "excluded/timeout": 72.0})[0]


def test_a_line_says_which_updates_were_skipped() -> None:
    skipped = {**METRICS, "actor/updates": 1.0, "actor/skipped_updates": 3.0}
    assert "  SKIPPED 3/4 updates  " in lines(skipped)[0]
    assert "SKIPPED" not in lines({**skipped, "actor/skipped_updates": 0.0})[0]
    said = describe({"event": "updates_skipped", "step": 3, "skipped": 3, "updates": 4})
    assert "3 of 4 updates of this step were skipped" in said


def test_the_trend_is_of_the_last_steps_and_waits_for_four() -> None:
    rewards = [0.0, 0.1, 0.2, 0.3, *[1.0] * 10, *[1.5] * 10]
    said = lines(
        *({"step": float(n), "reward/mean": reward} for n, reward in enumerate(rewards, 1))
    )
    assert said[2:4] == ["step 3/100  reward 0.200", "step 4/100  reward 0.300 (+0.200)"]
    assert said[-1] == "step 24/100  reward 1.500 (+0.500)", "of the last twenty only"


def test_a_terminal_gets_a_table_of_the_last_steps() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with Progress(20, "T=1", "greedy", console) as progress:
        progress.doing("starting actors 2/5")
        for step in range(1, TABLE_ROWS + 4):
            progress.step({**METRICS, "step": float(step)})
            progress.note(f"note {step}")
            progress.doing(f"generating {step}/16")
    assert "starting actors 2/5" in out.getvalue()
    assert "generating 7/16  6 min left" in out.getvalue()
    final = out.getvalue().rpartition("entropy")[2]
    assert f"{TABLE_ROWS + 3}/20" in final
    assert "4/20" in final
    assert " 3/20" not in final.replace("13/20", "")
    assert "generating" not in final.rpartition(f"{TABLE_ROWS + 3}/20")[2], (
        "what was being done is gone at the end"
    )
    assert all(f"note {step}" in out.getvalue() for step in range(1, TABLE_ROWS + 4))


@pytest.mark.parametrize(
    ("width", "there", "gone"),
    [
        (130, ["weight_sync", "filtered", "871", "60%"], ["KL", "excluded"]),
        (
            80,
            ["reward", "T=1", "trained/", "16/16", "held-out", "greedy", "0.750", "0.250"],
            ["weight_sync", "…"],
        ),
        (
            45,
            ["reward", "T=1", "trained/", "held-out", "greedy", "0.750", "0.250"],
            ["loss", "entropy", "…"],
        ),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns(
    width: int, there: list[str], gone: list[str]
) -> None:
    out = io.StringIO()
    with Progress(
        1000,
        "T=1",
        "greedy",
        Console(file=out, force_terminal=True, width=width, color_system=None),
    ) as progress:
        progress.step({**METRICS, "step": 100.0, "rollout/trained": 16.0})
    assert [word for word in there if word not in out.getvalue()] == []
    assert [word for word in gone if word in out.getvalue()] == []
    assert "100/1000" in out.getvalue()


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"event": "starting", "step": 0, "actors": {"rollout": 1, "policy": 2}},
            "[0] starting 3 actors: 1 rollout, 2 policy",
        ),
        ({"event": "started", "step": 0, "seconds": 21.3}, "[0] all actors are ready after 21 s"),
        (
            {"event": "begin", "step": 0, "lineage": 1, "restored": None, "superseded_records": 0},
            "[0] training begins with the start model",
        ),
        (
            {"event": "begin", "step": 0, "lineage": 2, "restored": None, "superseded_records": 45},
            "[0] training begins with the start model; records of 45 later steps are moved aside",
        ),
        (
            {
                "event": "begin",
                "step": 5,
                "lineage": 2,
                "restored": "step_5",
                "superseded_records": 3,
            },
            "[5] training continues from step_5; records of 3 later steps are moved aside",
        ),
        (
            {
                "event": "logprob_check",
                "step": 0,
                "tokens": 34,
                "mean": 2.22e-07,
                "max": 1.19e-06,
                "images": 0,
                "swapped": 0.0,
                "tolerance": 0.001,
            },
            (
                "[0] engine and trainer agree: yes, their log-probs differ by 2.22e-07 on average"
                " over 34 tokens (0.001 is allowed)"
            ),
        ),
        (
            {
                "event": "logprob_check",
                "step": 0,
                "tokens": 9,
                "mean": 0.5,
                "max": 1.0,
                "images": 4,
                "swapped": 0.25,
                "tolerance": 0.001,
            },
            (
                "[0] engine and trainer agree: NO, their log-probs differ by 0.5 on average over 9"
                " tokens (0.001 is allowed); other images change them by 0.25"
            ),
        ),
        (
            {
                "event": "self_test",
                "step": 0,
                "group": "vision",
                "moved": 0.0338,
                "follows": 5.05e-07,
            },
            (
                "[0] weight sync (vision) tested: a change of these weights moved the trainer's"
                " log-probs by 0.0338; those of the engine, synced, then differed by 5.05e-07"
            ),
        ),
        (
            {
                "event": "evaluated",
                "step": 1,
                "val/reward/mean": 0.743,
                "val/exact/mean": 0.275,
                "val/a/reward/mean": 0.5,
                "val/control/blind/reward/mean": 0.1,
                "val/scored": 200.0,
                "val/unscored": 0.0,
            },
            "[1] held-out: reward 0.743, exact 0.275 over 200 rows",
        ),
        (
            {
                "event": "evaluated",
                "step": 1,
                "val/reward/mean": 0.7,
                "val/scored": 10.0,
                "val/unscored": 2.0,
            },
            "[1] held-out: reward 0.700 over 10 rows; 2 HAVE NO SCORE",
        ),
        (
            {
                "event": "evaluated",
                "step": 9,
                "val/reward/mean": 0.5,
                "val/reward/low": 0.4,
                "val/reward/high": 0.6,
                "val/scored": 8.0,
                "val/unscored": 0.0,
                "val_sampled/reward/mean": 0.25,
                "val_sampled/iou/mean": 0.25,
                "val_sampled/scored": 31.0,
                "val_sampled/unscored": 1.0,
                "val/best": 0.75,
                "val/best_step": 6.0,
            },
            (
                "[9] held-out: reward 0.500 over 8 rows; sampled reward 0.250 over 31 answers; 1"
                " HAVE NO SCORE (best so far 0.750, of step 6)"
            ),
        ),
        (
            {
                "event": "gain",
                "step": 60,
                "since": 0,
                "rewards": {
                    "sampled": {
                        "tasks": 104,
                        "before": 0.47,
                        "after": 0.585,
                        "gain": [0.115, 0.081, 0.149],
                    },
                    "greedy": {
                        "tasks": 104,
                        "before": 0.5,
                        "after": 0.49,
                        "gain": [-0.01, -0.03, 0.02],
                    },
                },
            },
            (
                "[60] held-out reward, sampled: 0.470 -> 0.585, gain 0.115 (95 % interval 0.081 to"
                " 0.149 over 104 tasks)\nheld-out reward, greedy: 0.500 -> 0.490, gain -0.010 (95 %"
                " interval -0.030 to 0.020 over 104 tasks: it may be chance)"
            ),
        ),
        (
            {
                "event": "gain",
                "step": 6,
                "since": 2,
                "rewards": {
                    "greedy": {"tasks": 4, "before": 0.5, "after": 0.75, "gain": [0.25, None, None]}
                },
            },
            (
                "[6] held-out reward, greedy: 0.500 -> 0.750, gain 0.250 (4 tasks, too few for an"
                " interval) since step 2"
            ),
        ),
        (
            {
                "event": "gain",
                "step": 6,
                "since": 0,
                "rewards": {
                    "greedy": {"tasks": 16, "before": 1.0, "after": 1.0, "gain": [0.0, 0.0, 0.0]}
                },
            },
            (
                "[6] held-out reward, greedy: 1.000 -> 1.000, gain 0.000 (the same on each of 16"
                " tasks)"
            ),
        ),
        (
            {"event": "already_done", "step": 2, "advice": "raise steps above 2 to continue"},
            "[2] there is nothing left to train: raise steps above 2 to continue",
        ),
        (
            {"event": "preempted", "step": 2, "ledger": {"trained": 4}},
            "[2] stopped as asked; a checkpoint is there to continue from",
        ),
        (
            {"event": "quarantined", "path": "a.jsonl:3", "reason": "bad"},
            "left out: a.jsonl:3: bad",
        ),
        (
            {"event": "worker_lost", "step": 2, "role": "reward", "why": "first\nsecond"},
            "[2] worker_lost: role reward, why first",
        ),
        (
            {"event": "reward_raised", "step": 2, "why": "KeyError", "traceback": "Traceback\n  x"},
            "[2] reward_raised: why KeyError\nTraceback\n  x",
        ),
    ],
    ids=lambda value: value["event"] if isinstance(value, dict) else "",
)
def test_events_are_reported_in_plain_words(event: dict[str, Any], line: str) -> None:
    assert describe(event) == line


def test_what_is_being_done_is_reported_with_how_far_it_is() -> None:
    driver = SimpleNamespace(
        timings=SimpleNamespace(phase="start"),
        services=SimpleNamespace(up=2, wanted=5),
        runner=SimpleNamespace(running=11, evaluation=None),
        rollouts=SimpleNamespace(
            in_flight={1: "group", 2: "group"}, finished=SimpleNamespace(groups=["group"])
        ),
        config=SimpleNamespace(algorithm=SimpleNamespace(group_size=16)),
    )

    def now() -> str:
        return doing(driver.timings.phase, progress_of(driver))

    assert now() == "starting actors 2/5"
    driver.timings.phase = "gen"
    assert now() == "generating 37/48"
    driver.timings.phase = "testing"
    assert now() == "evaluating"
    driver.runner.evaluation = 3, 200
    assert now() == "evaluating 3/200"
    driver.timings.phase = "update_actor"
    assert now() == "training"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (240, "4 min"), (7200, "2.0 h")]
)
def test_durations_are_round(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_control_characters_are_written_out() -> None:
    assert visible("a\tb\nc\x1b]0;title\x07\x9b31m\r ü") == "a\tb\nc\\x1b]0;title\\x07\\x9b31m\\r ü"


def test_marks_of_direction_and_halves_of_characters_are_written_out_but_no_letters_of_any_script() -> (
    None
):
    assert (
        visible("\u202eevil\u2069 \ud800 \u2028 \ufeff")
        == "\\u202eevil\\u2069 \\ud800 \\u2028 \\ufeff"
    )
    assert (
        visible("שלום مرحبا 漢字\u3000👩\u200d💻 می\u200cخواهم")
        == "שלום مرحبا 漢字\u3000👩\u200d💻 می\u200cخواهم"
    )
