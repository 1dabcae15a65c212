"""Chart-RVR's rewards, measures and prompts beside the original's and its fork's own code, on
random completions.

``ORIGINALS=FOLDER python -m tests.originals.test_chart_rvr --write`` writes what the originals pay
for the first cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import hashlib
import io
import json
import math
import random
import sys
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rayloop.config.settings import SettingsModel
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task
from rayloop.recipes.chart_rvr.checkout import SHA256, Checkout
from rayloop.recipes.chart_rvr.rewards.original import exact_match, relaxed_accuracy
from rayloop.recipes.chart_rvr.rewards.reading import PUBLISHED
from rayloop.recipes.chart_rvr.rewards.reward import ChartReward
from rayloop.rewards.saved import EMPTY_TRAJECTORY
from tests.support.originals import module, needs_originals, source

FILE = Path(__file__).parents[1] / "data/originals/chart_rvr.json"
CASES, WRITTEN = 4000, 120
"""Groups of one to four completions: of the comparison with the originals, and whose values are
committed.
"""
REPOSITORIES = {"original": "sanchit97/chartrl", "fork": "potate4/chartrl"}
CLOSE = 1e-6
"""The originals' cosines are float32."""
PLACES = 64


def vector(text: str) -> list[float]:
    """In place of MiniLM: counts of hashed words, and one place that every text has, the empty one
    too.
    """
    counts = [0.0] * PLACES
    for word in text.split():
        counts[
            functools.reduce(lambda h, c: (h * 31 + ord(c)) % 1_000_003, word, 7) % (PLACES - 1)
        ] += 1.0
    counts[-1] = 0.5
    return counts


class Words:
    """An embedder, and a SentenceTransformer, of ``vector``."""

    class Settings(SettingsModel):
        """Nothing to set."""

    def __init__(self, *_: Any) -> None: ...

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        return [vector(text) for text in texts]

    def cuda(self) -> Words:
        return self

    def eval(self) -> Words:
        return self

    def encode(self, text: str, **_: Any) -> Any:
        import torch

        return torch.tensor(vector(text))


@dataclass(frozen=True)
class Case:
    """A group of completions to one row."""

    texts: tuple[str, ...]
    label: Any
    chart_type: str
    table: Any
    reasoning: str

    def task(self) -> Task:
        return Task(
            "t",
            (),
            self.label,
            "",
            {
                "chart_type": self.chart_type,
                "table": copy.deepcopy(self.table),
                "reasoning": self.reasoning,
            },
        )


