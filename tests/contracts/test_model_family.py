"""What every family of models keeps: generation and training compute the same log-probs, packed or
not, before and after a weight sync, and what is exported is what plain transformers loads.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from rayloop.chat.rendering import Renderer
from rayloop.core.model_families import FAMILIES
from rayloop.core.protocols import TrainItem
from rayloop.core.types import (
    EndReason,
    ImageSource,
    Message,
    PromptImage,
    Sampling,
    TokenPrompt,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)
from rayloop.data.images import decode, image_geometry
from rayloop.engines.generation.transformers import TransformersEngine
from rayloop.engines.models import hf_state, load_model
from rayloop.engines.models.saving import save_model
from rayloop.engines.settings import FsdpSettings, ModelSettings
from rayloop.engines.training.fsdp import FsdpEngine
from rayloop.transports.manifest import manifest
from tests.engines.prompts import engine, image
from tests.engines.training import engine as trainer
from tests.support.model_families import KINDS, limit, table, write
from tests.support.runs import ROOT

pytestmark = pytest.mark.timeout(300)

TURNS, EPISODES = 3, 3


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write(request.param, tmp_path_factory.mktemp(request.param))


async def played(
    server: TransformersEngine, folder: Path, number: int, version: Version
) -> Trajectory:
    """Three turns; each shows a picture of its own to a model that reads images."""
    renderer = Renderer(ModelSettings(path=str(folder)))
    sampling = renderer.sampling(Sampling(max_tokens=4 + number, temperature=0.9))
    turns, ids, shown = list[Turn](), list[int](), list[PromptImage]()
    for k in range(TURNS):
        picture = image(28 * (1 + (number + k) % 3), 56 + 28 * (k % 2), seed=10 * number + k)
        seen = [ImageSource(data=picture.data)] if renderer.image_token is not None else []
        said = Message("user", (f"What is {number} + {k}? " * (1 + number), *seen))
        new = (
            renderer.observation([said], turns[-1].token_ids) if turns else renderer.prompt([said])
        )
        turns.append(Turn("user", new.token_ids, tuple(one.ref for one in new.images)))
        ids += new.token_ids
        shown += new.images
        done = await server.generate(TokenPrompt(tuple(ids), tuple(shown), seed=number), sampling)
        turns.append(Turn("assistant", done.token_ids, (), done.logprobs, version))
        ids += done.token_ids
    bytes_of = {one.ref.sha256: one.data for one in shown if one.data is not None}
    return Trajectory(
        TrajectoryId(number, 0),
        0,
        f"task-{number}",
        number,
        tuple(turns),
        sampling,
        EndReason.DONE,
        image_bytes=bytes_of,
    )


async def episodes(server: TransformersEngine, folder: Path, version: Version) -> list[Trajectory]:
    return list(
        await asyncio.gather(
            *(played(server, folder, number, version) for number in range(EPISODES))
        )
    )


def gaps(ours: list[Any], theirs: list[Any]) -> Any:
    return np.concatenate([abs(a - b) for a, b in zip(ours, theirs, strict=True)])


def sampled(trajectories: list[Trajectory]) -> list[Any]:
    return [
        flat.rollout_logprobs[flat.loss_mask] for flat in (one.flatten() for one in trajectories)
    ]


def plain(folder: Path, trajectory: Trajectory) -> torch.Tensor:
    """Log-probs [N] by the classes of transformers, which know nothing but the folder, the tokens
    and the pictures.
    """
    flat = trajectory.flatten()
    auto = AutoModelForImageTextToText if trajectory.images else AutoModelForCausalLM
    loaded, report = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    inputs: dict[str, Any] = {"input_ids": torch.tensor(flat.token_ids)[None]}
    assert stops(loaded) == set(trajectory.sampling.end_tokens), (
        "it ends an answer where the run did"
    )
    if trajectory.images:
        processor = AutoImageProcessor.from_pretrained(folder, use_fast=False)
        pictures = [decode(trajectory.image_bytes[one.sha256]) for one in trajectory.images]
        seen = [processor(images=[picture], return_tensors="pt") for picture in pictures]
        inputs["pixel_values"] = torch.cat([one["pixel_values"] for one in seen])
        if "image_grid_thw" in seen[0]:
            assert [tuple(one["image_grid_thw"][0].tolist()) for one in seen] == [
                one.grid for one in trajectory.images
            ]
        if FAMILIES[loaded.config.model_type].images == "patches":
            inputs["image_grid_thw"] = torch.tensor([one.grid for one in trajectory.images])
            inputs["mm_token_type_ids"] = (
                inputs["input_ids"] == loaded.config.image_token_id
            ).int()
    with torch.no_grad():
        logits = loaded.eval()(**inputs).logits[0] / trajectory.sampling.temperature
    logits[:, list(trajectory.sampling.banned_tokens)] = -torch.inf
    at = torch.from_numpy(flat.loss_mask.nonzero()[0])
    return logits.log_softmax(-1)[at - 1, torch.tensor(flat.token_ids)[at]]


def stops(model: Any) -> set[int]:
    """The tokens at which transformers' ``generate`` ends."""
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}


