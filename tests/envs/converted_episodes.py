"""Records episodes on a web page, converts them into another language and back, and compares every
action.

    python -m tests.envs.converted_episodes OUT [--episodes 200] [--through qwen3_vl]
    python -m tests.envs.converted_episodes OUT --run RUN    # the episodes of a run on record

The episodes are played in a real Chromium by the episode loop and written by the run's own records;
only what the policy says is drawn, from every call of UI-TARS that the other language has.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rayloop.cli import main as command
from rayloop.core.types import Message, Task
from rayloop.envs.browser.web import WebPage
from rayloop.envs.grammar import scanner
from rayloop.envs.grammar.actions import Actions
from rayloop.run.folder import RunFolder
from tests.envs.pages import LISTENING, write
from tests.support.episodes import TINT, TINY, group

SIDE = 448
"""Pixels of the screen: sixteen patches of 28, so that UI-TARS writes these pixels."""
PAGE = {"width": SIDE, "height": SIDE, "settle": 0.0}
GROUP_SIZE = 10
CALLS = (
    "click(start_box='({x},{y})')",
    "left_double(start_box='({x},{y})')",
    "right_single(start_box='({x},{y})')",
    "drag(start_box='({x},{y})', end_box='({y},{x})')",
    "long_press(start_box='({x},{y})')",
    "hover(start_box='({x},{y})')",
    "scroll(start_box='({x},{y})', direction='{way}')",
    "scroll(direction='{way}')",
    "hotkey(key='ctrl c')",
    "press(key='enter')",
    "type(content='it\\'s {x} \\u00e4\\n')",
    "open_app(app_name='Clock')",
    "press_back()",
    "press_home()",
)
"""Calls of which the turns before the last are drawn; some are answered with an error."""
LAST = ("finished(content='{x} pieces')", "finished(content='')", "call_user()")


def drawn(numbers: random.Random) -> list[str]:
    """The turns of one episode."""
    calls = [*numbers.choices(CALLS, k=numbers.randint(1, 3)), numbers.choice(LAST)]
    turns = []
    for call in calls:
        place = {"x": numbers.randrange(SIDE), "y": numbers.randrange(SIDE)}
        way = numbers.choice(("up", "down", "left", "right"))
        thought = numbers.choice(("", "Thought: I look again.\nThen I act.\n"))
        turns.append(f"{thought}Action: {call.format(**place, way=way)}")
    return turns


def record(out: Path, episodes: int) -> Path:
    """Play the episodes; returns the run's folder."""
    pages = write(out / "pages", listening=LISTENING)
    settings = WebPage.Settings.model_validate({"folder": str(pages), **PAGE})
    columns = {"url": "listening.html", "check": "0", "instruction": "Look around."}
    task = Task("page", (Message("user", ("{instruction}",)),), source="pages", extra=columns)
    numbers = random.Random(0)
    with RunFolder(out, "recorded").acquired() as folder:
        folder.write_config(yaml.safe_dump(config(out, settings)))
        for step in range(1, episodes // GROUP_SIZE + 1):
            said = [drawn(numbers) for _ in range(GROUP_SIZE)]
            folder.rollouts.write(step, *group(lambda: WebPage(settings), task, said))
    return folder.path


def config(out: Path, settings: WebPage.Settings) -> dict[str, Any]:
    options = settings.model_dump(mode="json", exclude_unset=True)
    page = {"use": "rayloop.envs.browser.web:WebPage", "with": options}
    sizes = {"min_pixels": 37632, "max_pixels": 37632, "position_tint": TINT}
    return {
        "name": "recorded",
        "output": str(out),
        "steps": 1,
        "model": {"path": str(TINY), **sizes},
        "data": {"train": "rows.jsonl"},
        "environment": {"episode": {"environment": page}},
        "reward": {"source": {"use": "rayloop.rewards.environment_result:EnvironmentResult"}},
    }


def convert(out: Path, run: Path, through: str) -> None:
    """There and back with the command."""
    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    options = settings["environment"]["episode"]["environment"]["with"]
    ours = json.dumps({"language": "ui_tars", "pointing": options.get("pointing", {})})
    there, back = out / "there", out / "back"
    assert command(["data", "convert", str(run), "--to", through, "--out", str(there)]) == 0
    again = ["data", "convert", str(there / "train.jsonl"), "--from", through]
    assert command([*again, "--to", ours, "--out", str(back)]) == 0


def on_record(run: Path) -> Iterator[tuple[tuple[str, int], str]]:
    """(episode, number of the turn) and text of each turn of the policy."""
    for record_ in RunFolder.at(run).rollouts:
        name = "/".join(str(record_[key]) for key in ("step", "group", "sample"))
        said = [turn["text"] for turn in record_["turns"] if turn["sampled"]]
        yield from (((name, number), text) for number, text in enumerate(said, 1))


def in_rows(file: Path) -> Iterator[tuple[tuple[str, int], str]]:
    """The same of each row, whose name is that of the row and of the one it was converted from."""
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        name, number, _ = row["id"].split(":")
        yield (name, int(number)), row["answer"]


def is_named(place: tuple[str, int], entry: dict[str, Any]) -> bool:
    name, number = place
    ends = range(entry["turn"], entry["turn"] + entry["turns"])
    return entry["where"] == name and number in ends


def compare(run: Path, out: Path) -> Counter[str]:
    """How many turns have equal actions, others, and none because they were left out."""
    back = dict(in_rows(out / "back/train.jsonl"))
    left_out = [
        entry
        for name in ("there", "back")
        for entry in map(json.loads, (out / name / "left_out.jsonl").read_text().splitlines())
    ]
    counts: Counter[str] = Counter()
    for place, text in on_record(run):
        counts["turns on record"] += 1
        if any(is_named(place, entry) for entry in left_out):
            counts["left out, named"] += 1
            continue
        before, after = scanner.read(text), scanner.read(back[place])
        assert isinstance(before, Actions)
        assert isinstance(after, Actions)
        counts["equal" if before == after else "different"] += 1
        counts.update(f"  {type(action).__name__}" for action in before.actions)
    counts["episodes on record"] = len({name for (name, _), _ in on_record(run)})
    counts["episodes that came back"] = len({name for name, _ in back})
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--through", default="qwen3_vl")
    parser.add_argument("--run", type=Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = arguments.run or record(arguments.out, arguments.episodes)
    convert(arguments.out, run, arguments.through)
    for name, count in sorted(compare(run, arguments.out).items()):
        print(f"{count:6} {name}")


if __name__ == "__main__":
    main()
