"""Loading models, pixels, positions, and the names of the checkpoint."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rayloop.core.failures import ConfigError, DataFailure
from rayloop.engines.models import (
    checkpoint_names,
    hf_state,
    load_model,
    load_vision,
    model_groups,
    positions,
)
from rayloop.engines.settings import ModelSettings
from rayloop.engines.shape import ModelSource
from rayloop.run.preflight import known
from tests.engines.prompts import image, prompt

NO_IMAGES = torch.zeros(0, 3, dtype=torch.int64)


def settings(folder: Path, **changes: int) -> ModelSettings:
    return ModelSettings(path=str(folder), **changes)


@pytest.mark.parametrize("fixture", ["tiny_vlm", "tiny_text"])
def test_names_are_those_of_the_checkpoint(fixture: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(fixture)
    model = load_model(settings(folder))
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(hf_state(model)) == set(file.keys())
        for name, tensor in hf_state(model).items():
            assert torch.equal(tensor, file.get_tensor(name)), name
    assert list(checkpoint_names(model)) == [name for name, _ in model.named_parameters()]


def test_groups_partition_the_names(tiny_vlm: Path, tiny_text: Path) -> None:
    names = list(hf_state(load_model(settings(tiny_vlm))))
    groups = model_groups(names)
    assert set(groups) == {"embedding", "language", "vision", "merger"}
    assert sorted(name for group in groups.values() for name in group) == sorted(names)
    assert all("merger" in name for name in groups["merger"])
    assert set(model_groups(hf_state(load_model(settings(tiny_text))))) == {
        "embedding",
        "language",
        "head",
    }


def test_missing_folder_unsupported_model_and_missing_weights(
    tiny_vlm: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no/such/folder"):
        load_model(settings(tmp_path / "no/such/folder"))
    other = shutil.copytree(tiny_vlm, tmp_path / "other")
    (other / "config.json").write_text(
        json.dumps({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}),
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match="llava"):
        load_model(settings(other))
    partial = shutil.copytree(tiny_vlm, tmp_path / "partial")
    weights = load_file(partial / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"norm\.weight"):
        load_model(settings(partial))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen2_moe", "num_experts"),
        ("mixtral", "num_local_experts"),
        ("glm4v_moe", "n_routed_experts"),
    ],
)
def test_a_mixture_of_experts_is_refused_by_name_before_it_is_loaded(
    kind: str, name: str, tmp_path: Path
) -> None:
    config = {name: 8}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": kind, **({"text_config": config} if "4v" in kind else config)}),
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match=f"{kind} is a mixture of 8 experts"):
        load_model(settings(tmp_path))


def test_quantised_weights_are_refused(tiny_text: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_text, tmp_path / "quantised"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for refuse in (lambda: load_model(settings(folder)), lambda: known(ModelSource(str(folder)))):
        with pytest.raises(ConfigError, match="its weights are quantised"):
            refuse()


def test_a_checkpoint_that_is_no_renaming_is_refused(
    tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(settings(tiny_text))

    def merges(model: object, tags: dict[str, torch.Tensor]) -> None:
        torch.cat(
            [tag[:, None, None].transpose(1, 2).unflatten(2, (1, 1, 1)) for tag in tags.values()], 7
        )

    monkeypatch.setattr("rayloop.engines.models.weights.revert_weight_conversion", merges)
    with pytest.raises(ConfigError, match="merges or splits parameters"):
        checkpoint_names(model)


def test_pixels_match_the_grid_and_honour_the_limits(tiny_vlm: Path) -> None:
    model = load_model(settings(tiny_vlm))
    vision = load_vision(settings(tiny_vlm), model.config)
    assert vision is not None
    picture = image(84, 56)
    pixels = vision.pixels(picture.ref, picture.data)
    assert pixels.shape == (24, 3 * 2 * 14 * 14)
    assert vision.pixels(picture.ref, picture.data) is pixels
    small = load_vision(settings(tiny_vlm, max_pixels=28 * 28 * 2), model.config)
    assert small is not None
    with pytest.raises(DataFailure, match="grid"):
        small.pixels(picture.ref, picture.data)


def test_pixels_are_read_from_the_path_and_checked(tiny_vlm: Path, tmp_path: Path) -> None:
    vision = load_vision(settings(tiny_vlm), load_model(settings(tiny_vlm)).config)
    assert vision is not None
    picture, other = image(56, 56, seed=1), image(56, 56, seed=2)
    assert picture.data is not None
    (tmp_path / "picture.png").write_bytes(picture.data)
    located = dataclasses.replace(picture.ref, path=str(tmp_path / "picture.png"))
    assert vision.pixels(located).shape == (16, 1176)
    with pytest.raises(DataFailure, match="content"):
        vision.pixels(other.ref, picture.data)
    with pytest.raises(DataFailure, match="does not exist"):
        vision.pixels(dataclasses.replace(other.ref, path=str(tmp_path / "gone.png")))
    with pytest.raises(DataFailure, match="neither"):
        vision.pixels(other.ref)


def test_positions_of_text(tiny_text: Path, tiny_vlm: Path) -> None:
    token_ids = torch.arange(20, 25)
    assert positions(load_model(settings(tiny_text)), token_ids, NO_IMAGES).tolist() == [
        [0, 1, 2, 3, 4]
    ]
    assert (
        positions(load_model(settings(tiny_vlm)), token_ids, NO_IMAGES).tolist()
        == [[0, 1, 2, 3, 4]] * 4
    )


def test_positions_of_images(tiny_vlm: Path) -> None:
    """A 2 x 3 image at position p: text continues at p + max(2, 3)."""
    request = prompt(tiny_vlm, "ab", image(84, 56))
    ids = torch.tensor(request.token_ids)
    start = ids.tolist().index(request.token_ids[-2])
    rows = positions(
        load_model(settings(tiny_vlm)), ids, torch.tensor([request.images[0].ref.grid])
    )
    assert rows.shape == (4, len(ids))
    assert rows[0].tolist() == list(range(len(ids)))
    assert rows[1:, start : start + 6].sub(start).tolist() == [
        [0] * 6,
        [0, 0, 0, 1, 1, 1],
        [0, 1, 2, 0, 1, 2],
    ]
    assert rows[1:, -1].tolist() == [start + 3] * 3


def test_positions_refuse_stray_image_tokens(tiny_vlm: Path) -> None:
    model = load_model(settings(tiny_vlm))
    with pytest.raises(DataFailure, match="image tokens"):
        positions(model, torch.tensor([20, model.config.image_token_id]), NO_IMAGES)
