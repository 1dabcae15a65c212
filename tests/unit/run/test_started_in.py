"""Commands on a run whose configuration has relative paths, called from another folder than the one
it was started in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rayloop.core.failures import ConfigError
from rayloop.core.model_files import resolve
from rayloop.engines.shape import ModelSource
from rayloop.run import export
from rayloop.run.checkpoint import Checkpoint
from rayloop.run.config import read
from rayloop.run.place import STARTED_IN, from_start
from rayloop.run.preflight import known
from tests.support.runs import settings


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder.

    It was started in ``home``, with the model in ``home/m``; this process is elsewhere.
    """
    home, run, elsewhere = tmp_path / "home", tmp_path / "runs" / "run", tmp_path / "elsewhere"
    for folder in (home / "m", home / "data", run, elsewhere):
        folder.mkdir(parents=True)
    config: dict[str, Any] = settings(home, Path("m"), output=str(tmp_path / "runs"))
    (home / "train.jsonl").rename(home / "data" / "rows.jsonl")
    config["data"]["train"] = "data/rows.jsonl"
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (run / STARTED_IN).write_text(str(home), encoding="utf-8")
    monkeypatch.chdir(elsewhere)
    return run


def test_paths_that_lead_nowhere_from_here_go_from_where_the_run_was_started(
    run: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    for config in (export.recorded(run / "config.yaml"), read(run / "config.yaml", [])):
        assert (config.model.path, config.data.train) == (
            str(home / "m"),
            str(home / "data" / "rows.jsonl"),
        )
    Path("m").mkdir()
    assert export.recorded(run / "config.yaml").model.path == "m", "what was typed goes first"


def test_a_recipe_that_continues_a_run_finds_what_the_run_found(run: Path, tmp_path: Path) -> None:
    recipe = Path("mine.yaml")
    recipe.write_text((run / "config.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    config = read(recipe, [])
    assert from_start(config, run).model.path == str(tmp_path / "home" / "m")
    assert from_start(config, run.with_name("another")).model.path == "m", (
        "nothing is known of a run that has not begun"
    )


@pytest.mark.parametrize("typed", ["m", "../m", "../home/gone", "./m"])
def test_an_export_names_both_places(run: Path, tmp_path: Path, typed: str) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    config["model"]["path"] = typed
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (tmp_path / "home" / "m").rmdir()
    checkpoint = Checkpoint(run / "checkpoints" / "step_000001", 1, 1)
    for known_start in (True, False):
        where = (
            f"started in {tmp_path / 'home'}, and it is not there either"
            if known_start
            else "from the folder in which"
        )
        with pytest.raises(ConfigError) as why:
            export._export_checkpoint(checkpoint, tmp_path / "out", "float32")
        assert where in str(why.value)
        assert f"model.path: {typed} is neither a folder here" in str(why.value)
        assert "Hub cannot be asked" not in str(why.value)
        (run / STARTED_IN).unlink(missing_ok=True)


@pytest.mark.parametrize(
    "name", ["..", "../model", "./model", "a/..", "a/../b", "-a/b", ".a/b", "a/b/c"]
)
def test_a_path_is_no_name_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name != "..":
        with pytest.raises(ConfigError, match="is neither a folder here nor a name on the Hub"):
            resolve(name)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00"])
def test_a_model_s_configuration_that_is_no_object_is_one_line(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    for reads in (known, lambda model: model.shape):
        with pytest.raises(
            ConfigError, match=r"config\.json (cannot be read as JSON|holds a)"
        ) as why:
            reads(ModelSource(str(tmp_path)))
        assert len(str(why.value).splitlines()) == 1
