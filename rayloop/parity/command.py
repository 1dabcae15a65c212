"""``parity``: does an engine compute what the trainer computes, without a run and without Ray."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from rayloop.config.model import Dtype
from rayloop.core.failures import ConfigError
from rayloop.parity.report import ENGINES, lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``parity``."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, or a name on the Hub")
    add(
        "--engine",
        type=engine,
        default="transformers",
        help=f"{', '.join(ENGINES)}, or a server that plays text (default: %(default)s)",
    )
    add(
        "--against",
        type=address,
        metavar="URL",
        help="compare a server's prompt log-probs of text, http://host:port/v1",
    )
    add("--save", type=Path, metavar="FILE", help="write what was played as a case")
    add("--check", type=Path, metavar="FILE", help="score a case of --save, and play nothing")
    add("--dtype", choices=get_args(Dtype), help="default: float32, bfloat16 on a GPU")
    add("--turns", type=int, default=8, help="turns of a conversation (default: %(default)s)")
    add(
        "--images",
        type=numbers,
        default="1,2,4,8",
        metavar="N,N",
        help="images in one prompt (default: %(default)s)",
    )
    add(
        "--depth",
        type=numbers,
        metavar="N,N",
        help="tokens in front of a turn (default: to the model's context, at most 2048 on a CPU)",
    )
    add("--temperature", type=float, default=0.8, help="default: %(default)s")
    add(
        "--limit",
        type=float,
        help="mean |difference| that a row may have (default: by --dtype)",
    )
    add("--json", action="store_true", help="print one JSON object, with all rows")
    add("--out", type=Path, metavar="FILE", help="add the JSON object without rows as a line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare. Returns 0, or 1 where a row is above the limit; raises ConfigError."""
    # It imports torch, which --help need not wait for.
    from rayloop.parity.comparison import check, compare

    try:
        report = compare(arguments) if arguments.check is None else check(arguments)
        content = asdict(report)
        printed = [json.dumps(content)] if arguments.json else lines(report)
        if arguments.out is not None:
            del content["rows"]
            with open(arguments.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(content) + "\n")
    # A file that cannot be used, or an engine that is not installed.
    except (OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    print("\n".join(printed))
    return 0 if report.agreement.agrees else 1


def address(text: str) -> str:
    """The URL of a server."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text}: expected http://host:port/v1")
    return text


def engine(text: str) -> str:
    """The kind of an engine, or the URL of a server."""
    return text if text in ENGINES else address(text)


def numbers(text: str) -> list[int]:
    """The numbers of a list with commas, ascending; an empty list is allowed."""
    return sorted({int(word) for word in text.split(",") if word})
