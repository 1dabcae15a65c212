"""ARPO's own worker beside ours: 20,000 random turns, the prompt, and what an episode begins with.

``python -m tests.originals.test_arpo --write`` writes what it made of some turns, for where its
code is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task
from rayloop.data.dataset import ChatRows
from rayloop.envs.grammar.arpo import Broken, acts, parsed
from rayloop.envs.grammar.screens import ScreenEnvironment, ScreenSettings
from rayloop.recipes.arpo.prepare import ORIGINAL
from rayloop.recipes.arpo.reward import ArpoReward
from rayloop.rewards.saved import EMPTY_TRAJECTORY
from tests.support.originals import module, needs_originals, source

REPOSITORY = "dvlab-research/ARPO"
GUI_AGENT = "verl/trainer/gui_agent.py"
ROOT = Path(__file__).parents[2]
EXPECTED = ROOT / "tests/data/originals/arpo.json"
CUT = (
    "import ray\n",
    "import torch\n",
    "from qwen_vl_utils import process_vision_info\n",
    "from desktop_env.desktop_env import DesktopEnv\n",
    "from ..utils.tokenizer import get_processor, get_tokenizer\n",
    "import verl.utils.torch_functional as VF\n",
    "from ..models.transformers.qwen2_vl import get_rope_index\n",
    "@ray.remote(num_cpus=1)\n",
)
ENDINGS = {"finished": "DONE", "wait": "WAIT", "error_env": "FAIL", "call_user": "FAIL"}
CASES, KEPT = 20_000, 250


class Machine:
    """Stands for OSWorld's: keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def reset(self, task: object) -> dict[str, bytes]:
        return {"screenshot": b"png"}

    def step(
        self, action: str, pause: float
    ) -> tuple[dict[str, bytes], float, bool, dict[str, Any]]:
        self.sent.append(action)
        return {"screenshot": b"png"}, 0.0, action in ("DONE", "FAIL"), {}

    def pause(self) -> None: ...

    unpause = pause


class Original:
    """ARPO's worker without its model and its machine."""

    def __init__(self) -> None:
        self.made = module(REPOSITORY, GUI_AGENT, cut=dict.fromkeys(CUT, ""))

    def worker(self, most: int = 10**9) -> Any:
        kind = self.made.EnvWorker
        worker = kind.__new__(kind)
        worker.__dict__.update(
            worker_idx=0,
            max_steps=most,
            env=Machine(),
            step_counter=0,
            is_done=False,
            history_images=[],
            history_messages=[],
            action_parse_res_factor=1000,
            model_type="qwen25vl",
            max_pixels=16384 * 28 * 28,
            min_pixels=100 * 28 * 28,
            process_message=lambda messages: None,
            reset_train_tensors=lambda: None,
        )
        return worker

    def turn(self, text: str) -> tuple[float, list[str]]:
        """The format's reward, and what the machine is sent."""
        worker = self.worker()
        with contextlib.redirect_stdout(io.StringIO()):
            answer = worker.step(text)
        return answer["format_reward"], worker.env.sent


def ours(text: str) -> tuple[float, list[str]]:
    try:
        found = parsed(text)
    except Broken:
        return -1.0, ["DONE"]
    if found[-1].name in ENDINGS:
        return 0.0, [ENDINGS[found[-1].name]]
    return 0.0, [one.code for one in found]


