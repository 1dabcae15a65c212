"""``report``: write a run's curves and trajectories as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from rayloop.core.failures import ConfigError
from rayloop.view.page import write_files, write_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN_DIR", help="folder of the run, <output>/<name>")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN_DIR/report.html")
    parser.add_argument("--groups", type=int, default=200, metavar="N", help="recorded groups to show, evenly spread")
    parser.add_argument("--files", action="store_true", help="write training_metrics.json and task_results/ into RUN_DIR as well")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.groups < 0:
        raise ConfigError(f"--groups {arguments.groups}: expected 0 or more")
    print(write_page(arguments.run_folder, arguments.out, arguments.groups))
    for written in write_files(arguments.run_folder) if arguments.files else ():
        print(written)
    return 0
