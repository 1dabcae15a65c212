"""FAKE podman, for tests on machines without one: ``run`` and ``rm`` of the real one's command
line, in bubblewrap.

It knows one image, "known". Its containers have the host's /usr, so it shows nothing about images,
capabilities or cgroups.
"""

from __future__ import annotations

import argparse
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from rayloop.sandbox import bubblewrap

STATE = "FAKE_PODMAN"
"""The variable with the folder that has a file for each container, with the process id of its
bubblewrap.
"""


def install(folder: Path, state: Path) -> dict[str, str]:
    """A program ``podman`` in ``folder``. Returns the variables with which it is found."""
    root = Path(__file__).parents[2]
    program = folder / "podman"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -m tests.support.podman "$@"\n',
        encoding="utf-8",
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", STATE: str(state)}


def main(arguments: list[str]) -> int:
    state = Path(os.environ[STATE])
    if arguments[0] == "rm":
        container = state / arguments[-1]
        if container.exists():
            os.kill(int(container.read_text(encoding="utf-8")), signal.SIGKILL)
            container.unlink()
        return 0
    parser = argparse.ArgumentParser()
    for name in (
        "--name",
        "--pull",
        "--network",
        "--cap-drop",
        "--security-opt",
        "--memory",
        "--memory-swap",
        "--pids-limit",
    ):
        parser.add_argument(name, required=True)
    for name in ("--tmpfs", "--workdir", "--env", "--entrypoint"):
        parser.add_argument(name, required=True)
    for name in ("--rm", "--interactive", "--read-only"):
        parser.add_argument(name, action="store_true", required=True)
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments[1:])
    assert (given.network, given.cap_drop, given.pull) == ("none", "ALL", "never")
    if given.image != "known":
        print(f"Error: {given.image}: image not known", file=sys.stderr)
        return 125
    path, _, options = given.tmpfs.partition(":")
    size = (
        int(
            next(part for part in options.split(",") if part.startswith("size="))
            .removeprefix("size=")
            .rstrip("m")
        )
        << 20
    )
    memory = int(given.memory.rstrip("m")) << 20
    with bubblewrap.borrowed() as uid:
        limits = ["/usr/bin/prlimit", f"--data={memory}", f"--nproc={given.pids_limit}"]
        line = bubblewrap.command(
            [*limits, f"/bin/{given.entrypoint}", *given.command],
            folders={path: size},
            uid=uid,
            options=["--chdir", given.workdir],
        )
        with subprocess.Popen(line) as process:
            (state / given.name).write_text(str(process.pid), encoding="utf-8")
            code = process.wait()
        (state / given.name).unlink(missing_ok=True)
        return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