class Turns:
    """Random turns, well-formed or not."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pick = self.rng.choice

    def number(self) -> str:
        odd = [
            "10",
            "960",
            "1931",
            "1932",
            "-5",
            "0",
            "3.5",
            "99999",
            "1e3",
            "nan",
            "inf",
            "",
            "x",
            "\uff15",
            " 7 ",
        ]
        return self.pick(odd) if self.rng.random() < 0.5 else str(self.rng.randint(0, 1932))

    def box(self) -> str:
        count = self.rng.choices([2, 4, 1, 3, 0], [8, 2, 1, 1, 1])[0]
        box = (
            "(" + self.pick([",", ",", ", ", " , "]).join(self.number() for _ in range(count)) + ")"
        )
        return self.pick(
            [
                box,
                box,
                box,
                box.strip("()"),
                box + " ",
                f"<|box_start|>{box}<|box_end|>",
                "",
                "[1,2]",
            ]
        )

    def content(self) -> str:
        return self.pick(
            [
                "hello",
                "it's",
                "a\\nb",
                "a\\n",
                'say "x"',
                "\\'q\\'",
                "",
                "日本語",
                "x\n\ny",
                "x')",
                "a\\\\",
                "\n",
                "tab\\t",
                "it\\'s",
                "click(start_box='(1,2)')",
                "run\\\\n",
                "\\'); import os #",
            ]
        )

    def arguments(self, name: str) -> str:
        box, keys = self.box, "ctrl c"
        match name:
            case "click" | "left_double" | "right_single" | "left_single" | "hover":
                plain = f"start_box='{box()}'"
                odd = [
                    f"'{box()}'",
                    f"start_box={box() or 1}",
                    f"point='{box()}'",
                    f"{plain}, end_box='{box()}'",
                    f'start_box="{box()}"',
                ]
                return self.pick([plain, plain, "", *odd])
            case "drag" | "select":
                return self.pick(
                    [f"start_box='{box()}', end_box='{box()}'", f"start_box='{box()}'", ""]
                )
            case "scroll":
                way = self.pick(["up", "down", "left", "right", "UP", "", " sideways"])
                return self.pick(
                    [
                        f"start_box='{box()}', direction='{way}'",
                        "direction='down'",
                        f"start_box='{box()}'",
                    ]
                )
            case "hotkey" | "press" | "keyup" | "keydown":
                odd = [
                    "key=''",
                    "hotkey='ctrl v'",
                    "key=5",
                    "press='a'",
                    "",
                    "key='arrowleft'",
                    "key='space'",
                ]
                return self.pick([f"key='{keys}'", "key='enter'", *odd])
            case "type" | "finished":
                text = self.content()
                return self.pick(
                    [
                        f"content='{text}'",
                        f"content='{text}'",
                        f'content="{text}"',
                        "",
                        f"text='{text}'",
                    ]
                )
        return self.pick(["", "", "x=1"])

    def call(self) -> str:
        names = (
            "click left_double right_single drag hotkey type scroll wait finished left_single hover"
            " select press keyup keydown call_user error_env frob Click"
        )
        name = self.pick(names.split())
        made, chance = f"{name}({self.arguments(name)})", self.rng.random()
        spoilt = (
            (0.05, made[:-1]),
            (0.08, f"{made} # note"),
            (0.1, f" {made}"),
            (0.12, f"{made};"),
            (0.13, f"x={made}"),
        )
        return next((text for limit, text in spoilt if chance < limit), made)

    def turn(self) -> str:
        between = self.pick(["\n\n", "\n\n", "\n", "\n\n\n", " "])
        calls = between.join(
            self.call() for _ in range(self.rng.choices([1, 2, 3, 0], [8, 3, 1, 1])[0])
        )
        thought = self.pick(
            [
                "Thought: do it\n",
                "Thought: '''x\n",
                "",
                "Reflection: a Action_Summary: b\n",
                "Action_Summary: c\n",
                "Thought: multi\nline\n",
            ]
        )
        mark = self.pick(
            ["Action: "] * 3
            + ["Action:", "action: ", "", "Action: click(start_box='(1,1)')\nAction: ", "Action:\n"]
        )
        return (
            self.pick(["", "\n", " "])
            + thought
            + mark
            + calls
            + self.pick(["", "", "\n", "\n\n", "<|im_end|>"])
        )


def turns(seed: int, count: int) -> list[str]:
    made = Turns(seed)
    return [made.turn() for _ in range(count)]


@needs_originals
@pytest.mark.timeout(600)
def test_random_turns_are_read_as_arpo_reads_them() -> None:
    original, reward = Original(), ArpoReward(ArpoReward.Settings(variant="original"))
    different = []
    for text in turns(0, CASES):
        theirs = original.turn(text)
        scored = reward.score(EMPTY_TRAJECTORY, Task("t", ()), ScoreContext(0, [text]))
        if ours(text) != theirs or scored.components["format"] != theirs[0]:  # type: ignore[union-attr]
            different.append((text, theirs, ours(text)))
        with contextlib.suppress(Broken):
            assert len(acts(text)) == len(theirs[1])
    assert different == []


@needs_originals
def test_what_is_committed_is_what_arpo_makes_of_it() -> None:
    original = Original()
    assert [[text, *original.turn(text)] for text in turns(1, KEPT)] == json.loads(
        EXPECTED.read_text(encoding="utf-8")
    )


class Screen(ScreenEnvironment):
    """Shows nothing of its own."""

    def start(self, task: Task, instruction: str) -> Any:
        return self._first(task, instruction, "SCREEN")


@needs_originals
def test_an_episode_begins_with_arpos_messages() -> None:
    instruction = "Open {Files}, and rename 'a' to b."
    worker = Original().worker()
    theirs = worker.reset({"instruction": instruction})["obs_messages"]
    texts = [(message["role"], message["content"][0].get("text", "SCREEN")) for message in theirs]
    task = ChatRows(ChatRows.Settings()).task({"id": "t", "prompt": ORIGINAL}, "row 1", Path())
    shown = Screen(ScreenSettings(variant="original")).start(task, instruction)
    assert [(message.role, "".join(map(str, message.parts))) for message in shown.messages] == texts


@needs_originals
def test_the_shipped_prompts_are_those_of_its_files() -> None:
    listed = yaml.safe_load((ROOT / "recipes/arpo/published.yaml").read_text(encoding="utf-8"))[
        "prompts"
    ]
    theirs = {
        "uitars.txt": Original().made.uitars_system_prompt,
        "system.txt": "Your are a helpful assistant.",
    }
    assert f'"{theirs["system.txt"]}"' in source(REPOSITORY, GUI_AGENT)
    for one in listed:
        text = (ROOT / "recipes/arpo" / one["file"]).read_bytes()
        assert text.decode() == theirs[Path(one["file"]).name]
        assert hashlib.sha256(text).hexdigest() == one["sha256"]


if __name__ == "__main__" and "--write" in sys.argv:
    lines = [
        json.dumps([text, *Original().turn(text)], ensure_ascii=False) for text in turns(1, KEPT)
    ]
    EXPECTED.parent.mkdir(parents=True, exist_ok=True)
    EXPECTED.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
