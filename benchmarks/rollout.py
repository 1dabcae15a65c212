"""``bench rollout``: tokens per second through driver, environments and rollout actor, beside
vLLM's own offline ``generate``.

Both sides run the same vLLM with the same arguments, in as many processes of its own, on the same
prompts, log-probs on. Ours are the steps of a whole run (``bench step --engine vllm``), counted
from the moment when the driver wants a step's groups until the last answer is scored.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import alternately, machine
from benchmarks.step import ENGINES, Shape, add_shape, write_rows

PEER = Path(__file__).parent / "peers" / "vllm_generate.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape(parser)
    parser.add_argument("--rounds", type=int, default=3, help="how often each side runs")
    parser.set_defaults(run=_rollout, completion=256, steps=4)


def _rollout(arguments: argparse.Namespace) -> int:
    """Run bare vLLM and ours in turn and print the ratio of their median speeds."""
    shape = Shape.of(arguments)
    options = [item for name, value in asdict(shape).items() for item in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as temporary:
        rows = Path(temporary) / "rows.jsonl"
        write_rows(rows, shape)
        rounds = alternately(
            {
                "bare": [
                    sys.executable,
                    str(PEER),
                    "--rows",
                    str(rows),
                    "--engine",
                    json.dumps(ENGINES["vllm"]),
                    *options,
                ],
                "ours": [sys.executable, "-m", "benchmarks", "step", "--engine", "vllm", *options],
            },
            arguments.rounds,
            _describe,
        )
    whole = {
        side: median(one[side]["gen_tok_per_s"] for one in rounds) for side in ("ours", "bare")
    }
    ratio = round(whole["ours"] / whole["bare"], 3)
    print(
        json.dumps({"ratio": ratio, "tokens_per_s": whole, "machine": machine(), "rounds": rounds})
    )
    return 0


def _describe(sides: Mapping[str, Mapping[str, Any]]) -> str:
    ours, bare = (sides[side]["gen_tok_per_s"] for side in ("ours", "bare"))
    return f"ours {ours}, bare {bare} tokens/s: {ours / bare:.3f}"
