"""How Chromium is confined: bubblewrap's namespaces around Chromium's sandbox.

Each is used where this machine allows it. Chromium has no network (Playwright uses inherited
pipes), no file but /usr, and no other process, and its profile is in memory.
"""

import functools
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from rayloop.config.settings import LocalPath, SettingsModel
from rayloop.core.failures import EnvironmentFailed
from rayloop.sandbox import bubblewrap
from rayloop.sandbox.bubblewrap import NoUser, User, borrowed, free_user

Containment = Literal["namespaces", "chromium", "none"]


class BrowserSettings(SettingsModel):
    """The Chromium of an environment actor: how it is confined, and when it is replaced."""

    program: str = "chromium-headless-shell"
    """The browser to start, a path or a name of PATH.

    Debian's headless shell needs less memory than a full Chromium.
    """
    containment: Containment = "namespaces"
    """What must confine the browser: namespaces, chromium or none.

    They stand for bubblewrap's namespaces, Chromium's sandbox, and nothing (for trusted pages
    only).
    """
    pages: int = Field(16, ge=1)
    """Episodes in one browser at once.

    Lower it when a browser's end costs too many episodes; raise it to save memory.
    """
    recycle_episodes: int = Field(500, ge=1)
    """Episodes after which a browser takes no more, and ends with its last.

    Lower it when browsers grow over time.
    """
    browser_memory: int = Field(4096, ge=256)
    """MiB of all processes of a browser; beyond it the browser takes no more episodes.

    Raise it with ``pages``.
    """
    page_memory: int = Field(768, ge=64)
    """MiB that one page may fill; beyond it the page is ended, and the policy is to blame.

    Raise it for maps and spreadsheets.
    """
    launch_timeout: float = Field(30.0, gt=0)
    """Seconds in which the browser must have started, with an empty page in it.

    Raise it on busy machines.
    """
    load_timeout: float = Field(20.0, gt=0)
    """Seconds to load the episode's page; beyond it the environment failed.

    Keep it below ``episode.step_timeout``.
    """
    action_timeout: float = Field(10.0, gt=0)
    """Seconds for a turn's actions and screenshot, else ``tool_deadline``.

    Keep it below half of ``episode.step_timeout``.
    """
    record: LocalPath | None = None
    """A folder into which the answers of ``sites`` are written, each at its first visit.

    Pages see the clock and random numbers of the recording. Why a key: a live site differs the next
    day, and with it what a policy scores.
    """
    replay: LocalPath | None = None
    """A folder that ``record`` has made, from which ``sites`` answer, without any network.

    A task's page that it lacks is the environment's failure; a policy that leaves the recording
    reads which page is missing. Why a key: only then do two numbers from one site compare.
    """

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.record and self.replay:
            raise ValueError("record and replay: a folder is either written or read; name one")
        return self


FOLDERS = {"/tmp": 512 << 20, "/dev/shm": 64 << 20, "/run": 1 << 20}
"""Folders that it may write to, in memory, and bytes at most.

Playwright puts the profile and shared memory into /tmp.
"""
STACK_MIB = 256
"""MiB for stacks of each process.

RLIMIT_DATA is this plus twice ``page_memory``, a bound for pages that grow between two looks.
"""
CONFIGURATION = ("/etc/chromium", "/etc/chromium.d")
LEVELS: tuple[Containment, ...] = ("none", "chromium", "namespaces")
"""The levels, weakest first."""


@dataclass(frozen=True)
class Confinement:
    """The level of a browser.

    ``own``: Chromium's sandbox works too; ``lacks``: why the level is not higher, or empty.
    """

    level: Containment
    own: bool
    lacks: str

    def __str__(self) -> str:
        names = {
            "namespaces": "namespaces without network",
            "chromium": "Chromium's own sandbox",
            "none": "nothing",
        }
        text = names[self.level]
        if self.own and self.level == "namespaces":
            text += " around Chromium's own sandbox"
        return f"{text} ({self.lacks})" if self.lacks else text


