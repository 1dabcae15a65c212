"""The console: plain lines without a terminal, a table of the last steps with one."""

from __future__ import annotations

import io

from rich.console import Console

from cluster.progress import ROWS, Progress

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
}


def test_plain_lines_show_what_there_is() -> None:
    out = io.StringIO()
    with Progress(20, Console(file=out, force_terminal=False, soft_wrap=True)) as progress:
        progress.note("run folder [bold]runs/a")
        progress.step(METRICS)
        progress.close({"steps": 3, "ledger": {"trained": 12, "stale": 0}})
    assert out.getvalue().splitlines() == [
        "run folder [bold]runs/a",
        "step 3/20  reward 0.250  trained 12/16  filtered 25%  loss 0.1250  grad nan  gen_s 1.3",
        "done: steps 3",
        "  ledger: trained 12",
    ]


def test_a_terminal_gets_a_table_of_the_last_steps() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with Progress(20, console) as progress:
        for step in range(1, ROWS + 4):
            progress.step({**METRICS, "step": float(step)})
            progress.note(f"note {step}")
    final = out.getvalue().rpartition("entropy")[2]
    assert f"{ROWS + 3}/20" in final
    assert "4/20" in final
    assert " 3/20" not in final.replace("13/20", "")
    assert all(f"note {step}" in out.getvalue() for step in range(1, ROWS + 4))
