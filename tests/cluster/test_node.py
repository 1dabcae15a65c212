"""Nodes as processes, without Slurm: they find each other, leave with the head, join the next one,
and leave nothing behind.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.nodes import Nodes, here
from tests.support.runs import tagged

PROGRAM = """
import ray, sys
ray.init(log_to_driver=False)
where = ray.remote(num_cpus=1)(lambda: ray.get_runtime_context().get_node_id())
assert ray.get(where.remote(), timeout=60) is not None
sys.exit(3)
"""
SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def cluster() -> Iterator[Nodes]:
    with here() as made:
        yield made


def ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


@pytest.mark.slow_faults
@pytest.mark.timeout(240)
def test_nodes_join_leave_and_join_the_next_head(cluster: Nodes) -> None:
    first = cluster.start("head")
    stays = cluster.start("worker", "--num-cpus=1")
    program = cluster.start("worker", "--num-cpus=0", "--", sys.executable, "-c", PROGRAM)
    head = cluster.head()
    cluster.until(lambda: ended(program), "the program's end")
    assert program.returncode == 3, "the exit code of the program is the node's"
    cluster.until(lambda: cluster.alive(head) == 2, "the program's node leaves")

    first.kill()  # without a farewell: what it published stays, and is stale
    cluster.until(lambda: head.stale() is not None, "the end of the head's Ray", 30)
    assert not ended(stays)

    second = cluster.start("head", "--insecure")
    following = cluster.head(head)
    assert following.token is None
    cluster.until(lambda: cluster.alive(following) == 2, "the worker joins the next head")

    second.send_signal(signal.SIGTERM)
    stays.send_signal(signal.SIGTERM)
    assert second.wait(30) == stays.wait(30) == 0
    assert cluster.place.head() is None
    cluster.until(lambda: not tagged(cluster.tag), "every process ends", 10)
    assert len(list(cluster.folder.glob("here.logs/*/raylet.out"))) >= 2, (
        "Ray's logs outlive the nodes"
    )
    assert [
        path.name for path in cluster.temporary.glob("rayloop-*") if (path / "lock").exists()
    ] == []


@pytest.mark.slow_faults
@pytest.mark.timeout(240)
def test_a_program_is_asked_to_save_while_the_head_and_a_worker_stay(cluster: Nodes) -> None:
    leads = cluster.start("head")
    worker = cluster.start("worker", "--num-cpus=1", "--requeue=1")
    program = cluster.start("worker", "--num-cpus=0", "--", sys.executable, "-c", SAVES)
    head = cluster.head()
    cluster.until(lambda: cluster.alive(head) == 3, "the workers join")
    cluster.until(
        lambda: "ready" in (cluster.folder / "worker-2.log").read_text(encoding="utf-8"),
        "the program begins",
    )
    for node in (worker, leads, program):
        node.send_signal(
            signal.SIGUSR1
        )  # the time limit is near: they are needed while the program saves
    assert program.wait(30) == 75
    assert not ended(worker)
    assert not ended(leads)
    leads.terminate()
    worker.terminate()
    assert leads.wait(30) == worker.wait(30) == 0
    cluster.until(lambda: not tagged(cluster.tag), "every process ends", 10)
