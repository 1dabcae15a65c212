"""Settings of local desktops."""

from __future__ import annotations

from pydantic import Field

from rayloop.config.settings import SettingsModel


class DesktopLimits(SettingsModel):
    """How large a desktop is, and how much of the machine it may take."""

    width: int = Field(1280, ge=320, le=4096)
    """Pixels of the screen from left to right. Lower it to spend fewer image tokens on each screenshot."""
    height: int = Field(800, ge=240, le=4096)
    """Pixels of the screen from top to bottom. Lower it to spend fewer image tokens on each screenshot."""
    processes: int = Field(128, ge=32)
    """Processes and threads of one desktop, its own dozen included. Raise it for tasks whose programs start many."""
    memory_mb: int = Field(2048, ge=512)
    """Address space of each process in MiB. Raise it for large programs, with ``total_mb``."""
    total_mb: int = Field(1024, ge=128)
    """MiB that all programs of a desktop fill together; beyond it they are ended, and the episode with them, as the policy's own
    failure. Raise it for large programs such as office suites."""
    home_mb: int = Field(64, ge=1)
    """Megabytes of files in the home folder, which lives in memory. Raise it for tasks with large start files."""
    start_timeout: float = Field(20.0, gt=0)
    """Seconds in which the desktop, and then each program, must show itself. Raise it on busy machines."""
    call_timeout: float = Field(15.0, gt=0)
    """Seconds for one action or screenshot; beyond it the desktop counts as lost. Raise it on busy machines."""
