"""``doctor``: names the faults of a machine and a configuration, with advice (rayloop/doctor)."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rayloop.commands.arguments import add_overrides
from rayloop.core.threads import complete
from rayloop.doctor.checks import checks, examine, text
from rayloop.run.config import read
from rayloop.run.preflight import prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    config = "YAML file of a run, for its disk, memory, GPUs and files"
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help=config)
    add_overrides(parser, "values to change in CONFIG")
    parser.add_argument(
        "--address", help="Ray cluster or dashboard to look at (default: RAY_ADDRESS)"
    )
    parser.add_argument(
        "--token-file", type=Path, help="the cluster's token (default: RAY_AUTH_TOKEN_PATH)"
    )
    parser.add_argument(
        "--port",
        type=int,
        action="append",
        default=[],
        help="a port that must be free here; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Returns 1 when one of them is an error."""
    prepared = None
    if arguments.config:
        prepared = prepare(read(arguments.config, arguments.overrides))
    address = arguments.address or os.environ.get("RAY_ADDRESS")
    findings_of = complete(examine(checks(prepared, address, arguments.token_file, arguments.port)))
    rows: list[dict[str, Any]] = []
    for name, findings in findings_of.items():
        rows += [{"check": name, **asdict(finding)} for finding in findings]
    print(json.dumps(rows, indent=1) if arguments.json else text(findings_of))
    return int(any(row["level"] == "error" for row in rows))
