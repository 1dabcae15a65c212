"""Slurm's warning of the time limit reaches head, worker and training in every order: the run is
saved while all it needs is there, and each job is requeued. Ray is made up: of a node's Ray there
are open ports and a file.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayloop.launch import node, ray_process, rendezvous, slurm_job
from rayloop.launch.network import Ports
from rayloop.launch.rendezvous import Rendezvous
from rayloop.launch.signals import StopSignals

SAVES = """
import pathlib, signal, sys, time
there = pathlib.Path(sys.argv[1])
def save(*_):
    time.sleep(0.5)
    sys.exit(75 if sorted(file.name for file in there.iterdir()) == ["head", "train", "worker"] else 1)
signal.signal(signal.SIGTERM, save)
(there.parent / "began").touch()
time.sleep(60)
"""
GAP = 0.2
"""Seconds between two warnings."""


def listening(address: str, port: int) -> socket.socket:
    """A child that another thread starts holds what was open then until it runs its program: also a
    port that was only tried.
    """
    for left in reversed(range(200)):
        try:
            return socket.create_server((address, port))
        except OSError:
            if not left:
                raise
        time.sleep(0.02)
    raise AssertionError


class Site:
    """Three jobs as threads, each with its own record of signals."""

    def __init__(self, folder: Path, order: Sequence[str], ports: int) -> None:
        self.folder, self.order, self.ports = folder, order, ports
        self.there = folder / "there"
        self.there.mkdir(parents=True)
        self.place = Rendezvous(folder / "shared", "mine")
        self.signals = {name: StopSignals() for name in ("head", "worker", "train")}
        self.codes: dict[str, int] = {}
        self.asked: dict[str, argparse.Namespace] = {}

        self.threads: list[threading.Thread] = []

    def start(self, name: str, role: Any, *program: str) -> None:
        ports = self.ports + 30 * len(self.asked)
        asked = argparse.Namespace(
            cluster="mine",
            insecure=True,
            ports=f"{ports}-{ports + 29}",
            interface=None,
            temp_dir=Path("/tmp"),
            num_cpus=0,
            num_gpus=0,
            resource=[],
            object_store_memory=None,
            grace=4.0,
            wait=30.0,
            requeue=3,
            program=list(program),
        )

        def be() -> None:
            self.codes[name] = role(asked, self.place, self.signals[name])

        self.asked[name] = asked
        thread = threading.Thread(target=be, name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def begin(self) -> None:
        self.start("head", node.head)
        self.start("worker", node.worker)
        self.start("train", node.worker, sys.executable, "-S", "-c", SAVES, str(self.there))

    def begun(self) -> bool:
        return (self.folder / "began").exists() and len(list(self.there.iterdir())) == 3

    @contextmanager
    def ray(self, address: str, ports: Ports) -> Iterator[Any]:
        name = threading.current_thread().name
        with ExitStack() as open_:
            for port in ports.services.values():
                open_.enter_context(listening(address, port))
            (self.there / name).touch()
            open_.callback((self.there / name).unlink)
            yield SimpleNamespace(poll=lambda: None, kill=lambda: None)


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Site]:
    """One for each order, all at once: they wait more than they compute."""
    orders = list(permutations(("head", "worker", "train")))
    first = (
        11_000 + os.getpid() % 30 * 600
    )  # below what the kernel gives away; another clone's tests have others
    made = [
        Site(tmp_path / "-".join(order), order, first + 100 * at) for at, order in enumerate(orders)
    ]

    def ray_node(
        options: object, address: str, ports: Ports, folder: object, settings: object
    ) -> Any:
        (mine,) = (site for site in made if threading.current_thread() in site.threads)
        return mine.ray(address, ports)

    for module in (node, ray_process, rendezvous):
        monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(node, "ray_node", ray_node)
    monkeypatch.setattr(slurm_job, "node_address", lambda _: "127.0.0.1")
    monkeypatch.setattr(slurm_job, "job", lambda: "7")
    monkeypatch.setattr(slurm_job, "ended", lambda _: False)
    monkeypatch.setattr(slurm_job, "restarts", lambda: 0)
    return made


def test_a_run_is_saved_whoever_is_warned_first(sites: list[Site]) -> None:
    for site in sites:
        site.begin()
    until = time.monotonic() + 60
    while not all(site.begun() for site in sites):
        assert time.monotonic() < until, "a cluster did not begin"
        time.sleep(0.05)
    for at in range(3):
        for site in sites:
            site.signals[site.order[at]](signal.SIGUSR1, None)
        time.sleep(GAP)
    for site in sites:
        for thread in site.threads:
            thread.join(30)
        assert site.codes == {"head": 0, "worker": 0, "train": 75}, site.order
        assert all(
            node._again(site.asked[name], site.signals[name], code, 0)
            for name, code in site.codes.items()
        )
        assert list(site.there.iterdir()) == []
