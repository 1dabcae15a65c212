"""Arc Vision's rewards, tools and prompt beside the original's own code, on random texts and calls.

``ORIGINALS=FOLDER python -m tests.originals.test_arc_vision --write`` writes what the original pays
for the first cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import math
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task
from rayloop.recipes.arc_vision.data import PROMPTS
from rayloop.recipes.arc_vision.original import Simulated
from rayloop.recipes.arc_vision.reward import ArcVisionReward
from rayloop.rewards.saved import EMPTY_TRAJECTORY
from tests.support.originals import module, needs_originals, source

FILE = Path(__file__).parents[1] / "data/originals/arc_vision.json"
REPOSITORY = "jbarnes850/verl"
CASES, WRITTEN = 20_000, 300
EPISODES, EPISODES_WRITTEN = 4_000, 60
TOLERANCE = {"original": 1e-12, "library": 1e-5}
"""The library's overlap is float32."""
TERMS = {
    "r_task": "r_task",
    "r_tool": "r_tool",
    "r_gate": "r_gate",
    "iou": "iou",
    "tools": "tool_invocations",
    "penalties": "num_gate_penalties",
}
"""Ours -> theirs, of the training function."""
_ODD = [
    "",
    ".",
    "-",
    "1e-3",
    "nan",
    "0.5.5",
    "\uff11",
    "\u0663",
    "0.1-0.2",
    "1 2",
    " 3 ",
    "50%",
    "inf",
    "1e400",
]
_LIKELY = [0, 1, 2, 10, 100, 640, 1280, 1919, 1920, 1921, 2560, 3840, 5000, 720, 1080, 1081]
_AROUND = (
    "<bbox>[{}]</bbox>",
    "<bbox> [{}] </bbox>",
    "<bbox>[{}]</bbox>",
    "<BBOX>[{}]</bbox>",
    " [{}] ",
    "[{}]",
    '"bbox": [{}]',
    '{{"bbox_2d": [{}], "label": "x"}}',
    '"bbox_2d": [{}]',
    "bbox: [{}]",
    "coordinates: [{}]",
    "Box: [{}]",
    "bounding box: [{}]",
    "<click>{}</click>",
    "<point>{}</point>",
    "<box>{}</box>",
    "I found it at [{}]",
    "x1=1 y1: 2, x2 3 y2 : {}",
    "x1 y1 x2 y2 = {}",
)
_PLAIN = (
    *(
        f"<use_tool>{name}</use_tool>"
        for name in ("zoom_ui_element", "wait_for_ui", "inspect_element", "frob")
    ),
    "<use_tool>",
    (
        '<tool_call>{"name": "zoom_ui_element", "arguments": {"region": [0.1, 0.2, 0.3,'
        " 0.4]}}</tool_call>"
    ),
    "</use_tool>",
    "<bbox>",
    '<tool_call>{"name": "WAIT"}</tool_call>',
    "<tool_call>a<tool_call>b</tool_call></tool_call>",
    "</bbox>",
    "detected",
    "located",
    "<reasoning>small, [1] see</reasoning>",
    "\n",
    "text ",
    "\u00fcn\u00ef \u4f60\u597d ",
    "\r\n",
    "\x0b",
    "<bbox></bbox>",
    "<bbox>\n[0.1,0.1,0.2,0.2]\n</bbox>",
    "[1]",
    "[ - ]",
    "[.]",
    "[,,,]",
)
_EXACT = (
    [0, 0, 0, 0],
    [0, 0, 1, 1],
    [0.1, 0.1, 0.1, 0.5],
    [0.5, 0.5, 0.2, 0.2],
    [10, 20, 30, 40],
    [0.1, 0.1, 0.9, 0.9],
    [0.2, 0.2, 0.2 + 0.05**0.5, 0.2 + 0.05**0.5],
)


