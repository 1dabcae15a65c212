"""Keeps tests away from this machine: its user's home, the checkout's ``runs/``, and programs that
no lane installs.

What a test reads there is not on another machine, where it would fail. Processes that tests start
have an empty home, too.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOREIGN: Mapping[str, frozenset[str]] = {
    "slurm": frozenset(
        {"sacct", "salloc", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun"}
    ),
    "k8s": frozenset({"kubectl", "kustomize", "docker"}),
    "gpu": frozenset({"nvidia-smi"}),
}
"""Mark of tests that may use programs of this machine -> the programs."""
marks: set[str] = set()
"""Of the test that runs now."""
running = False
"""A test runs; pytest itself looks at every folder of the checkout while it collects."""
_HOME = os.path.realpath(os.path.expanduser("~"))
_OWN = tuple(
    os.path.realpath(path) + "/"
    for path in (ROOT, sys.prefix, sys.base_prefix, tempfile.gettempdir(), "/usr")
    if path != _HOME
)
_which = shutil.which
_stat = os.stat
_RUNS = os.path.realpath(ROOT / "runs")


class ReadsThisMachine(AssertionError):
    """A test has looked at what only this machine has."""


def hold() -> None:
    """From now on, in this process and those that it starts."""
    home = tempfile.mkdtemp(prefix="home-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ["HOME"] = home
    os.environ.setdefault("MPLCONFIGDIR", str(ROOT / "build" / "matplotlib"))
    for name in [name for name in os.environ if name.startswith(("XDG_", "SLURM_", "HF_HOME"))]:
        del os.environ[name]
    sys.addaudithook(_hook)

    def which(cmd: Any, *arguments: Any, **options: Any) -> Any:
        found = _which(cmd, *arguments, **options)
        return None if found and _foreign(str(found)) else found

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if (
            running
            and isinstance(path, str | bytes | os.PathLike)
            and options.get("dir_fd") is None
        ):
            _no_runs(os.path.abspath(os.fsdecode(path)))
        return _stat(path, *arguments, **options)

    shutil.which = which
    # no audit event: a test that only asks whether a run is there fails here before there is one
    os.stat = stat


def _no_runs(path: str) -> None:
    if path.startswith(_RUNS + "/"):
        raise ReadsThisMachine(f"a test reads {path}: a fresh clone has no runs")


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if (
        event in ("open", "os.listdir", "os.scandir")
        and arguments
        and isinstance(arguments[0], str | bytes | os.PathLike)
    ):
        given = os.fsdecode(arguments[0])
        if event == "open" and arguments[1] is None and not os.path.isabs(given):
            return  # of os.open, which may mean a file of an opened folder
        path = os.path.abspath(given)
        _no_runs(path + "/" if path == _RUNS else path)
        if path.startswith(_HOME + "/") and not (path + "/").startswith(_OWN):
            raise ReadsThisMachine(f"a test reads {path}, below the home of this machine's user")
    elif event == "subprocess.Popen" and _foreign(str(arguments[0] or "")):
        raise ReadsThisMachine(f"a test runs {arguments[0]}, which its lane does not install")


def _foreign(program: str) -> bool:
    """Of this machine, and not one that the test has made."""
    mark = next(
        (mark for mark, programs in FOREIGN.items() if os.path.basename(program) in programs), None
    )
    if mark is None or mark in marks or (found := _which(program)) is None:
        return False
    return not os.path.realpath(found).startswith(os.path.realpath(tempfile.gettempdir()) + "/")
