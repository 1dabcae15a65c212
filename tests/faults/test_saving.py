"""A rank, or the driver, dies in the middle of a checkpoint that is written beside training: it is
never complete.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayloop.run.checkpoint import complete
from tests.support.marks import kill
from tests.support.runs import Run, eventually, ledger_closes, pause, resume, run, settings

pytestmark = [pytest.mark.slow_faults, pytest.mark.timeout(400)]


def kill_while_it_writes(made: Run, victim: psutil.Process) -> tuple[float, Path]:
    """SIGKILL a process that was stopped while a checkpoint was being written.

    Returns when, and the name it would have had.
    """
    folder = made.folder / "checkpoints"

    def aside() -> Path | None:
        return next(
            (path for path in folder.glob("step_*.tmp") if list(path.glob("trainer/*"))), None
        )

    for _ in range(50):
        eventually(aside, "a checkpoint is being written", 120, 0.0005)
        pause(victim)
        time.sleep(0.3)  # the others go on as far as they can
        if (found := aside()) is not None:
            return kill(victim), folder / found.name.partition(".")[0]
        resume(victim)
    raise AssertionError("no checkpoint was caught")


@pytest.mark.parametrize("who", ["PolicyRank", "DriverActor"])
def test_the_older_checkpoint_is_resumed(tmp_path: Path, digits_model: Path, who: str) -> None:
    config = settings(
        tmp_path,
        digits_model,
        steps=8,
        policy__ranks=2,
        checkpoint={"every": 2, "asynchronous": True, "keep": 9},
        rollout__sampling={"max_tokens": 100, "min_tokens": 100},
    )
    with run(config) as made:
        made.until_event("checkpoint", step=2)
        victims = made.actors(who)
        killed, halfway = kill_while_it_writes(made, victims[-1])
        assert complete(halfway) is None
        begin: dict[str, Any] = made.until(
            lambda: [e for e in made.named("begin") if e["time"] > killed], "a new lineage"
        )[0]
        assert begin["step"] < int(halfway.name.removeprefix("step_"))
        assert begin["restored"] == f"step_{begin['step']:06d}"
        made.ends(0)
    assert [record["step"] for record in made.metrics] == list(range(1, 9))
    assert made.named("checkpoint")[-1]["step"] == 8, "the last one is waited for"
    ledger_closes(made.named("finished")[0]["ledger"])