NAMES = (
    "Year",
    "Sales",
    "year",
    "SALES",
    "Rate",
    "",
    "A",
    "b",
    "2010",
    "10",
    "10.0",
    "5",
    "5 %",
    "é",
    "x\ny",
)
LABELS = (
    "5",
    "10",
    "-5",
    "0",
    "0.0",
    "12.5",
    "Yes",
    "No",
    "Japan",
    "2010",
    "[1, 2]",
    "1e3",
    "nan",
    "",
    "5%",
    7,
    None,
    True,
)
TABLES = (
    "",
    "{",
    "nope",
    "[1,2]",
    "3",
    "null",
    '"columns"',
    '{"columns": [], "rows": []}',
    '{"rows": [[1]]}',
    '{"columns": {"a":1}, "rows": {"b":2}}',
    '{"columns": "ab", "rows": "cd"}',
    '{"columns":[1],"rows":[1]}',
    '["columns","rows"]',
    '{"columns": ["a"], "rows": [["1"]], "x": 1}',
    "NaN",
    '{"columns":[NaN],"rows":[[Infinity]]}',
)
STEPS = ("<step-1>: look at the bar\n<step-2>: sum is 10", "", "read it")
TAGS = ("<think>", "</think>", "<type>", "</type>", "<table>", "</table>", "<answer>", "</answer>")


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Equal seeds, equal cases."""
    for index in range(count):
        draw = random.Random(f"charts {seed} {index}")
        table = _table(draw)
        label, kind, steps = (
            draw.choice(LABELS),
            draw.choice(("bar", "line", "stacked bar")),
            draw.choice(STEPS),
        )
        texts = tuple(
            _completion(draw, table, label, kind, steps) for _ in range(draw.randint(1, 4))
        )
        yield Case(texts, label, kind, None if draw.random() < 0.05 else table, steps)


def _cell(draw: random.Random) -> str:
    return draw.choice([*NAMES, str(draw.randint(0, 30))])


def _table(draw: random.Random) -> dict[str, Any]:
    columns, rows = draw.randint(0, 4), draw.randint(0, 4)
    lengths = [columns if draw.random() < 0.85 else draw.randint(0, 5) for _ in range(rows)]
    return {
        "columns": [_cell(draw) for _ in range(columns)],
        "rows": [[_cell(draw) for _ in range(n)] for n in lengths],
    }


def _changed(draw: random.Random, table: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(table)
    for _ in range(draw.randint(0, 2)):
        kind = draw.random()
        if kind < 0.3 and made["rows"]:
            made["rows"].pop(draw.randrange(len(made["rows"])))
        elif kind < 0.5:
            made["rows"].append([_cell(draw) for _ in range(2)])
        elif kind < 0.7 and made["columns"]:
            made["columns"][draw.randrange(len(made["columns"]))] = _cell(draw)
        elif kind < 0.8:
            draw.shuffle(made["rows"])
        elif kind < 0.9 and made["rows"]:
            row = draw.choice(made["rows"])
            if row:
                row[draw.randrange(len(row))] = draw.choice([_cell(draw), 7, 1.5, None, True])
        else:
            made["columns"].append(_cell(draw))
    return made


def _written(draw: random.Random, table: dict[str, Any]) -> str:
    kind = draw.random()
    if kind < 0.1:
        return draw.choice(TABLES)
    text = json.dumps(_changed(draw, table), indent=draw.choice([None, 2]))
    return f"```json\n{text}\n```" if kind < 0.2 else f"```\n{text}\n```" if kind < 0.25 else text


def _answer(draw: random.Random, label: Any) -> str:
    try:
        number = float(label)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isnan(number) and draw.random() < 0.6:
        near = [
            f"{number * 1.04}",
            f"{number * 1.06}",
            f"{number * 0.951}",
            f"{number}.",
            f"{number}..",
            f"{number}%",
            f"-{number}",
        ]
        return draw.choice(
            [
                str(label),
                *near,
                "nan",
                "inf",
                "0",
                "1,000",
                f"${number}",
                f" {number} ",
                f"{number}e0",
            ]
        )
    return draw.choice(
        [
            str(label),
            str(label).upper(),
            f"{label}.",
            "",
            "yes",
            "No",
            "[1, 2]",
            "١٢",
            "None",
            "ten",
        ]
    )


def _completion(
    draw: random.Random, table: dict[str, Any], label: Any, kind: str, reasoning: str
) -> str:
    said = ("look at the bar", "sum is 10", "", "read value 5 of Sales in the year 2010")
    steps = "".join(f"<step-{i}>: {draw.choice(said)}\n" for i in range(1, draw.randint(1, 8)))
    steps = reasoning if draw.random() < 0.3 else steps
    ends = [draw.choice(["\n", "\n", "\n", "\n", "", "\n\n", " \n"]) for _ in range(6)]
    typed = ("\n" if draw.random() < 0.2 else "") + draw.choice(
        [kind, kind.upper(), "bar", "", "Line "]
    )
    block = ("\n" if draw.random() < 0.5 else "") + _written(draw, table)
    text = (
        f"<think>{ends[0]}<type>{typed}</type>{ends[1]}<table>{block}</table>{ends[2]}{steps}</think>{ends[3]}"
        f"<answer>{ends[4]}{_answer(draw, label)}{ends[5]}</answer>"
    )
    kind_of_slip = draw.random()
    if kind_of_slip < 0.1:
        return text.replace(draw.choice(TAGS), "", 1)
    if kind_of_slip < 0.2:
        return text + draw.choice(
            [" ", " junk", "\njunk", "\n", "<answer>5</answer>", "</answer>", "<think>"]
        )
    if kind_of_slip < 0.25:
        return draw.choice([" ", "\n", "x"]) + text
    if kind_of_slip < 0.28:
        return text.replace("<table>", "<table><table>")
    if kind_of_slip < 0.3:
        return draw.choice(
            [
                "",
                "<answer>5</answer>",
                "5",
                "<think></think>",
                text[: draw.randrange(len(text) + 1)],
            ]
        )
    return text


@functools.cache
def rewarding(variant: str) -> ChartReward:
    words = {"use": "tests.originals.test_chart_rvr:Words"}
    return ChartReward(
        ChartReward.Settings.model_validate({"variant": variant, "embedder": words, "wait": 0.0})
    )


def ours(case: Case, variant: str) -> dict[str, list[float]]:
    """What rayloop pays, by component."""
    reward = rewarding(variant)
    contexts = [ScoreContext(0, [text]) for text in case.texts]

    async def scored() -> Any:
        return await reward.score_group([EMPTY_TRAJECTORY] * len(contexts), case.task(), contexts)  # type: ignore[misc]

    outcomes = asyncio.run(scored())
    return {name: [one.components[name] for one in outcomes] for name in PUBLISHED.values()}


def theirs(case: Case, code: types.ModuleType) -> dict[str, list[float]]:
    """What the originals' functions pay."""
    size, found = len(case.texts), dict[str, list[float]]()
    for function, name in PUBLISHED.items():
        columns: dict[str, Any] = {
            "label": [case.label] * size,
            "chart_type": [case.chart_type] * size,
            "reasoning": [case.reasoning] * size,
            "table": [copy.deepcopy(case.table) for _ in range(size)],
        }
        with contextlib.redirect_stdout(io.StringIO()):
            found[name] = [
                float(value) for value in getattr(code, function)(list(case.texts), **columns)
            ]
    return found