def number(rng: random.Random) -> str:
    chance = rng.random()
    if chance < 0.35:
        return f"{rng.random():.3f}"
    if chance < 0.6:
        return str(rng.choice(_LIKELY))
    if chance < 0.75:
        return f"{rng.random() * 2000:.2f}" if chance < 0.7 else f"-{rng.random():.2f}"
    return rng.choice(_ODD) if chance < 0.8 else f"{rng.randint(0, 100) / 100}"


def numbers(rng: random.Random, truth: list[float]) -> str:
    """Those of the true box, nearly; or others, often four."""
    if rng.random() < 0.5:
        return ", ".join(f"{min(max(side + rng.gauss(0, 0.03), 0), 1):.3f}" for side in truth)
    count = rng.choices([4, 3, 5, 2, 1, 0], [5, 1, 1, 1, 1, 1])[0]
    return rng.choice([", ", ",", " , ", ",\n"]).join(number(rng) for _ in range(count))


def case(rng: random.Random) -> tuple[str, list[float]]:
    """A text of a policy, and a true box."""
    chance = rng.random()
    if chance < 0.8:
        far, most = (0.9, 0.2) if chance < 0.4 else (0.5, 0.5)
        x, y = rng.random() * far, rng.random() * far
        truth = [x, y, x + rng.random() * most, y + rng.random() * most]
    else:
        truth = [rng.random() for _ in range(4)] if chance < 0.9 else list(rng.choice(_EXACT))
    pieces = []
    for _ in range(rng.randint(0, 5)):
        plain = rng.random() < 0.5
        pieces.append(
            rng.choice(_PLAIN) if plain else rng.choice(_AROUND).format(numbers(rng, truth))
        )
        pieces.append(rng.choice(["", " ", "\n"]))
    return "".join(pieces), truth


def calls(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Calls of one episode, with the arguments that the tools take."""
    made: list[tuple[str, dict[str, Any]]] = []
    for _ in range(rng.randint(1, 6)):
        name = rng.choice(["zoom_ui_element", "wait_for_ui", "inspect_element"])
        region = [rng.choice([0, 1, -0.5, 1.5, round(rng.random(), 3)]) for _ in range(4)]
        given: dict[str, Any] = {
            "region": region,
            "zoom_factor": rng.choice([1, 2, 2.5, 4, 9, 0.5, -1]),
        }
        if name == "wait_for_ui":
            given = {"duration": rng.choice([0.1, 1, 2.0, 5, 7, 0, -1, round(rng.random() * 5, 2)])}
        elif name == "inspect_element":
            given = {
                "region": region,
                "type": rng.choice(["structure", "properties", "accessibility", "other"]),
            }
        made.append((name, {key: value for key, value in given.items() if rng.random() < 0.8}))
    return made


def ours(variant: str, text: str, truth: list[float]) -> Scored:
    reward = ArcVisionReward(ArcVisionReward.Settings.model_validate({"variant": variant}))
    scored = reward.score(EMPTY_TRAJECTORY, Task("t", (), truth), ScoreContext(0, [text]))
    assert isinstance(scored, Scored)
    return scored


def played(made: list[tuple[str, dict[str, Any]]]) -> list[list[Any]]:
    """Text and step reward of each call."""
    tools = Simulated()
    return [list(tools.call(name, given)) for name, given in made]


def differing(text: str, truth: list[float], theirs: dict[str, Any]) -> list[str]:
    """The variants whose value or terms are not the original's."""
    wrong = []
    for variant, tolerance in TOLERANCE.items():
        scored = ours(variant, text, truth)
        same = math.isclose(scored.value, theirs[variant], rel_tol=0, abs_tol=tolerance)
        if variant == "original":
            same &= all(
                math.isclose(scored.components[our], theirs["terms"][our], rel_tol=0, abs_tol=1e-9)
                for our in TERMS
            )
        wrong += [] if same else [variant]
    return wrong


class Theirs:
    """The original's functions."""

    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)
        self.training = module(
            REPOSITORY, "examples/arc_vision/arc_vision_custom_reward.py", {"__file__": "x"}
        )
        self.library = module(REPOSITORY, "verl/utils/reward_score/arc_vision_reward.py")
        imports = "from .base_tool import BaseTool\nfrom .schemas import OpenAIFunctionToolSchema\n"
        given = {"BaseTool": _Base, "OpenAIFunctionToolSchema": dict}
        self.tools: ModuleType = module(
            REPOSITORY, "verl/tools/arc_vision_tools.py", given, {imports: ""}
        )

    def pays(self, text: str, truth: list[float]) -> dict[str, Any]:
        with contextlib.redirect_stdout(io.StringIO()):
            found = self.training.arc_vision_compute_reward("arc_vision", text, list(truth))
            library = self.library.compute_score(text, json.dumps(truth))
        terms = {our: float(found[their]) for our, their in TERMS.items()}
        return {"original": float(found["score"]), "library": float(library), "terms": terms}

    def plays(self, made: list[tuple[str, dict[str, Any]]]) -> list[list[Any]]:
        return asyncio.run(self._plays(made))

    async def _plays(self, made: list[tuple[str, dict[str, Any]]]) -> list[list[Any]]:
        kinds = {
            "zoom_ui_element": "ZoomTool",
            "wait_for_ui": "WaitTool",
            "inspect_element": "InspectTool",
        }
        tools = {name: getattr(self.tools, kind)({}, {}) for name, kind in kinds.items()}
        for tool in tools.values():
            await tool.create("one")
        return [list((await tools[name].execute("one", given))[:2]) for name, given in made]


