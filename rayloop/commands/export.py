"""``export``: write a checkpoint as a folder that plain transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="run folder, checkpoint of a run, or model folder")
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16 halves the folder and rounds the weights"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rayloop.run.export import export  # imports torch

    return export(arguments.checkpoint, arguments.out, arguments.dtype)