def step(trained: FsdpEngine, trajectories: list[Trajectory]) -> None:
    report = trained.train(
        [[TrainItem(one, 1.0 - number) for number, one in enumerate(trajectories)]]
    )
    assert report["actor/updates"] == 1
    assert np.isfinite(report["actor/loss"])


def test_a_family_is_trained_as_it_samples_and_exported_as_it_is_loaded(
    folder: Path, tmp_path: Path
) -> None:
    within = limit(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])

    async def run() -> None:
        server = await engine(folder, dtype="float32")
        first = await episodes(server, folder, Version(0, 0))
        with trainer(folder, FsdpSettings(micro_batch_tokens=1, dtype="float32")) as alone:
            unpacked = alone.logprobs(first)
        with trainer(folder, FsdpSettings(dtype="float32")) as packed:
            assert gaps(packed.logprobs(first), sampled(first)).max() < within
            assert gaps(packed.logprobs(first), unpacked).max() < within
            if first[0].images:
                assert gaps(packed.logprobs(first, swap_images=True), sampled(first)).mean() > 1e-3
            step(packed, first)
            weights = packed.export(Version(0, 1))
            await server.load(manifest(Version(0, 1), weights), weights)
            later = await episodes(server, folder, Version(0, 1))
            ours = packed.logprobs(later)
            assert gaps(ours, sampled(later)).max() < within, "the engine has the trained weights"
            assert gaps(packed.logprobs(first), unpacked).mean() > 1e-3, (
                "training changed the weights"
            )
        save_model(folder, tmp_path / "out", weights, limits=ModelSettings(path=str(folder)))
        for one, found in zip(later, ours, strict=True):
            torch.testing.assert_close(
                plain(tmp_path / "out", one), torch.from_numpy(found), rtol=0, atol=within
            )

    asyncio.run(run())


@pytest.mark.parametrize(("least", "most"), [(784, 20_000), (50_000, 60_000)])
def test_an_exported_folder_shows_pictures_at_the_sizes_of_the_run(
    folder: Path, least: int, most: int, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(folder)
    if "vision_config" not in config.sub_configs:
        pytest.skip("a model of texts")
    run = ModelSettings(path=str(folder), min_pixels=least, max_pixels=most)
    older = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    source = shutil.copytree(
        folder, tmp_path / "source"
    )  # as Hub folders are: the numbers in both places, and nested
    other = {**older, "min_pixels": 3136, "max_pixels": 12_845_056}
    (source / "preprocessor_config.json").write_text(json.dumps(other), encoding="utf-8")
    (source / "processor_config.json").write_text(
        json.dumps({"image_processor": other}), encoding="utf-8"
    )
    save_model(source, tmp_path / "out", load_file(folder / "model.safetensors"), limits=run)
    files = sorted((tmp_path / "out").glob("*processor_config.json"))
    assert len(files) == 2
    geometry = image_geometry(config.to_dict(), least, most)
    for file in files:
        alone = shutil.copytree(tmp_path / "out", tmp_path / file.stem)
        next(alone / one.name for one in files if one != file).unlink()
        processor = AutoImageProcessor.from_pretrained(alone, use_fast=False)
        for width, height in ((40, 40), (300, 200), (640, 90), (1000, 1000)):
            made = processor(images=[Image.new("RGB", (width, height))], return_tensors="pt")
            if "image_grid_thw" in made:
                assert tuple(made["image_grid_thw"][0].tolist()) == geometry.grid(height, width), (
                    file.name
                )
            else:
                assert made["pixel_values"].shape[0] == geometry.grid(height, width)[0], file.name


def test_names_are_those_of_the_checkpoint_also_without_weights(folder: Path) -> None:
    settings = ModelSettings(path=str(folder))
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert hf_state(load_model(settings)).keys() == set(file.keys()), (
            "the names that transformers saves"
        )
    named = dict(load_model(settings, weights=False).named_parameters())
    assert named.keys() == dict(load_model(settings).named_parameters()).keys()


def test_every_family_is_held_to_it_and_on_the_page() -> None:
    assert FAMILIES.keys() <= {*KINDS}
    assert table() in (ROOT / "docs/bring_your_own/model.md").read_text(encoding="utf-8"), (
        f"put this there:\n{table()}"
    )
