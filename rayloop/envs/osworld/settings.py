"""Settings of OSWorld's machines."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rayloop.envs.grammar.screens import Pointing
from rayloop.envs.grammar.screens import ScreenSettings


class OSWorldSettings(ScreenSettings):
    """Which machines there are, how OSWorld is started, and how long things may take."""

    python: str
    """The Python of the environment that has ``desktop-env`` installed: OSWorld pins numpy, torch and sixty packages otherwise
    than rayloop, so it cannot share one."""
    tasks: str = ""
    """OSWorld's folder ``evaluation_examples/examples``, where a row names a task as domain/id; empty when rows hold tasks."""
    provider: str = "docker"
    """What runs the machines: docker, vmware, virtualbox, aws or another provider of OSWorld."""
    machines: int = Field(1, ge=1)
    """Machines of this node at once. Raise it with the node's memory: a docker machine takes 4 GB and 4 cores."""
    each: tuple[dict[str, Any], ...] = ()
    """Arguments of DesktopEnv for each machine, such as ``path_to_vm``, where they differ; as many as there are machines."""
    options: dict[str, Any] = {}
    """Further arguments of DesktopEnv for all machines, such as ``region``, ``headless`` or ``os_type``."""
    cache: str = "/tmp/rayloop-osworld"
    """A folder of this node for OSWorld's downloads and logs; each machine gets a folder of its own in it."""
    width: int = Field(1920, ge=640)
    """Pixels of the machines' screen from left to right; OSWorld's tasks were made for 1920."""
    height: int = Field(1080, ge=480)
    """Pixels of the machines' screen from top to bottom; OSWorld's tasks were made for 1080."""
    pointing: Pointing = Pointing(min_pixels=3136, max_pixels=2_116_800)
    """Unit of the model's coordinates, and how its processor resizes a screenshot; the default is that of ARPO."""
    pause: float = Field(0.5, ge=0)
    """Seconds that OSWorld waits after each action before the screenshot: 0.5 in ARPO, 2 in OSWorld's own runs."""
    attempts: int = Field(4, ge=1)
    """Resets of an episode before it counts as failed, each on another machine where one is free."""
    back_off: float = Field(5.0, ge=0)
    """Seconds before the second attempt, doubled for each further one. A machine that failed rests as long."""
    boot_timeout: float = Field(600.0, gt=0)
    """Seconds in which a machine must boot. Raise it without /dev/kvm, where machines are very slow."""
    reset_timeout: float = Field(300.0, gt=0)
    """Seconds for one reset of a machine. All attempts and boots together must fit into ``episode.reset_timeout``."""
    step_timeout: float = Field(90.0, gt=0)
    """Seconds for one action, its screenshot included. Keep the turn's sum below ``episode.step_timeout``."""
    evaluate_timeout: float = Field(300.0, gt=0)
    """Seconds for OSWorld's check of the result. Keep it below ``episode.step_timeout``."""