def equal(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(
        abs(x - y) <= CLOSE or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True)
    )


@functools.cache
def published(variant: str) -> types.ModuleType:
    cut = {
        "from datasets import load_dataset": "",
        "import matplotlib.pyplot as plt": "",
        "from sentence_transformers import SentenceTransformer": "",
    }
    return module(REPOSITORIES[variant], "grpo_utils.py", {"SentenceTransformer": Words}, cut)


@needs_originals
@pytest.mark.parametrize("variant", REPOSITORIES)
def test_the_seven_components_are_theirs(variant: str) -> None:
    code, wrong, compared = published(variant), Counter[str](), 0
    for case in cases(CASES):
        mine, original = ours(case, variant), theirs(case, code)
        compared += sum(map(len, original.values()))
        wrong.update(name for name in original if not equal(mine[name], original[name]))
    print(f"{variant}: {compared} scores of components, {wrong.total()} groups disagree")
    assert wrong == {}
    assert compared > 60_000


ANSWERS = (
    "10",
    "10.",
    "10.5",
    "9.5",
    "10.50001",
    "0",
    "0.0",
    "-5",
    "5",
    "50%",
    "0.5",
    "5 %",
    "yes",
    "Yes",
    "Yes.",
    " yes ",
    "no",
    "1,000",
    "1000",
    "nan",
    "NaN",
    "inf",
    "",
    "%",
    "1e3",
    "[1, 2]",
    "[1,2]",
    "١٠",
    "10%",
    "0.1",
    "2010",
    "2015",
    "100%%",
    "unanswerable",
    ".",
    "..",
    "-",
    "٪",
)


@needs_originals
def test_relaxed_accuracy_and_exact_match_are_theirs() -> None:
    code = module(REPOSITORIES["original"], "metrics.py")
    draw, wrong = random.Random(1), list[tuple[str, str, Any]]()
    for _ in range(20_000):
        true, said = draw.choice(ANSWERS), draw.choice(ANSWERS)
        wrong += [
            (true, said, tolerance)
            for tolerance in (0.05, 1.0)
            if code.relaxed_accuracy([true], [said], tolerance)[0]
            != relaxed_accuracy(said, true, tolerance=tolerance)
        ]
        wrong += [(true, said, "exact")] * (
            code.exact_match([said], [true]) != exact_match(said, true)
        )
    assert wrong == []


@needs_originals
@pytest.mark.parametrize("repository", REPOSITORIES.values())
def test_the_prompts_are_theirs(repository: str, tmp_path: Path) -> None:
    text = source(repository, "prompts.py")
    (tmp_path / "prompts.py").write_text(text, encoding="utf-8")
    code = module(repository, "prompts.py")
    for number, prompt in code.SYSTEM_PROMPT_TEMPLATES.items():
        assert Checkout(checkout=str(tmp_path), number=number).text() == prompt
        assert hashlib.sha256(prompt.encode()).hexdigest() == SHA256[number]


def write() -> None:
    """The values of the first cases, by variant."""
    values = {
        variant: [theirs(case, published(variant)) for case in cases(WRITTEN)]
        for variant in REPOSITORIES
    }
    rounded = json.loads(json.dumps(values), parse_float=lambda text: round(float(text), 7))
    FILE.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        f"{json.dumps(name)}: [\n{(',' + chr(10)).join(map(json.dumps, rounded[name]))}\n]"
        for name in rounded
    )
    FILE.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__" and "--write" in sys.argv:
    write()
