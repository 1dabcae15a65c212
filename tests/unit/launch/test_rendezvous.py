"""The folder in which nodes find each other, and the blocks of ports: what is stale, what is
replaced, what times out.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayloop.core.failures import ConfigError
from rayloop.launch import node, rendezvous, restarts, slurm_job
from rayloop.launch.network import NoFreePorts, block, port_range
from rayloop.launch.rendezvous import Head, NoHead, Rendezvous
from rayloop.launch.restarts import FIRST_PAUSE_S, MAX_PAUSE_S
from rayloop.launch.signals import StopSignals, handling


@pytest.fixture
def listening() -> Iterator[str]:
    """The address of somebody who accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    monkeypatch.setattr(rendezvous, "POLL_INTERVAL_S", 0.01)
    made = Rendezvous(tmp_path / "shared", "mine")
    made.open(insecure=False)
    return made


def published(place: Rendezvous, address: str, job: str | None = None, restart: int = 0) -> Head:
    head = Head(address, "http://127.0.0.1:1", None, "node", job, restart, time.time())
    place.publish(head)
    return head


def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_published_head_is_found(place: Rendezvous, listening: str) -> None:
    head = published(place, listening)
    assert place.wait(1) == head
    assert [file.name for file in place.folder.iterdir() if file.name.startswith(".")] == [], (
        "written aside and renamed"
    )


def test_the_token_is_private_and_only_its_path_is_published(
    place: Rendezvous, listening: str
) -> None:
    token = place.open(insecure=False)
    assert token is not None
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700
    assert place.open(insecure=False) == token, "the same cluster keeps its token"
    place.publish(Head(listening, "http://127.0.0.1:1", str(token), "node", None, 0, time.time()))
    assert token.read_text(encoding="utf-8") not in (place.folder / "head.json").read_text(
        encoding="utf-8"
    )
    assert Rendezvous(place.folder.parent, "open").open(insecure=True) is None


def test_a_head_that_does_not_answer_is_stale(place: Rendezvous) -> None:
    published(place, nobody())
    with pytest.raises(
        NoHead,
        match=(
            r"the cluster mine within 0\.1 s: the entry in .* is stale: 127.* accepts no connection"
        ),
    ):
        place.wait(0.1)


def test_a_head_whose_job_has_ended_is_stale_although_somebody_else_answers(
    place: Rendezvous, listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(place, listening, job="17")
    monkeypatch.setattr(slurm_job, "ended", lambda job: job == "17")
    with pytest.raises(NoHead, match="its job 17 has ended"):
        place.wait(0.1)
    head = published(place, listening, job="18")
    assert place.wait(1) == head


def test_without_a_head_the_deadline_counts(place: Rendezvous) -> None:
    with pytest.raises(NoHead, match="nothing was published"):
        place.wait(0.1)
    assert place.wait(60, stop=lambda: True) is None


def test_a_cluster_has_one_head(place: Rendezvous, listening: str) -> None:
    published(place, listening)
    with pytest.raises(ConfigError, match="has a head already, at 127"):
        place.open(insecure=False)


def test_what_a_former_head_left_is_removed(place: Rendezvous, listening: str) -> None:
    place.withdraw(published(place, listening), left=True)
    published(place, nobody())
    place.open(insecure=False)
    assert place.head() is None
    assert not (place.folder / "left").exists()


def test_a_head_takes_back_its_own_entry_only(place: Rendezvous, listening: str) -> None:
    first = published(place, listening, restart=0)
    second = published(place, listening, restart=1)
    place.withdraw(first, left=True)
    assert place.head() == second
    assert not place.left(first)


def test_the_cluster_s_jobs_are_noted(tmp_path: Path) -> None:
    place = Rendezvous(tmp_path / "shared", "mine")
    for job in ("12", "7", "12"):
        place.register(job)
    assert place.jobs() == ["12", "7"]
    assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700
    place.remove()
    assert not place.folder.exists()
    assert place.jobs() == []
    assert place.head() is None


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden"])
def test_a_cluster_s_name_is_that_of_a_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--cluster"):
        Rendezvous(tmp_path, name)


def test_an_entry_is_plain_json(place: Rendezvous, listening: str) -> None:
    published(place, listening, job="3")
    assert (
        json.loads((place.folder / "head.json").read_text(encoding="utf-8"))["address"] == listening
    )


def test_nodes_on_one_machine_have_disjoint_ports() -> None:
    with (
        block(13_000, 13_199, ["a", "b"]) as small,
        pytest.raises(NoFreePorts),
        block(13_000, 13_199, ["a", "b"]),
    ):
        pass
    assert small["b"] == small["a"] + 1
    assert small.workers == (13_003, 13_199)

    taken = []
    with block(13_000, 15_999, ["a", "b"]) as one, block(13_000, 15_999, ["a", "b"]) as two:
        for ports in (one, two):
            taken += [*ports.services.values(), *range(ports.workers[0], ports.workers[1] + 1)]
    assert len(taken) == len(set(taken)) == 2 * 999


def test_a_block_with_a_taken_service_port_is_passed_over() -> None:
    with socket.socket() as other:
        other.bind(("", 14_002))
        with block(13_000, 14_999, ["a", "b"]) as ports:
            assert ports["a"] == 13_001


@pytest.mark.parametrize("text", ["", "20000", "30000-20000", "80-90", "1-x", "20000-70000"])
def test_a_wrong_range_of_ports_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected LOW-HIGH"):
        port_range(text)


def test_a_range_without_room_for_workers_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="a node needs 3 ports"),
        block(13_000, 13_004, ["a", "b"]),
    ):
        pass


