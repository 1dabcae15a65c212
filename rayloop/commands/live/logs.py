"""``logs``: the output of the actors of a run; of a run that has ended, the files that its folder keeps."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rayloop.commands.arguments import live_cluster
from rayloop.core.failures import ConfigError
from rayloop.run.folder import RunFolder
from rayloop.view.words import visible


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``logs``."""
    parser.add_argument("run_folder", type=Path, metavar="RUN_DIR", help="folder of the run, <output>/<name>")
    parser.add_argument("--role", help="only these actors: driver, rollout, environment, reward, reference or policy")
    parser.add_argument("--lines", type=int, default=40, metavar="N", help="last lines of each file (40)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the last lines of each actor. Returns 0; raises ConfigError."""
    if arguments.lines < 1:
        raise ConfigError(f"--lines {arguments.lines}: expected 1 or more")
    folder = RunFolder.at(arguments.run_folder.resolve())
    if not folder.cluster.exists():
        for name, text in _kept(folder, arguments.role, arguments.lines):
            print(f"=== {name} ===\n{visible(text)}", flush=True)
        return 0
    with live_cluster(folder) as place:
        from rayloop.cluster.stages.live import logs  # imports ray

        for actor, text in logs(place, arguments.role, arguments.lines):
            print(f"=== {actor} ===\n{visible(text)}", flush=True)
    return 0


def _kept(folder: RunFolder, role: str | None, lines: int) -> Iterator[tuple[str, str]]:
    """Files of a run that has ended. Raises ConfigError when there are none, or for a role, which their names do not have."""
    files = sorted(path for path in folder.logs.glob("**/*") if path.is_file())
    if role is not None or not files:
        why = "the names of its files have no roles: leave out --role" if files else "its folder keeps no logs"
        raise ConfigError(f"{folder.path} is no live run, and {why}")
    for path in files:
        text = path.read_text(errors="replace", encoding="utf-8").splitlines(keepends=True)[-lines:]
        yield str(path.relative_to(folder.path)), "".join(text)
