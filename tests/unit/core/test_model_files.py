"""Where a model is: folders, the Hub's cache without a network, and a Hub that does not answer."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from rayloop.core import model_files
from rayloop.core.failures import ConfigError
from rayloop.core.model_files import resolve
from rayloop.engines.shape import ModelSource
from rayloop.run.config import RunConfig
from rayloop.run.preflight import prepare
from tests.support.runs import settings

ROOT = Path(__file__).parents[3]
COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40
NAME = "owner/name"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with a snapshot of ``NAME`` at ``COMMIT``, which main is.

    The network is off.
    """
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    snapshot = cache / "models--owner--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"num_attention_heads": 1}), encoding="utf-8")
    (snapshot / "tokenizer.json").write_text("{}", encoding="utf-8")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    model_files._answer_of_hub.cache_clear()
    return snapshot


def answering(monkeypatch: pytest.MonkeyPatch, sha: str) -> list[str | None]:
    """The Hub says that any name stands for ``sha``. Returns the revisions that it is asked for."""
    asked: list[str | None] = []

    def model_info(
        self: object, path: str, *, revision: str | None, timeout: float
    ) -> SimpleNamespace:
        asked.append(revision)
        return SimpleNamespace(sha=sha)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    return asked


def weights(folder: Path, name: str = "model.safetensors", **sizes: tuple[int, ...]) -> None:
    save_file({key: np.zeros(size, np.float32) for key, size in sizes.items()}, folder / name)


def test_a_folder_is_itself(tmp_path: Path) -> None:
    found = resolve(str(tmp_path), weights=True)
    assert (found.folder, found.commit) == (tmp_path, None)
    with pytest.raises(
        ConfigError, match=r"model\.revision: main: .* is a folder, which has no revisions"
    ):
        resolve(str(tmp_path), "main")