@functools.cache
def available() -> Confinement:
    """Return what this machine allows, tried once per process (some 50 ms)."""
    bubblewrap_refusal = bubblewrap.refused_here()
    chromium_refusal = _own_sandbox_refused(inside=not bubblewrap_refusal)
    level: Containment = "namespaces"
    if bubblewrap_refusal:
        level = "none" if chromium_refusal else "chromium"
    lacks = []
    if bubblewrap_refusal:
        lacks.append(f"bubblewrap: {bubblewrap_refusal}")
    if chromium_refusal:
        lacks.append(f"Chromium's own sandbox: {chromium_refusal}")
    return Confinement(level, not chromium_refusal, "; ".join(lacks))


def check(settings: BrowserSettings) -> Confinement:
    """Return how the browser will be confined.

    Raises EnvironmentFailed for less than ``containment``, or without a browser.
    """
    if shutil.which(settings.program) is None:
        remedy = (
            "apt-get install --no-install-recommends chromium-headless-shell fonts-dejavu-core, or"
            " set browser.program"
        )
        raise EnvironmentFailed(f"{settings.program} is not a program here: {remedy}", bug=True)
    confinement = available()
    if LEVELS.index(confinement.level) < LEVELS.index(settings.containment):
        remedy = (
            "see `python -m rayloop doctor`, or lower browser.containment for pages that you trust"
        )
        raise EnvironmentFailed(
            f"browser.containment is {settings.containment}, and here is {confinement}: {remedy}",
            bug=True,
        )
    return confinement


class Program:
    """An executable in memory that starts the confined browser; it ends with this process."""

    def __init__(self, settings: BrowserSettings, confinement: Confinement) -> None:
        """Raises EnvironmentFailed when root finds no user number to give to the browser."""
        self._user: User | None = None
        program = shutil.which(settings.program) or settings.program
        command = [program]
        if confinement.level == "namespaces":
            command = self._contained(program)
        self._file = os.memfd_create("rayloop-browser")
        limit = f"ulimit -d {(STACK_MIB + 2 * settings.page_memory) * 1024}"
        os.write(self._file, f'#!/bin/sh\n{limit}\nexec {shlex.join(command)} "$@"\n'.encode())
        os.fchmod(self._file, 0o700)
        # Playwright's driver starts the file, and has other descriptors than this process.
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Remove the executable, and give the user number back.

        That happens after the browser's processes have ended.
        """
        os.close(self._file)
        if self._user is not None:
            self._user.close_when_unused()

    def _contained(self, program: str) -> list[str]:
        try:
            self._user = free_user() if os.geteuid() == 0 else None
        except NoUser as error:
            raise EnvironmentFailed(f"the browser must not run as root: {error}") from error
        return bubblewrap.command(
            [program],
            uid=self._user.number if self._user else None,
            read=[*filter(os.path.exists, CONFIGURATION), *_outside(program)],
            folders=FOLDERS,
            environment={"XDG_RUNTIME_DIR": "/tmp"},
        )


def _outside(program: str) -> Sequence[str]:
    """Return the folder of a browser that is not below /usr."""
    folder = os.path.dirname(os.path.realpath(program))
    return () if folder.startswith("/usr/") else (folder,)


def _own_sandbox_refused(inside: bool) -> str:
    """Return why Chromium's sandbox fails here; empty when it works.

    ``inside``: within bubblewrap's namespaces.
    """
    if os.geteuid() == 0 and not inside:
        return "not as root"
    command = [
        "/usr/bin/unshare",
        "--user",
        "--map-current-user",
        "--pid",
        "--net",
        "--fork",
        "/usr/bin/true",
    ]
    try:
        with borrowed() as uid:
            if inside:
                command = bubblewrap.command(command, uid=uid)
            return bubblewrap.trial(command)
    except OSError as error:
        return str(error)
