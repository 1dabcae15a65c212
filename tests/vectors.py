"""Compare rayloop with the numbers that the original systems return: ``python tests/vectors.py
FILE.json...``

A file is a JSON list of entries ``{recipe, reward, inputs, expected, note?}``. The entry's
``reward`` names the original function; a table of rules (one module per recipe in
tests/vector_rules) maps it to our function with the options that express the original. Numbers
agree within 1e-5 (relative above 1), NaN with NaN; an error that our code raises on purpose meets
any ``{"raises": ...}``.

Prints every mismatch, every deliberate deviation with its reason, and every entry that no rule
knows. A reason holds under
conditions on the raw inputs, which the rules state without the functions under test. What deviates
by default must still agree
with the settings that express the original, where there are any, and be what the rule works out by
hand, where it does. Exit code:
0 when nothing mismatched, 1 otherwise, 2 when a file cannot be read. ``--strict``: unknown entries
fail too.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rayloop.core.failures import RayloopError
from tests.vector_rules import algorithm, arc_vision, arpo, chart_rvr, pyvision
from tests.vector_rules.entries import Deviation, Entry, Nothing, Refused, Rule, Unknown

RULES: dict[str, Rule] = {
    **arc_vision.RULES,
    **chart_rvr.RULES,
    **pyvision.RULES,
    **arpo.RULES,
    **algorithm.RULES,
}
"""The first pattern found in an entry's name decides; the algorithm's are broad, so they come last.
"""
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Verdict:
    """``ok`` None: no rule knows the entry, and ``got`` says why.

    ``why`` is the reason of a deliberate deviation.
    """

    entry: Entry
    ok: bool | None
    got: Any = None
    why: str = ""


def read(path: str) -> list[Entry]:
    """The entries of a file. Raises OSError, ValueError (not JSON, or not a list of entries)."""
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError("expected a JSON list of entries")
    for i, row in enumerate(rows):
        if missing := {"recipe", "reward", "inputs", "expected"} - set(row):
            raise ValueError(f"entry {i} has no {sorted(missing)}")
    return [
        Entry(r["recipe"], r["reward"], r["inputs"], r["expected"], r.get("note", "")) for r in rows
    ]


def check(entry: Entry, file: Sequence[Entry]) -> Verdict:
    """What our code makes of one entry; ``file`` are all entries of its file."""
    rule = next((rule for pattern, rule in RULES.items() if re.search(pattern, entry.reward)), None)
    if rule is None:
        return Verdict(entry, None, "no rule for this name")
    try:
        got = rule(entry, file)
    except Unknown as why:
        return Verdict(entry, None, str(why))
    except (RayloopError, Refused) as error:
        got = {"raises": f"{type(error).__name__}: {error}"}
        return Verdict(entry, matches(got, entry.expected), got)
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
        AssertionError,
    ) as error:
        return Verdict(
            entry, False, f"the rule broke on these inputs: {type(error).__name__}: {error}"
        )
    if not isinstance(got, Deviation):
        return Verdict(entry, matches(got, entry.expected), got)
    if got.original is not Nothing.EXPRESSES_IT and not matches(got.original, entry.expected):
        return Verdict(entry, False, got.original)
    same = matches(got.got, entry.expected)
    if not same and got.instead is not Nothing.SAYS_IT and not matches(got.got, got.instead):
        return Verdict(entry, False, got.got)
    return Verdict(entry, same, got.got, "" if same else got.why)


def matches(got: Any, expected: Any) -> bool:
    """Equal, numbers within the tolerance; of a mapping only the keys that are expected count.

    Any error is as good as another.
    """
    if isinstance(expected, Mapping) and "raises" in expected:
        return isinstance(got, Mapping) and "raises" in got
    if isinstance(expected, Mapping):
        return isinstance(got, Mapping) and all(
            key in got and matches(got[key], expected[key]) for key in expected
        )
    if isinstance(expected, list):
        return (
            isinstance(got, list | tuple)
            and len(got) == len(expected)
            and all(map(matches, got, expected))
        )
    if isinstance(expected, bool) or isinstance(got, bool) or not isinstance(expected, int | float):
        return type(got) is type(expected) and got == expected
    if math.isnan(expected):
        return isinstance(got, float) and math.isnan(got)
    return isinstance(got, int | float) and math.isclose(
        got, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE.json")
    parser.add_argument("--strict", action="store_true", help="entries that no rule knows fail too")
    options = parser.parse_args(arguments)
    verdicts: list[Verdict] = []
    for path in options.files:
        try:
            file = read(path)
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        verdicts += [check(entry, file) for entry in file]
    deliberate = [v for v in verdicts if v.why]
    wrong = [v for v in verdicts if v.ok is False and not v.why]
    unknown = [v for v in verdicts if v.ok is None]
    for v in wrong:
        print(
            f"MISMATCH {v.entry.recipe}: {v.entry.reward}\n  inputs   {json.dumps(v.entry.inputs)}"
        )
        print(f"  expected {json.dumps(v.entry.expected)}\n  got      {v.got}")
    for v in unknown:
        print(f"UNKNOWN  {v.entry.recipe}: {v.entry.reward} ({v.got})")
    for v in deliberate:
        print(f"DEVIATES {v.entry.recipe}: {v.entry.reward} ({v.entry.note})\n  because  {v.why}")
    agree = len(verdicts) - len(wrong) - len(unknown) - len(deliberate)
    summary = f"{agree} agree, {len(wrong)} mismatch, {len(unknown)} unknown"
    print(summary + (f", {len(deliberate)} deviate on purpose" if deliberate else ""))
    return 1 if wrong or (options.strict and unknown) else 0


if __name__ == "__main__":
    sys.exit(main())
