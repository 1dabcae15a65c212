"""``bench train`` on a text model of 7B's shape: the share of the speed of matrix products."""

from __future__ import annotations

import sys

from benchmarks.gpu import models
from benchmarks.gpu.result import Found, Place, attempt
from benchmarks.measure import measured

SIZES = [
    "--sequences",
    "32",
    "--group",
    "8",
    "--prompt",
    "1024",
    "--answer",
    "512",
    "--rounds",
    "3",
]
TINY = [
    "--sequences",
    "4",
    "--group",
    "2",
    "--prompt",
    "16",
    "--answer",
    "8",
    "--rounds",
    "1",
    "--threads",
    "1",
]
COMMAND = """
import argparse
from benchmarks import train
parser = argparse.ArgumentParser()
train.add_arguments(parser)
chosen = parser.parse_args()
chosen.run(chosen)
"""
"""As ``python -m benchmarks train``, which would import Ray."""


def probe(place: Place) -> Found:
    """With and without checkpointed activations, in bfloat16."""
    given = [
        "--model",
        str(models.text(place)),
        "--dtype",
        "bfloat16",
        *(TINY if place.tiny else SIZES),
    ]
    for name, more in (
        ("checkpointing on", ["--gradient-checkpointing"]),
        ("checkpointing off", []),
    ):
        command = [sys.executable, "-c", COMMAND, *given, *more]
        yield name, attempt(lambda c=command: measured(c))  # type: ignore[misc]