def test_a_folders_identity_changes_with_any_file(tmp_path: Path) -> None:
    found = []
    for name, content in (
        ("config.json", "{}"),
        ("config.json", "{ }"),
        ("a.jinja", "x"),
        ("model.safetensors", "w"),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        found.append(resolve(str(tmp_path)).identity()["files"])
    assert len(set(found)) == 4
    assert resolve(str(tmp_path)).identity() == {"files": found[-1]}


def test_without_a_network_the_cached_commit_is_taken(hub: Path) -> None:
    weights(hub, a=(2, 3))
    assert resolve(NAME, weights=True).folder == hub
    assert resolve(NAME, "main").commit == COMMIT
    assert resolve(NAME, COMMIT, weights=True).identity() == {"commit": COMMIT}
    assert ModelSource(NAME).shape.parameters == 6


def test_a_snapshot_lacks_what_its_index_names(hub: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (hub / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    weights(hub, "one.safetensors", a=(2,))
    assert resolve(NAME).folder == hub, "its configuration is there"
    with pytest.raises(
        ConfigError,
        match=r"the cache does not have all of it, and the Hub cannot be asked: ConnectError",
    ):
        resolve(NAME, weights=True)
    key = "reward.source.with.embedder.with.model"
    with pytest.raises(
        ConfigError,
        match=(
            rf"^{key}: {NAME} is not a folder .*hf download {NAME} --local-dir FOLDER, then"
            rf" {key}=FOLDER$"
        ),
    ):
        resolve(NAME, weights=True, key=key)
    weights(hub, "two.safetensors", b=(3,))
    assert resolve(NAME, weights=True).folder == hub
    assert ModelSource(NAME).shape.parameters == 5


def test_weights_that_are_there_a_second_time_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    weights(tmp_path, "consolidated.safetensors", b=(9,))
    weights(tmp_path, a=(2,))
    assert ModelSource(str(tmp_path)).shape.parameters == 2
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    weights(tmp_path, "model-1-of-2.safetensors", a=(2,))
    assert not resolve(str(tmp_path)).whole
    weights(tmp_path, "model-2-of-2.safetensors", b=(3,))
    assert ModelSource(str(tmp_path)).shape.parameters == 5


def test_the_identity_does_not_change_with_a_download(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, COMMIT)
    before = resolve(NAME).identity()
    weights(hub, a=(1,))
    assert resolve(NAME, weights=True).identity() == before


def test_a_run_goes_on_with_the_commit_that_it_began_with(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its identity is the same before and after the weights are there, and when main has moved
    since.
    """
    (hub / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text("", encoding="utf-8")
    values = settings(tmp_path, tmp_path)
    values["model"] = {"path": NAME}
    values["data"]["train"] = str(tmp_path / "rows.jsonl")
    prepared = prepare(RunConfig.model_validate(values))
    began = prepared.begun(tmp_path)
    before = began.identity
    assert (began.config.model.revision, before["weights"]) == (COMMIT, f"commit {COMMIT}")
    weights(hub, a=(1,))
    asked = answering(monkeypatch, OTHER)
    about = {"config": began.config.model_dump(mode="json", by_alias=True)}
    prepared = prepare(RunConfig.model_validate(values))
    again = prepared.begun(tmp_path, SimpleNamespace(about=about))  # type: ignore[arg-type]
    assert (again.identity, asked) == (before, [])


def test_another_commit_than_the_cached_one_is_downloaded(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights(hub, a=(1,))
    asked, real = answering(monkeypatch, OTHER), []
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    def download(path: str, **options: object) -> str:
        if options.get("local_files_only"):
            raise FileNotFoundError
        real.append((options["revision"], sorted(options["allow_patterns"])))  # type: ignore[call-overload]
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve(NAME, "v2", weights=True).commit == OTHER
    assert resolve(NAME, "v2").commit == OTHER
    assert asked == ["v2"], "once per process"
    texts = (OTHER, sorted(model_files.TEXTS))
    assert real == [
        texts,
        (OTHER, ["one.safetensors", "two.safetensors"]),
        texts,
    ], "only what the index names"


def test_a_snapshot_with_a_configuration_alone_is_completed(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="the cache does not have it"):
        resolve(NAME, "main")
    real = []

    def download(path: str, **options: object) -> str:
        real.append(options.get("allow_patterns"))
        return str(hub)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve(NAME, COMMIT).folder == hub
    assert "*.json" in str(real[-1])


def test_nobody_else_asks_the_hub_for_a_model() -> None:
    """Every place that needs a model's files has them from ``resolve``; ``ModelSource`` asks for
    headers of a commit.
    """
    asks = re.compile(r"\b(snapshot_download|hf_hub_download|HfApi|get_safetensors_metadata)\b")
    packages = ("rayloop", "judge", "recipes", "actors", "cluster", "serve_apps")
    found = {
        file.relative_to(ROOT).as_posix()
        for package in packages
        for file in (ROOT / package).rglob("*.py")
        if asks.search(file.read_text(encoding="utf-8"))
    }
    assert found == {
        "rayloop/core/model_files.py",
        "rayloop/engines/shape.py",
        "rayloop/data/published/source.py",
    }


def test_a_hub_that_does_not_answer_costs_three_seconds_once(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        monkeypatch.setattr(model_files, "HUB_TIMEOUT_S", 0.2)
        began = time.monotonic()
        with pytest.raises(ConfigError, match="the Hub cannot be asked"):
            resolve("owner/other")
        with pytest.raises(ConfigError, match="hf download owner/other --local-dir FOLDER"):
            resolve("owner/other")
        assert resolve(NAME).folder == hub
        assert 0.2 <= time.monotonic() - began < 3


@pytest.mark.parametrize("path", ["no/such/folder", "name", "/tmp/nothing-here"])
def test_what_is_neither_a_folder_nor_a_name_is_refused(hub: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="is neither a folder here nor a name on the Hub"):
        resolve(path)


def test_a_name_below_a_folder_that_exists_is_a_mistyped_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    with pytest.raises(ConfigError, match="models/mine is neither a folder here"):
        resolve("models/mine")


@pytest.mark.parametrize("folder", ["", "/site-packages/rayloop/"])
def test_a_recipe_s_model_that_is_not_installed_is_named_with_its_maker(folder: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(f"{folder}recipes/nothing/tiny")
    assert "a checkout of rayloop has this one" in str(refused.value)
    assert "`python -m tools.makers nothing` makes it there" in str(refused.value)
    assert "sft" not in str(refused.value)


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b'{"a": 3}', b'{"a": {"dtype": "F32"}}', b'{"a": {"shape": 3}}']
)
def test_a_header_of_another_form_is_a_configuration_error(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a safetensors file"):
        model_files.header(file)
