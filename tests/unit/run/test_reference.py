"""Where the reference comes from (``reference``): what is refused, and whether a teacher fits the
policy.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rayloop.core.failures import ConfigError
from rayloop.engines.shape import ModelSource
from rayloop.estimate.memory import of_reference
from rayloop.run.config import RunConfig
from rayloop.run.preflight import alike, prepare
from rayloop.run.sections import ReferenceSettings

MODEL = Path(__file__).parents[3] / "recipes/arc_vision/tiny"
KL = {"loss": {"kl_coef": 1.0, "kl": "k2"}}
LORA = {"engine": {"lora": {"rank": 4}}}
SERVER = "http://teacher:8000/v1"


def config(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "name": "run",
        "steps": 1,
        "model": {"path": str(MODEL)},
        "data": {"train": "rows.jsonl"},
        "reward": {"source": {"use": "rayloop.recipes.digits.data:SortReward"}},
    }
    return RunConfig.model_validate(values | changes)


@pytest.mark.parametrize(
    ("policy", "path", "kind"),
    [
        ({}, None, "none"),
        (KL, None, "actor"),
        (KL | LORA, None, "adapter_off"),
        (KL | LORA, "teacher", "actor"),
        (KL, SERVER, "actor"),
    ],
)
def test_a_model_of_its_own_is_held_by_actors(
    policy: dict[str, Any], path: str | None, kind: str
) -> None:
    assert config(policy=policy, reference={"path": path}).reference_kind == kind


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"reference": {"path": "teacher"}},
            "reference.path is of use to the KL term alone: set policy.loss.kl_coef above 0",
        ),
        (
            {"reference": {"refresh_every": 2}},
            "refresh_every renews copies of the model, and no KL term reads the reference",
        ),
        (
            {"reference": {"refresh_every": 2}, "policy": KL | LORA},
            "lora leaves the policy without its adapter for the ref",
        ),
        (
            {"reference": {"refresh_every": 2, "path": SERVER}, "policy": KL},
            "refresh_every would replace http://teacher",
        ),
        ({"reference": {"refresh_every": 0}, "policy": KL}, "greater than or equal to 1"),
        (
            {
                "reference": {"path": SERVER},
                "policy": KL,
                "rollout": {"sampling": {"temperature": 0.9}},
            },
            (
                "set rollout.sampling.temperature and top_p to 1, min_tokens to 0 and top_k to"
                " null, or name a folder"
            ),
        ),
        (
            {
                "reference": {"path": SERVER},
                "policy": KL,
                "rollout": {"sampling": {"min_tokens": 2}},
            },
            "min_tokens to 0",
        ),
        (
            {"reference": {"path": SERVER}, "policy": KL, "rollout": {"sampling": {"top_p": 0.8}}},
            "top_p to 1",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_key_and_remedy(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message.replace(".", r"\.")):
        config(**changes)


def teacher(folder: Path) -> Path:
    return Path(shutil.copytree(MODEL, folder / "teacher"))


def changed(file: Path, change: Any) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def check(path: Path | str) -> None:
    alike(prepare(config(policy=KL, reference={"path": str(path)})))


def test_a_copy_of_the_model_is_alike_and_a_server_is_asked_by_the_actors(tmp_path: Path) -> None:
    check(teacher(tmp_path))
    check(SERVER)


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(tmp_path: Path) -> None:
    path = teacher(tmp_path)

    def swap(content: Any) -> None:
        vocabulary = content["model"]["vocab"]
        first, second = (text for text, token in vocabulary.items() if token in (300, 301))
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    changed(path / "tokenizer.json", swap)
    with pytest.raises(
        ConfigError,
        match=(
            r"^reference\.path: .*teacher has another tokenizer than model\.path .*tiny: 300 is \("
        ),
    ) as found:
        check(path)
    assert "\n" not in str(found.value)


def test_a_special_token_that_is_plain_there_is_refused(tmp_path: Path) -> None:
    path = teacher(tmp_path)
    changed(
        path / "tokenizer.json", lambda content: content["added_tokens"][1].update(special=False)
    )
    with pytest.raises(ConfigError, match=r"\('.*', False\) there and \('.*', True\) here"):
        check(path)


@pytest.mark.parametrize("key", ["patch_size", "spatial_merge_size", "image_token_id"])
def test_another_cut_of_images_is_refused(tmp_path: Path, key: str) -> None:
    path = teacher(tmp_path)
    changed(
        path / "config.json",
        lambda content: (content if key in content else content["vision_config"]).update({key: 7}),
    )
    with pytest.raises(
        ConfigError, match=rf"another cut of images than .*: {key} is 7 there and \d+ here"
    ):
        check(path)


def test_a_teacher_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^reference\.path: .*nowhere is neither a folder here"):
        check(tmp_path / "nowhere")


def test_memory_is_that_of_the_model_that_the_actors_hold() -> None:
    own = ModelSource(str(MODEL)).shape
    assert of_reference(ReferenceSettings(), own) == own.parameters
    assert of_reference(ReferenceSettings(path=SERVER), own) == 0
    other = replace(own, tensors={})
    assert of_reference(ReferenceSettings(path=str(MODEL)), other) == own.parameters
