"""A published file that mixes environments: each row is prepared, read and played in its own, and a
plain one in one turn.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rayloop.actors.environment import EnvironmentActor
from rayloop.actors.lease import Lease
from rayloop.chat.rendering import Renderer
from rayloop.cli import main
from rayloop.core.types import (
    Completion,
    FinishReason,
    RolloutRequest,
    Sampling,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
    Version,
)
from rayloop.data.dataset import Dataset
from rayloop.envs.interpreter.environment import close_sandboxes
from rayloop.run.config import RunConfig, read
from tests.support.pictures import picture
from tests.support.runs import ROOT

pytestmark = [pytest.mark.env, pytest.mark.timeout(120)]
PRESETS = ROOT / "recipes/pyvision/presets"
ANSWER = "<think>t</think><answer>\n\\boxed{red}\n</answer>"
ZOOM = (
    '<think>t</think><tool_call>{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 40,'
    " 40]}}</tool_call>"
)
CODE = (
    "<code>\n```python\nprint(sorted(name for name in globals() if '_hint_' in name or '_clue_' in"
    " name))\n```\n</code>"
)


@pytest.fixture(autouse=True)
def _no_sandbox_stays() -> Iterator[None]:
    yield
    close_sandboxes()


class Policy:
    """Says ``first`` and then the answer; keeps the prompts of its turns."""

    def __init__(self, config: RunConfig, first: str) -> None:
        self._texts, self.prompts = [first, ANSWER], list[TokenPrompt]()
        self._renderer = Renderer(config.model)
        self.generate, self.leave = Remote(self._generate), Remote(lambda cohort: None)

    async def _generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        ids = (*self._renderer.encode(self._texts[len(self.prompts)]), sampling.end_tokens[0])
        self.prompts.append(prompt)
        return Completion(ids, (-0.1,) * len(ids), FinishReason.END_TOKEN, Version(0, 0))


class Remote:
    def __init__(self, function: Any) -> None:
        self.remote = function


def preset(name: str) -> RunConfig:
    return read(
        PRESETS / name, [f"model.path={ROOT / 'recipes/pyvision/tiny'}", "model.min_pixels=784"]
    )


def played(config: RunConfig, rows: Path, first: str) -> dict[str, tuple[Policy, Trajectory]]:
    """The episode of each row by the row's question."""
    kinds, episode = config.environment.kinds, config.environment.episode
    actor, found = EnvironmentActor(config.model, episode, kinds), {}
    for number, task in enumerate(Dataset(rows, config.data.reader.build(), True, print, kinds)):
        policy = Policy(config, first)
        asked = RolloutRequest(task, TrajectoryId(number, 0), 0, 0, Sampling(max_tokens=256))
        lease: Any = Lease(1, policy)
        results, trajectory = asyncio.run(actor.run_episodes([asked], lease, None))  # type: ignore[arg-type]
        assert trajectory is not None, results
        found[task.extra["question"]] = policy, trajectory
    return found


def prepared(name: str, folder: Path) -> list[str]:
    assert main(["data", "prepare", name, "--from", str(folder), "--out", str(folder / "out")]) == 0
    return (folder / "out/train.jsonl").read_text(encoding="utf-8").splitlines()


def turns(episode: tuple[Policy, Trajectory]) -> int:
    return len(episode[1].sampled_turns)


def shown(config: RunConfig, episode: tuple[Policy, Trajectory]) -> str:
    """The prompt of the last turn."""
    return Renderer(config.model).decode(episode[0].prompts[-1].token_ids)


def test_a_mixed_file_of_deepeyes(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"<image>{question}"}],
            "images": [{"bytes": picture(96, 64), "path": None}],
            "data_source": source,
            "env_name": name,
            "reward_model": {"ground_truth": "red", "style": "model"},
            "extra_info": {"index": question, "question": question},
        }
        for question, source, name in (
            ("tool?", "vstar", "visual_toolbox_v2"),
            ("blank?", "thinklite_eureka", ""),
            ("null?", "thinklite_eureka", None),
        )
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    lines = prepared("deepeyes", tmp_path)
    ours = {
        "id": "own",
        "image": json.loads(lines[0])["image"],
        "question": "own?",
        "answer": "red",
    }
    file = tmp_path / "out/mixed.jsonl"
    file.write_text("\n".join([*lines, json.dumps(ours)]), encoding="utf-8")
    config = preset("deepeyes_faithful.yaml")
    episodes = played(config, file, ZOOM)
    assert {question: turns(episode) for question, episode in episodes.items()} == {
        "tool?": 2,
        "blank?": 1,
        "null?": 1,
        "own?": 2,
    }
    assert "<tool_response>" in shown(config, episodes["tool?"])


def test_a_mixed_file_of_pyvision(tmp_path: Path) -> None:
    gyms = {
        "image?": "pyvision_gym_w_image_hint",
        "hidden?": "pyvision_gym_wo_image_hint",
        "plain?": "",
    }
    (tmp_path / "a.png").write_bytes(picture(96, 64))
    (tmp_path / "film").mkdir()
    (tmp_path / "film/1.png").write_bytes(picture(96, 64))
    rows = [
        row(question, name, {"hint_path": "a.png", "hint_type": "image"})
        for question, name in gyms.items()
    ]
    film = row(
        "film?", "pyvision_gym_wo_video_hint", {"hint_path": "film.mp4", "hint_type": "video"}
    )
    (tmp_path / "film.mp4").write_bytes(b"film")
    (tmp_path / "pyvision_image_rl_data.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "pyvision_video_rl_data.json").write_text(json.dumps([film]), encoding="utf-8")
    file = tmp_path / "out/mixed.jsonl"
    lines = [*prepared("pyvision", tmp_path), *prepared("pyvision_video", tmp_path)]
    file.write_text("\n".join(lines), encoding="utf-8")
    config = preset("faithful.yaml")
    episodes = played(config, file, CODE)
    assert {question: turns(one) for question, one in episodes.items()} == {
        "image?": 2,
        "hidden?": 2,
        "plain?": 1,
        "film?": 2,
    }
    assert "<interpreter>Text Result:" not in shown(config, episodes["image?"])
    assert "['image_clue_0']" in shown(config, episodes["image?"])
    assert "['image_hint_0']" in shown(config, episodes["hidden?"])
    assert [len(one[0].prompts[0].images) for one in episodes.values()] == [1, 0, 1, 0]
    assert "['video_clue_0']" in shown(config, episodes["film?"])


def row(question: str, name: str, hint: dict[str, str]) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question}],
        "data_source": "s",
        "env_name": name,
        "mm_hint": hint,
        "reward_model": {"ground_truth": "red"},
        "extra_info": {"index": question, "question": question},
    }


def test_a_row_in_pyvisions_columns_names_its_environment(tmp_path: Path) -> None:
    """Without ``data prepare``, too."""
    (tmp_path / "a.png").write_bytes(picture(96, 64))
    hint = {"hint_path": "a.png", "hint_type": "image"}
    rows = [row("image?", "pyvision_gym_w_image_hint", hint), row("plain?", "", hint)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = preset("faithful.yaml")
    tasks = Dataset(file, config.data.reader.build(), True, print, config.environment.kinds)
    assert [task.environment for task in tasks] == ["pyvision_gym_w_image_hint", "none"]
