"""``bench shares``: tokens that each rank of a simulated trainer computes in a step, beside the
fewest that whole groups allow.

No ranks, no model: the function that deals a step's trajectories to the ranks is given lengths.
They are those of a run (``--run``: its kept rollouts, of one turn each), or long-tailed: answers as
the episodes of latencies.json, prompts of half to one and a half times the mean, the same for a
group. The bound is the mean over the ranks with every prompt counted once, or the longest group: no
dealing of whole groups is below it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measure import machine
from benchmarks.scale import LATENCIES
from rayloop.grpo.balance import Groups, MemberLength, fullest, packed, shares
from rayloop.run.records.jsonl import JsonLines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=8, help="of the policy")
    parser.add_argument("--groups", type=int, default=128, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="trajectories of a group")
    parser.add_argument("--steps", type=int, default=20, help="that are dealt out")
    parser.add_argument("--prompt", type=int, default=1024, help="mean tokens")
    parser.add_argument("--answer", type=int, default=512, help="mean tokens")
    parser.add_argument(
        "--run",
        dest="folder",
        type=Path,
        metavar="FOLDER",
        help="take the lengths of this run instead",
    )
    parser.set_defaults(run=_shares)


def _shares(arguments: argparse.Namespace) -> int:
    source = _long_tailed(arguments) if arguments.folder is None else _of_run(arguments.folder)
    steps = [list(islice(source, arguments.groups)) for _ in range(arguments.steps)]
    found = [measure(groups, arguments.ranks) for groups in steps if groups]
    result = {name: round(fmean(one[name] for one in found), 3) for name in found[0]}
    worst = {
        f"{name}_worst": round(max(one[name] for one in found), 3)
        for name in ("over_bound", "over_bound_each")
    }
    shape = {
        name: value
        for name, value in vars(arguments).items()
        if name not in ("command", "folder", "run")
    }
    print(json.dumps({**shape, "steps": len(found), **result, **worst, "machine": machine()}))
    return 0


def measure(groups: Groups, ranks: int) -> dict[str, float]:
    """The fullest rank's packed tokens over the bound, with our shares and with trajectories dealt
    one by one (``each``).
    """
    whole = [
        packed(groups, [(number, i) for i in range(len(group))])
        for number, group in enumerate(groups)
    ]
    bound = max(sum(whole) / ranks, *whole)
    each = shares([[MemberLength(0, sum(length))] for group in groups for length in group], ranks)
    places = [(number, i) for number, group in enumerate(groups) for i in range(len(group))]
    torn = tuple(tuple(places[index] for index, _ in share) for share in each)
    return {
        "bound_tokens": bound,
        "over_bound": fullest(groups, shares(groups, ranks)) / bound,
        "over_bound_each": fullest(groups, torn) / bound,
    }


def _long_tailed(arguments: argparse.Namespace) -> Iterator[list[MemberLength]]:
    generator, lengths = random.Random(0), json.loads(LATENCIES.read_text(encoding="utf-8"))
    for _ in count():
        prompt = round(arguments.prompt * generator.uniform(0.5, 1.5))
        answers = generator.choices(lengths, k=arguments.group)
        yield [MemberLength(prompt, max(1, round(arguments.answer * answer))) for answer in answers]


def _of_run(folder: Path) -> Iterator[list[MemberLength]]:
    groups: dict[Any, list[MemberLength]] = {}
    for file in sorted((folder / "rollouts").glob("*.jsonl")):
        for record in JsonLines(file):
            rest = record["sampled_tokens"]
            groups.setdefault((file.name, record["group"]), []).append(
                MemberLength(record["length"] - rest, rest)
            )
    yield from groups.values()
