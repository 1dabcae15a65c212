"""A model of Qwen3-VL's shape learns the rows that ``data convert`` writes from UI-TARS' turns."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch
from PIL import Image

from rayloop.cli import main
from rayloop.core.types import PromptImage, Sampling, TokenPrompt, Version
from rayloop.data.dataset import ChatRows, Dataset
from rayloop.data.images import png
from rayloop.engines.settings import FsdpSettings, OptimizerSettings
from rayloop.envs.grammar.actions import Actions, Click, Point
from rayloop.envs.grammar.language import action_format
from rayloop.envs.grammar.rules import Extent
from rayloop.grpo.losses.settings import ReinforceLoss
from rayloop.sft.stage import Examples, SftConfig
from rayloop.transports.manifest import manifest
from tests.engines.prompts import engine as server
from tests.engines.training import engine as trainer
from tests.support.model_families import write

SCREEN = png(Image.new("RGB", (224, 168), "white"))
ANSWERS = (
    "Thought: There.\nAction: click(start_box='(503,119)')",
    "Action: click(start_box='(40,700)')",
)
UPDATES = 40
THOUSAND = Extent(1000, 1000)


@pytest.mark.timeout(300)
def test_a_model_writes_the_actions_of_converted_rows(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = write("qwen3_vl", tmp_path / "model")
    (tmp_path / "screen.png").write_bytes(SCREEN)
    rows = [
        {"prompt": f"Task {number}.", "image": "screen.png", "answer": answer}
        for number, answer in enumerate(ANSWERS)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    relative = "{language: ui_tars, pointing: {coordinates: relative}}"
    options = ["--from", relative, "--to", "qwen3_vl", "--out", str(tmp_path / "out")]
    assert main(["data", "convert", str(file), *options]) == 0

    stage = SftConfig.model_validate(
        {
            "output": "out",
            "steps": UPDATES,
            "model": {"path": str(model), "min_pixels": 37_632, "max_pixels": 37_632},
            "data": {"train": str(tmp_path / "out/train.jsonl")},
        }
    )
    examples = Examples(stage)
    tasks = Dataset(stage.data.train, ChatRows(ChatRows.Settings()), True, lambda failure: None)
    items = [examples.item(task, random.Random(0)) for task in tasks]
    assert len(items) == len(ANSWERS)

    async def written() -> tuple[list[float], list[str]]:
        settings = FsdpSettings(dtype="float32")
        optimizer = OptimizerSettings(lr=2e-2)
        with trainer(stage.model, settings, optimizer, ReinforceLoss()) as learning:
            reports = [learning.train([items]) for _ in range(UPDATES)]
            losses = [float(report["actor/logprob_mismatch_mean"]) for report in reports]
            weights = learning.export(Version(0, 1))
        engine = await server(model, dtype="float32")
        await engine.load(manifest(Version(0, 1), weights), weights)
        greedy = examples.renderer.sampling(Sampling(temperature=0.0, max_tokens=200))
        texts = []
        for item in items:
            [prompt, _] = item.trajectory.turns
            image_bytes = item.trajectory.image_bytes
            shown = tuple(PromptImage(ref, image_bytes.get(ref.sha256)) for ref in prompt.images)
            asked = TokenPrompt(prompt.token_ids, shown, seed=0)
            completion = await engine.generate(asked, greedy)
            texts.append(examples.renderer.decode(completion.token_ids))
        return losses, texts

    losses, texts = asyncio.run(written())
    print(f"\nloss {losses[0]:.2f} -> {losses[-1]:.3f}; {texts}")
    assert losses[-1] < 0.1 * losses[0]
    turns = [action_format("qwen3_vl").read(text, THOUSAND) for text in texts]
    actions = [turn.actions if isinstance(turn, Actions) else turn for turn in turns]
    assert actions == [(Click(Point(503, 119)),), (Click(Point(40, 700)),)]
