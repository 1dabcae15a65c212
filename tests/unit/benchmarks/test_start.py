"""``bench start``: what each process used is counted, also after its end, and cut at the events of
the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.measure import measured
from benchmarks.processes import Tree
from benchmarks.start import table, until

CHILD = "import time\nwhile time.process_time() < 0.3: pass\ntime.sleep(0.5)"
PARENT = "\n".join(
    [
        "import subprocess, sys, time",
        f"subprocess.run([sys.executable, '-c', {CHILD!r}])",
        "print('ended', flush=True)",
        "time.sleep(60)",
    ]
)


def test_a_descendant_that_has_ended_is_counted() -> None:
    began = time.time()
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as root:
        tree = Tree(root.pid)
        assert root.stdout is not None
        os.set_blocking(root.stdout.fileno(), False)
        while not root.stdout.read() and time.time() < began + 30:
            tree.look()
            time.sleep(0.02)
        ended = time.time()
        tree.look()
        root.kill()
    parts = tree.parts(began, {"all": ended})
    (child,) = (used["all"] for name, used in parts.items() if name != "command line")
    assert 0.2 < child < 1.0
    assert "command line" in parts


def test_the_cpu_of_a_step_is_that_between_its_ends() -> None:
    program = f"""
import json, subprocess, sys, time
times = [time.time()]
for _ in range(2):
    subprocess.run([sys.executable, "-c", {CHILD!r}])
    times.append(time.time())
print(json.dumps({{"warm_steps": times}}))
while time.process_time() < 1.5: pass
"""
    found = measured([sys.executable, "-c", program])
    assert 0.2 < found["cpu_s_mean"] < 0.8


def test_a_part_ends_with_its_last_event_before_the_step() -> None:
    events = [
        {"event": "start", "time": 5.0},
        {"event": "self_test", "time": 8.0},
        {"event": "self_test", "time": 9.0},
        {"event": "logprob_check", "time": 7.0},
        {"event": "logprob_check", "time": 30.0},
        {"event": "trained", "time": 10.0},
    ]
    assert until(events, 11.0) == {
        "Ray is up": 5.0,
        "synced and compared": 7.0,
        "self-test": 9.0,
        "first step": 11.0,
    }


def test_the_table_sums_rows_and_columns() -> None:
    found = {
        "wall_s": {"Ray is up": 3.0, "first step": 1.5},
        "cpu_s": {
            "GCS": {"Ray is up": 0.5, "first step": 0.0},
            "raylet": {"Ray is up": 0.25, "first step": 2.0},
        },
    }
    rows = {line.split(" | ")[0].strip("| "): line for line in table(found).splitlines()}
    assert rows["wall"] == "| wall | 3.0 | 1.5 | 4.5 |"
    assert rows["CPU of all"] == "| CPU of all | 0.8 | 2.0 | 2.8 |"


def test_a_process_that_is_not_there_counts_as_nothing() -> None:
    tree = Tree(2**22 + 1)
    tree.look()
    assert tree.parts(0.0, {"all": time.time()}) == {}