class _Base:
    def __init__(self, config: Any, tool_schema: Any) -> None:
        self.config, self.tool_schema = config, tool_schema


def _cases() -> list[tuple[str, list[float]]]:
    rng = random.Random(29)
    return [case(rng) for _ in range(CASES)]


def _episodes() -> list[list[tuple[str, dict[str, Any]]]]:
    rng = random.Random(30)
    return [calls(rng) for _ in range(EPISODES)]


@needs_originals
@pytest.mark.timeout(600)
def test_both_variants_pay_what_the_original_pays() -> None:
    theirs, wrong = Theirs(), []
    for text, truth in _cases():
        wrong += [
            (variant, text, truth) for variant in differing(text, truth, theirs.pays(text, truth))
        ]
    assert wrong == []


@needs_originals
def test_the_tools_say_and_pay_what_the_original_does() -> None:
    theirs = Theirs()
    assert [made for made in _episodes() if played(made) != theirs.plays(made)] == []


@needs_originals
def test_prompt_and_tools_are_the_originals_byte_for_byte() -> None:
    text = source(REPOSITORY, "examples/arc_vision/prepare_screenspot_data.py")
    start = text.index("def create_reasoning_prompt")
    made: dict[str, Any] = {}
    exec(text[start : text.index("def process_screenspot_sample")], made)
    shipped = (PROMPTS / "arc_vision.txt").read_bytes().decode()
    for instruction in ("close the window", "{width} \\1 %s", ""):
        assert shipped.replace("{instruction}", instruction) == made["create_reasoning_prompt"](
            instruction
        )
    schemas = source(REPOSITORY, "examples/arc_vision/config/tool_config/arc_vision_tools.yaml")
    assert (PROMPTS / "tools.yaml").read_bytes().decode() == schemas


def write() -> None:
    """Write the first cases with what the original makes of them."""
    theirs = Theirs()
    scores = [
        {"text": text, "truth": truth, **theirs.pays(text, truth)}
        for text, truth in _cases()[:WRITTEN]
    ]
    episodes = [
        {"calls": made, "results": theirs.plays(made)} for made in _episodes()[:EPISODES_WRITTEN]
    ]
    FILE.write_text(
        json.dumps({"scores": scores, "episodes": episodes}, indent=0) + "\n", encoding="utf-8"
    )


if __name__ == "__main__" and "--write" in sys.argv:
    write()
