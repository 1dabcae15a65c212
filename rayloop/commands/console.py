"""``console``, ``watch`` and ``compare``: runs in a browser, in a terminal, and in one table.

They need only the runs' folders.
"""

import argparse
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from rayloop.commands.arguments import add_run_folder, reachable
from rayloop.config.settings import load
from rayloop.core.failures import ConfigError
from rayloop.core.files import write_whole
from rayloop.core.threads import complete
from rayloop.launch.ray_variables import joined_cluster
from rayloop.run.folder import RunFolder
from rayloop.run.place import own_copy
from rayloop.serve_apps.settings import LOOPBACK, HttpOptions
from rayloop.view.charts import HELD_OUT
from rayloop.view.formatting import number, sampled, visible
from rayloop.view.pictures import overlaid
from rayloop.view.progress import ESTIMATE_STEPS, Progress
from rayloop.view.reader import Tail, by_step, gains, series
from rayloop.view.status import state, status
from rayloop.web import with_token

POLL_INTERVAL_S = 1.0
FIGURES = (
    "reward/mean",
    "actor/entropy",
    "actor/kl",
    "rollout/trained_share",
    "timing_s/step",
    "perf/tokens_per_second",
)
"""Metrics of ``compare``, each as its mean over the last ``ESTIMATE_STEPS`` steps."""


def add_console(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``console``."""
    add_run_folder(parser, "folder of the run, <output>/<name>; it may be live")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="interface to listen on (127.0.0.1); it speaks plain HTTP",
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on (a free one)")
    parser.add_argument("--insecure", action="store_true", help="no token; on loopback only")
    parser.add_argument(
        "--address", help="serve it on the Ray Serve of this Ray cluster, next to a judge"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help="with --address: the cluster's token (default: RAY_AUTH_TOKEN_PATH)",
    )
    parser.set_defaults(run=_console)


def _console(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes.

    Raises ConfigError without a run, and for an address that is not available.
    """
    if arguments.insecure and arguments.host not in LOOPBACK:
        raise ConfigError(
            f"--insecure with --host {arguments.host}: without a token only loopback is served"
        )
    folder = RunFolder.begun(arguments.run_folder)
    if arguments.address:
        http = load(
            Path(os.devnull), [f"host={arguments.host}", f"port={arguments.port}"], HttpOptions
        )
        reachable(arguments.address, "--address")
        with joined_cluster(arguments.address, arguments.token_file):
            from rayloop.cluster.stages.serving import serve_console  # imports ray

            key = None if arguments.insecure else _written(folder, secrets.token_urlsafe(24))
            return serve_console(folder.path, arguments.address, http, key)
    try:
        listening = socket.create_server((arguments.host, arguments.port))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--host {arguments.host} --port {arguments.port}: {error}. Choose others, or leave"
            " them out"
        ) from error
    with suppress(KeyboardInterrupt):
        _serve(folder, listening, _token(folder, arguments.host, listening, arguments.insecure))
    return 0


def _token(folder: RunFolder, host: str, listening: socket.socket, insecure: bool = False) -> str:
    """Print the console's address, and return the token that it asks for."""
    token = "" if insecure else secrets.token_urlsafe(24)
    url = f"http://{host}:{listening.getsockname()[1]}/"
    print(f"console: {with_token(url, token, lambda: _written(folder, token))}", flush=True)
    return token


def _written(folder: RunFolder, token: str) -> Path:
    """Write the token to a file that only this user can read. Raises ConfigError.

    The file is a new one, since the user who made the folder knows the former content.
    """
    for path in (folder.path / "console.key", own_copy(folder.cluster).with_suffix(".console.key")):
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, token.encode(), mode=0o600, durable=False)
            return path
    raise ConfigError(
        f"{path}: no place for the console's token; run the command in a terminal, which it is"
        " printed to"
    )


def _serve(folder: RunFolder, listening: socket.socket, token: str) -> None:
    import uvicorn

    from rayloop.connections import Impatient
    from rayloop.serve_apps.console.app import web

    app = web(folder, token)
    config = uvicorn.Config(
        app, http=Impatient, log_level="warning", access_log=False, timeout_graceful_shutdown=1
    )
    complete(uvicorn.Server(config).serve([listening]))


def serve_beside(folder: RunFolder) -> None:
    """Print the address of a console on loopback, and serve it until this process ends.

    Serving begins when the run has begun.
    """
    listening = socket.create_server((LOOPBACK[0], 0))
    token = _token(folder, LOOPBACK[0], listening)

    def serve() -> None:
        while not folder.used:
            time.sleep(POLL_INTERVAL_S)
        _serve(folder, listening, token)

    threading.Thread(target=serve, daemon=True).start()


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``watch``."""
    add_run_folder(parser)
    parser.set_defaults(run=_watch)


def _watch(arguments: argparse.Namespace) -> int:
    """Show steps as they are recorded, until the run ends. Returns 0."""
    folder = RunFolder.begun(arguments.run_folder)
    config = folder.configuration
    metrics = Tail(folder.metrics)
    shown_steps = 0
    damage = ""
    temperature = ((config.get("rollout") or {}).get("sampling") or {}).get("temperature", 1.0)
    with Progress(config.get("steps") or 0, sampled(temperature)) as progress:
        while True:
            run_status = status(folder, time.time(), folder.events)
            records = metrics.records()
            if shown_steps > len(records):  # the file was replaced
                shown_steps = 0
            for record in records[shown_steps:]:
                values = {name: v for name, v in record.items() if isinstance(v, int | float)}
                progress.step(values)
            shown_steps = len(records)
            if run_status["damaged"] != damage:
                damage = run_status["damaged"]
                progress.note(damage)
            progress.doing(visible(state(run_status)))
            if run_status["process"] is None:
                progress.note(visible(state(run_status)))
                return 0
            time.sleep(POLL_INTERVAL_S)


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``compare``."""
    parser.add_argument(
        "run_folders",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="folders of runs, <output>/<name>",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.png", help="draw the runs' rewards over each other"
    )
    parser.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    """Print a column for each run. Returns 0; raises ConfigError."""
    folders = [RunFolder.begun(path) for path in arguments.run_folders]
    columns = [_figures(folder) for folder in folders]
    headings = [folder.path.name for folder in folders]
    table = Table(f"means of the last {ESTIMATE_STEPS} steps", *headings, box=None)
    for name in dict.fromkeys(chain.from_iterable(columns)):
        table.add_row(name, *(column.get(name, "") for column in columns))
    Console(soft_wrap=True, markup=False, highlight=False).print(table)
    if arguments.out:
        overlaid(folders).savefig(arguments.out, dpi=120)
        print(arguments.out)
    return 0


def _figures(folder: RunFolder) -> dict[str, str]:
    """A run's last figures, in words."""
    records = list(folder.metrics)
    events = list(folder.events)
    figures = {
        "run": visible(state(status(folder, time.time(), events))),
        "steps": str(len(records)),
    }
    damage = folder.damage()
    if damage:
        figures["records"] = damage
    lines = series(records[-ESTIMATE_STEPS:])
    for name in FIGURES:
        values = [value for _, value in lines.get(name, ()) if value is not None]
        if values:
            figures[name] = number(fmean(values))
    held_out = series(by_step(events, "evaluated"))
    for name in HELD_OUT:
        points = held_out.get(name)
        if points:
            figures[name] = f"{number(points[0][1])} -> {number(points[-1][1])}"
    figures["gain"] = "\n".join(gains(events))
    return figures
