"""A live run seen from outside.

All functions but ``stop_driver`` ask Ray, not the driver, and so answer when the driver hangs.
"""

import asyncio
import logging
import shutil
import socket
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from rayloop.actors.base import Actor
from rayloop.actors.handles import Handle, submit
from rayloop.cluster.driver_actor import DriverActor
from rayloop.cluster.session import actor_table, logs_folder, node_rows
from rayloop.core.failures import ConfigError, InfrastructureFailure, MachineFailed
from rayloop.core.threads import complete
from rayloop.run.place import Place

ANSWER_TIMEOUT_S = 10.0
"""Seconds that an actor, or a node, has to answer."""


class NoAnswer(InfrastructureFailure):
    """The driver of a run did not answer in time."""


@dataclass(frozen=True)
class LiveActor:
    """A live actor. ``name`` is its role, slot and a suffix; ``node`` is the host name."""

    name: str
    number: str
    pid: int
    node: str

    @property
    def role(self) -> str:
        """The role that the actor's name begins with."""
        return self.name.partition("-")[0]

    @property
    def here(self) -> bool:
        """Whether the actor is on this machine."""
        return self.node == socket.gethostname()

    def __str__(self) -> str:
        return f"{self.name}, process {self.pid} on {self.node}"


@contextmanager
def joined(place: Place) -> Iterator[list[LiveActor]]:
    """Join the run's cluster for the block.

    Yields its actors; raises ConfigError when it has none, and MachineFailed when no node of it
    lives on this machine.
    """
    try:
        ray.init(
            address=place.address,
            log_to_driver=False,
            namespace=place.namespace,
            logging_level=logging.WARNING,
        )
    except ConnectionError as error:
        raise MachineFailed(
            f"the head at {place.address} answers, but no node of its cluster lives on this"
            " machine: run this command on one of its nodes. If this is one, Ray has died here"
            " (its raylet: was it killed for memory?), and the run ends by itself"
        ) from error
    try:
        yield _actors(place)
    finally:
        ray.shutdown()


def _actors(place: Place) -> list[LiveActor]:
    # Rows of Ray's table of actors have no namespace, so the names of this run are listed first.
    names_of_run = {
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == place.namespace
    }
    alive = [
        entry
        for entry in actor_table()
        if entry["State"] == "ALIVE" and entry["Name"] in names_of_run
    ]
    if not alive:
        raise ConfigError(
            f"the run has no actors at {place.address}: it has just begun, or just ended"
        )
    hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in node_rows()}
    actors = []
    for entry in alive:
        host = hosts.get(entry["Address"]["NodeID"], "an unknown node")
        actors.append(LiveActor(entry["Name"], entry["ActorID"], entry["Pid"], host))
    return sorted(actors, key=lambda actor: actor.name)


def of_role(actors: list[LiveActor], role: str | None) -> list[LiveActor]:
    """The actors of a role, or all. Raises ConfigError with the present roles."""
    matches = [actor for actor in actors if role in (None, actor.role)]
    if not matches:
        roles = ", ".join(sorted({actor.role for actor in actors}))
        raise ConfigError(f"no live actor of role {role}; there are: {roles}")
    return matches


def stacks(place: Place, role: str | None) -> Iterator[tuple[str, str]]:
    """Each actor, and the stacks of its threads.

    They come from py-spy on this machine, else from the actor's own debug thread.
    """
    with joined(place) as all_actors:
        actors = of_role(all_actors, role)
        answers = complete(_answers(place, actors))
        for actor, answer in zip(actors, answers, strict=True):
            py_spy_stacks = _spied(actor.pid) if actor.here else None
            yield str(actor), py_spy_stacks or answer


async def _answers(place: Place, actors: list[LiveActor]) -> list[str]:
    async def answer_of(actor: LiveActor) -> str:
        try:
            handle: Handle[Actor] = ray.get_actor(actor.name, place.namespace)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await submit(handle, Actor.stacks)
        except (RayError, TimeoutError, ValueError) as error:
            reason = (
                f"does not answer within {ANSWER_TIMEOUT_S:g} s: {type(error).__name__} {error}"
            )
            return reason.splitlines()[0]

    # All at once, so that many actors that hang cost one deadline.
    return await asyncio.gather(*map(answer_of, actors))


def _spied(pid: int) -> str | None:
    """The stacks of a process on this machine from py-spy; None without py-spy.

    py-spy can read them even if the process holds the interpreter's lock.
    """
    program = shutil.which("py-spy")
    if program is None:
        return None
    try:
        # Without ``--nonblocking`` py-spy stops the process while it reads its stacks.
        process = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=ANSWER_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None


def logs(place: Place, role: str | None, lines: int) -> Iterator[tuple[str, str]]:
    """Each actor, and the last lines of its stdout and stderr."""
    with joined(place) as actors:
        for actor in of_role(actors, role):
            read_logs = _printed_here if actor.here else _printed_remotely
            yield str(actor), read_logs(actor, lines)


def _printed_here(actor: LiveActor, lines: int) -> str:
    last_lines: list[str] = []
    for end in ("out", "err"):
        for file in sorted(logs_folder().glob(f"worker-*-{actor.pid}.{end}")):
            with file.open(errors="replace", encoding="utf-8") as text:
                last_lines += deque(text, maxlen=lines)
    return "".join(last_lines)


def _printed_remotely(actor: LiveActor, lines: int) -> str:
    """The logs from the dashboard, which a private cluster does not have."""
    from ray.util.state import get_log

    parts: list[str] = []
    try:
        for end in ("out", "err"):
            parts += get_log(
                actor_id=actor.number, tail=lines, suffix=end, timeout=int(ANSWER_TIMEOUT_S)
            )
        return "".join(parts)
    except Exception as error:
        # The other actors' logs are still shown.
        reason = str(error).partition("\n")[0]
        return (
            f"cannot be read from here ({reason}). On {actor.node}:"
            f" session_latest/logs/worker-*-{actor.pid}.out\n"
        )


def stop_driver(place: Place) -> None:
    """Have the run save and end, as a SIGTERM to its process does.

    Raises NoAnswer, and ConfigError when there is no driver yet. A driver that ends before it
    answers is not an error: a small run ends within milliseconds.
    """
    with joined(place) as actors:
        # Ray may still list a driver that died after its successor has started. Names do not
        # show which is which, so all are asked, and one that answers is enough.
        drivers = of_role(actors, "driver")
        silent: Exception | None = None
        for actor in drivers:
            try:
                driver: Any = ray.get_actor(actor.name, place.namespace)
                ray.get(submit(driver, DriverActor.stop), timeout=ANSWER_TIMEOUT_S)
                return
            except (ActorDiedError, ValueError):
                # It has ended since it was listed.
                continue
            except (RayError, TimeoutError) as error:
                silent = error
        if silent is not None:
            name = type(silent).__name__
            raise NoAnswer(f"the driver of the run does not answer: {name}") from silent
