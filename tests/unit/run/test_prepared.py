"""A run's model is looked up once, by each command that begins with ``prepare``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.failures import ConfigError
from rayloop.core.model_files import Resolved, resolve
from rayloop.doctor.checks import checks
from rayloop.engines.shape import ModelSource
from rayloop.estimate.memory import with_micro_batch
from rayloop.run.config import RunConfig
from rayloop.run.demand import store
from rayloop.run.preflight import Prepared, doubtful_settings, preflight, prepare
from tests.support.drivers import made_driver
from tests.support.runs import ROOT

MODEL = ROOT / "recipes/arc_vision/tiny"
CHAT_SERVER = {"kind": "openai_http", "base_url": "http://127.0.0.1:9/v1", "model": "hosted"}


def run_of(folder: Path, **changes: Any) -> RunConfig:
    """A run on a copy of the shipped model, with a row."""
    model = folder / "model"
    if not model.exists():
        shutil.copytree(MODEL, model)
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "How many?", "answer": "3"}) + "\n", encoding="utf-8")
    values: dict[str, Any] = {
        "name": "run",
        "output": str(folder),
        "steps": 1,
        "model": {"path": str(model)},
        "data": {"train": str(rows)},
        "reward": {"source": {"use": "rayloop.recipes.digits.data:SortReward"}},
    }
    return RunConfig.model_validate(values | changes)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the models that were looked up."""
    paths: list[str] = []

    def counted(path: str, *arguments: Any, **options: Any) -> Resolved:
        paths.append(path)
        return resolve(path, *arguments, **options)

    monkeypatch.setattr("rayloop.engines.shape.resolve", counted)
    return paths


def started(prepared: Prepared) -> Prepared:
    """The run as ``train`` gives it to its driver."""
    folder = prepared.config.folder
    folder.mkdir(exist_ok=True)
    return with_micro_batch(preflight(prepared).begun(folder))


def test_a_start_looks_its_model_up_once(tmp_path: Path, lookups: list[str]) -> None:
    config = run_of(tmp_path)
    prepared = started(prepare(config))
    assert prepared.identity.keys() > {"architecture", "weights", "data.train"}
    assert prepared.store > 0
    doubtful_settings(prepared)
    assert lookups == [config.model.path]


def test_nothing_is_looked_up_before_it_is_needed(tmp_path: Path, lookups: list[str]) -> None:
    prepared = prepare(run_of(tmp_path, model={"path": "nobody/nothing/here"}))
    assert lookups == []
    with pytest.raises(ConfigError, match=r"model\.path: nobody/nothing/here is neither a folder"):
        _ = prepared.model.files


def test_a_doctor_looks_the_model_up_once(tmp_path: Path, lookups: list[str]) -> None:
    config = run_of(tmp_path)
    found = checks(prepare(config), None, None, [])
    assert [finding.level for finding in found["configuration"]()] != []
    assert lookups == [config.model.path]


def test_a_driver_looks_no_model_up_and_says_what_was_doubtful_at_the_start(
    tmp_path: Path, lookups: list[str]
) -> None:
    """Its node may not have the model's folder, which only ranks and engines need."""
    config = run_of(tmp_path)
    shutil.rmtree(config.model.path)
    driver = made_driver(config, config.folder, warnings=["data.eval is data.train"])
    assert lookups == []
    said = [record["why"] for record in driver.reporter.folder.events]
    assert said == ["data.eval is data.train"]


def test_a_run_is_doubtful_that_measures_on_the_rows_it_trains_on(tmp_path: Path) -> None:
    rows = run_of(tmp_path).data.train
    config = run_of(tmp_path, data={"train": rows, "eval": rows}, evaluation={"every": 1}, steps=2)
    assert any("data.eval is data.train" in said for said in doubtful_settings(prepare(config)))


def test_what_was_read_of_a_file_is_not_read_again(tmp_path: Path) -> None:
    prepared = prepare(run_of(tmp_path))
    before = prepared.identity
    Path(prepared.config.data.train).write_text("[]\n", encoding="utf-8")
    assert prepared.identity == before
    assert prepare(prepared.config).identity["data.train"] != before["data.train"]


def test_a_store_has_room_for_the_weights_that_engines_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = run_of(tmp_path)
    hosted = run_of(tmp_path, rollout={"engine": CHAT_SERVER})
    shape = ModelSource(own.model.path).shape
    assert prepare(own).store == store("float32", shape.parameters)
    assert prepare(hosted).store == store("float32", 0)
    shutil.rmtree(own.model.path)
    assert prepare(hosted).store == store("float32", 0), "no model is needed here"
    with pytest.raises(ConfigError):
        _ = prepare(own).store


def test_masked_pictures_of_a_text_only_model_are_refused(tmp_path: Path) -> None:
    loss = {"policy": {"loss": {"perception": {}}}}
    preflight(prepare(run_of(tmp_path, **loss)))
    config = tmp_path / "model/config.json"
    described = json.loads(config.read_text(encoding="utf-8"))
    text_only = {**described["text_config"], "model_type": "qwen2"}
    config.write_text(json.dumps(text_only), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"policy.loss.perception masks pictures, .* leave it out"
    ):
        preflight(prepare(run_of(tmp_path, **loss)))