def test_a_worker_whose_ray_fails_tries_again_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = argparse.Namespace(wait=1.0, program=[])
    monkeypatch.setattr(Rendezvous, "wait", lambda *_: "a head")
    ends: list[Any] = [
        node.NodeFailed("too slow"),
        node.NodeFailed("too slow"),
        (node.End.SIGNAL, 0),
    ]

    def join(*_: Any) -> Any:
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    pauses = list[float]()
    monkeypatch.setattr(node, "_join", join)
    monkeypatch.setattr(
        node,
        "backed_off",
        lambda _, before: pauses.append(min(FIRST_PAUSE_S * 2**before, MAX_PAUSE_S)),
    )
    assert node.worker(arguments, Rendezvous(tmp_path, "mine"), StopSignals()) == 0
    pauses.clear()
    ends[:] = [node.NodeFailed("too slow")] * node.MAX_FAILURES
    with pytest.raises(node.NodeFailed, match="too slow"):
        node.worker(arguments, Rendezvous(tmp_path, "mine"), StopSignals())
    assert not ends
    assert sum(pauses) >= 200, "its patience is one of seconds"


def test_a_node_that_requeues_its_job_outlives_the_signal_that_this_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm ends the job's processes when it takes a job back, and the node's own exit code is
    still wanted.
    """
    asked, missed = list[int](), list[int]()

    def requeue() -> None:
        signal.raise_signal(signal.SIGTERM)
        asked.append(1)

    def role(a: argparse.Namespace, place: Rendezvous, signals: StopSignals) -> int:
        signal.raise_signal(signal.SIGUSR1)
        return 75

    monkeypatch.setattr(slurm_job, "job", lambda: "7")
    monkeypatch.setattr(slurm_job, "restarts", lambda: 0)
    monkeypatch.setattr(slurm_job, "can_ask", lambda: True)
    monkeypatch.setattr(slurm_job, "requeue", requeue)
    monkeypatch.setattr(Rendezvous, "register", lambda *_, **__: None)
    monkeypatch.setattr(node, "adopt_orphans", lambda: None)
    asks = argparse.Namespace(
        rendezvous=tmp_path,
        cluster="mine",
        role=role,
        program=["train"],
        requeue=3,
        ports="20000-29999",
    )
    with handling(lambda number, _: missed.append(number), signal.SIGTERM, signal.SIGUSR1):
        assert node.run_node(asks) == 75
    assert (asked, missed) == ([1], [])


@pytest.mark.parametrize(
    ("ends", "before", "sent", "waits", "requeued"),
    [
        (69, 0, None, 15.0, True),
        (69, 3, None, 120.0, True),
        (69, 9, None, 300.0, True),
        (node.NodeFailed("Ray ended"), 0, None, 15.0, True),
        (NoHead("no head within 3600 s"), 0, None, 15.0, True),
        (69, 10, None, 0.0, False),
        (69, 0, signal.SIGTERM, 15.0, False),
        (69, 0, signal.SIGUSR1, 15.0, True),
        (1, 0, None, 0.0, False),
        (2, 0, None, 0.0, False),
        (0, 0, None, 0.0, False),
    ],
    ids=str,
)
def test_a_job_that_the_machines_ended_is_requeued_after_a_while(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: Any,
    before: int,
    sent: int | None,
    waits: float,
    requeued: bool,
) -> None:
    """``sent``: a signal that comes while it waits."""
    now, asked = [0.0], list[int]()

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if sent is not None:
            signal.raise_signal(sent)

    def role(a: argparse.Namespace, place: Rendezvous, signals: StopSignals) -> int:
        if isinstance(ends, Exception):
            raise ends
        return int(ends)

    monkeypatch.setattr(restarts, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(slurm_job, "job", lambda: "7")
    monkeypatch.setattr(slurm_job, "restarts", lambda: before)
    monkeypatch.setattr(slurm_job, "can_ask", lambda: True)
    monkeypatch.setattr(slurm_job, "requeue", lambda: asked.append(1))
    monkeypatch.setattr(Rendezvous, "register", lambda *_, **__: None)
    monkeypatch.setattr(node, "adopt_orphans", lambda: None)
    asks = argparse.Namespace(
        rendezvous=tmp_path,
        cluster="mine",
        role=role,
        program=["train"],
        requeue=10,
        ports="20000-29999",
    )
    assert node.run_node(asks) == (69 if isinstance(ends, Exception) else ends)
    assert len(asked) == requeued
    assert now[0] == pytest.approx(waits if sent is None else 0.5, abs=0.5)
