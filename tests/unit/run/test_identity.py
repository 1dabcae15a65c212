"""Which checkpoints a run may continue from: what does not fit is refused in one sentence, before
anything is touched.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from rayloop.cli import main
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.types import Task
from rayloop.recipes.digits.data import DigitRows
from rayloop.run.checkpoint import MARKER, Checkpoint, CheckpointStore
from rayloop.run.config import RunConfig
from rayloop.run.export import recorded
from rayloop.run.identity import about, changes, check
from rayloop.run.preflight import TEMPLATE_TIME, dated, prepare
from tests.support.runs import ROOT, set_key, settings

MODEL = ROOT / "recipes/arc_vision/tiny"


class Run:
    """A run folder whose newest checkpoint, of step 13, was made by this code; ``values`` are what
    its next start says.
    """

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        shutil.copytree(MODEL, self.model, ignore=shutil.ignore_patterns("*.safetensors"))
        (self.model / "model.safetensors").write_bytes(bytes(range(256)) * 8192)
        self.values = settings(folder, self.model, steps=20, policy__engine={"lora": {"rank": 8}})
        self.folder = folder / "run"
        self.store = CheckpointStore(self._made("checkpoints"), keep=2)
        self.store.next_lineage()
        asyncio.run(
            self.store.save(13, {"step": 13}, self._trainer, about(self.config, self.hashes, 24))
        )
        (self.folder / "config.yaml").write_text("steps: 20\n", encoding="utf-8")
        (self.folder / "events.jsonl").write_text("{}\n", encoding="utf-8")

    def _made(self, name: str) -> Path:
        (self.folder / name).mkdir(parents=True)
        return self.folder / name

    async def _trainer(self, folder: str) -> None:
        (Path(folder) / "weights.bin").write_bytes(b"trained")

    @property
    def config(self) -> RunConfig:
        return RunConfig.model_validate(self.values)

    @property
    def hashes(self) -> dict[str, str]:
        return prepare(self.config).identity

    @property
    def checkpoint(self) -> Checkpoint:
        found = self.store.find("auto")
        assert found is not None
        return found

    def start(self) -> int:
        path = self.folder.parent / "next.yaml"
        path.write_text(yaml.safe_dump(self.values), encoding="utf-8")
        return main(["train", str(path)])

    def contents(self) -> dict[str, bytes]:
        return {
            str(p.relative_to(self.folder)): p.read_bytes()
            for p in self.folder.rglob("*")
            if p.is_file()
        }


@pytest.fixture
def made(tmp_path: Path) -> Run:
    return Run(tmp_path)


def longer(name: str, text: str = "\n") -> Callable[[Run], None]:
    """The file with more at its end, which keeps its form."""

    def change(run: Run) -> None:
        with open(run.model / name, "a", encoding="utf-8") as file:
            file.write(text)

    return change


def setting(key: str, value: Any) -> Callable[[Run], None]:
    return lambda run: set_key(run.values, key, value)


def weights(run: Run) -> None:
    """Those of another training: of the same size, other throughout, though not in every byte."""
    path = run.model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[::1000] = bytes(len(content[::1000]))
    path.write_bytes(content)


def rows(run: Run) -> None:
    path = Path(run.values["data"]["train"])
    path.write_text(
        "".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8"
    )


class Fewer(DigitRows):
    """The same file, and one row that this reader does not take."""

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        if where.endswith(":3"):
            raise DataFailure(where, "not for this reader")
        return super().task(row, where, root)


def older(run: Run) -> None:
    """As checkpoints were before they had a schema."""
    marker = run.checkpoint.folder / MARKER
    old = json.loads(marker.read_text(encoding="utf-8"))
    marker.write_text(
        json.dumps({name: old[name] for name in ("step", "lineage", "files")}), encoding="utf-8"
    )


def schema(number: int) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        marker = run.checkpoint.folder / MARKER
        marker.write_text(
            json.dumps(
                {
                    **json.loads(marker.read_text(encoding="utf-8")),
                    "schema": number,
                    "own_crc32": None,
                }
            ),
            encoding="utf-8",
        )

    return change


CARRIED = "python -m rayloop export CHECKPOINT FOLDER, then model.path=FOLDER in a new run"


UNFIT = {
    "architecture": (
        longer("config.json"),
        ["model whose architecture differs from that of model.path", "Name that model"],
    ),
    "weights": (weights, ["model whose weights differ from those of model.path"]),
    "tokenizer": (longer("tokenizer.json"), ["model whose tokenizer differs"]),
    "template": (
        longer("chat_template.jinja", "{# other #}"),
        ["model whose chat template differs"],
    ),
    "processor": (longer("preprocessor_config.json"), ["model whose image processor differs"]),
    "pixels": (
        setting("model.max_pixels", 78400),
        ["model.max_pixels was 1003520 and is 78400. Set it back"],
    ),
    "rank": (
        setting("policy.engine.lora.rank", 4),
        ["policy.engine.lora.rank was 8 and is 4. Set it back"],
    ),
    "no lora": (setting("policy.engine.lora", None), ["policy.engine.lora"]),
    "frozen": (
        setting("policy.engine.train_vision", False),
        ["policy.engine.train_vision was None and is False"],
    ),
    "seed": (setting("seed", 5), ["seed was 0 and is 5"]),
    "order": (setting("data.order", "file"), ["data.order was None and is file"]),
    "rows": (rows, ["data.train had 24 usable rows and has 23", "Name the same rows"]),
    "reader": (
        setting("data.reader.use", "tests.unit.run.test_identity:Fewer"),
        ["data.train had 24 usable rows and has 23"],
    ),
    "older": (
        older,
        [
            "its schema is older than 1 and this version of rayloop reads 2 to 4",
            "version that began it",
            CARRIED,
        ],
    ),
    "pickled": (schema(1), ["its schema is 1 and this version of rayloop reads 2 to 4", CARRIED]),
    "newer": (
        schema(99),
        ["its schema is 99, of a newer version of rayloop; this one reads 2 to 4. Update rayloop"],
    ),
}


@pytest.mark.parametrize(("change", "says"), UNFIT.values(), ids=UNFIT)
def test_a_resume_that_does_not_fit_is_refused_and_touches_nothing(
    change: Callable[[Run], None], says: list[str], made: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    change(made)
    before = made.contents()
    assert made.start() == 2
    message = capsys.readouterr().err
    assert message.startswith(
        f"rayloop: ResumeRefused: {made.checkpoint.folder} cannot be continued: "
    )
    assert message.strip().endswith("or start afresh with another name=...")
    assert len(message.strip().splitlines()) == 1
    assert [part for part in says if part not in message] == []
    after = made.contents()
    assert after.pop("run.lock") == b"", "it was free again"
    assert after.pop("run.fence") == b"1", "how often it was held"
    assert after == before
    assert not ray.is_initialized()


def test_a_named_checkpoint_of_another_run_must_fit_too(
    made: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    made.values |= {
        "name": "other",
        "checkpoint": {"resume": str(made.checkpoint.folder)},
        "seed": 3,
    }
    assert made.start() == 2
    assert "seed was 0 and is 3" in capsys.readouterr().err


FINE = {
    "nothing": (lambda run: None, {}),
    "learning rate": (setting("policy.optimizer.lr", 1e-5), {"policy.optimizer.lr": (1e-3, 1e-5)}),
    "group size": (setting("algorithm.group_size", 8), {"algorithm.group_size": (4, 8)}),
    "ranks": (setting("policy.ranks", 2), {"policy.ranks": (1, 2)}),
    "a list": (
        setting("environment.episode.environment.with", {"marks": "m"}),
        {
            "environment.episode.environment.with": ({}, None),
            "environment.episode.environment.with.marks": (None, "m"),
        },
    ),
    "a kind of environment": (
        setting("environment.kinds", {"web": {"use": "a:B", "isolation": "process"}}),
        {
            "environment.kinds": ({}, None),
            "environment.kinds.web.use": (None, "a:B"),
            "environment.kinds.web.with": (None, {}),
            "environment.kinds.web.isolation": (None, "process"),
        },
    ),
    "how to resume": (setting("checkpoint.resume", "somewhere"), {}),
    "moved model": (
        lambda run: (
            run.model.rename(run.model.with_name("moved"))
            and set_key(run.values, "model.path", str(run.model.with_name("moved")))
        ),
        {"model.path": ("model", "moved")},
    ),
}


@pytest.mark.parametrize(("change", "reported"), FINE.values(), ids=FINE)
def test_what_may_change_is_reported_with_old_and_new(
    change: Callable[[Run], None], reported: dict[str, tuple[Any, Any]], made: Run
) -> None:
    change(made)
    check(made.checkpoint, made.config, made.hashes)
    found = changes(made.checkpoint, made.config, made.hashes)
    if "model.path" in found:
        found["model.path"] = tuple(Path(path).name for path in found["model.path"])  # type: ignore[assignment]
    assert found == reported


def test_a_checkpoint_with_keys_that_are_none_or_free_is_continued(made: Run) -> None:
    marker = made.checkpoint.folder / MARKER
    written = json.loads(marker.read_text(encoding="utf-8")) | {"own_crc32": None}
    set_key(written["config"], "policy.engine.lora.targets", ["q_proj"])
    set_key(written["config"], "policy.engine.lora.dropout", 0.1)
    set_key(written["config"], "policy.engine.lora.vision", False)
    set_key(written["config"], "policy.engine.freeze_vision", False)
    set_key(written["config"], "data.shuffle", True)
    set_key(written["config"], "alarms.least", 20)
    marker.write_text(json.dumps(written), encoding="utf-8")
    check(made.checkpoint, made.config, made.hashes)
    assert changes(made.checkpoint, made.config, made.hashes) == {
        "policy.engine.lora.targets": (["q_proj"], None),
        "policy.engine.lora.dropout": (0.1, 0.0),
        "policy.engine.lora.vision": (False, None),
        "alarms.least": (20, None),
    }


def test_edited_rows_of_the_same_number_are_reported(made: Run) -> None:
    path = Path(made.values["data"]["train"])
    path.write_text(path.read_text(encoding="utf-8").replace("[", "[0, "), encoding="utf-8")
    check(made.checkpoint, made.config, made.hashes)
    assert list(changes(made.checkpoint, made.config, made.hashes)) == ["content of data.train"]


def test_a_model_that_is_nowhere_has_no_identity(made: Run) -> None:
    made.values["model"]["path"] = "nobody/nothing"
    with pytest.raises(ConfigError):
        _ = prepare(made.config).identity


def test_a_run_folder_of_another_version_is_refused_with_key_and_file(made: Run) -> None:
    set_key(made.values, "policy.engine.freeze_vision", True)
    file = made.folder / "config.yaml"
    file.write_text(json.dumps(made.values, indent=1), encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        recorded(file)
    message = str(raised.value)
    assert f"{file}:" in message
    assert "policy.engine.freeze_vision: unknown key" in message
    assert f"Remove the unknown keys from {file}" in message


def test_a_date_in_the_prompts_is_that_of_the_runs_beginning(tmp_path: Path) -> None:
    """In its folder, for each start; in a checkpoint, for a run that begins from one; none where
    the template shows none.
    """
    run = Run(tmp_path / "a")
    assert dated(run.config.model, run.model, run.folder, {}) == run.config.model
    template = run.model / "chat_template.jinja"
    template.write_text(
        "{{ strftime_now('%d %b %Y') }}" + template.read_text(encoding="utf-8"), encoding="utf-8"
    )
    began = dated(run.config.model, run.model, run.folder, {}).chat_template_kwargs["strftime_now"]
    (run.folder / TEMPLATE_TIME).write_text("2026-01-31T23:59:00\n", encoding="utf-8")
    again = dated(run.config.model, run.model, run.folder, {})
    assert (began == "2026-01-31T23:59:00", again.chat_template_kwargs) == (
        False,
        {"strftime_now": "2026-01-31T23:59:00"},
    )
    then = {"chat_template_kwargs": {"strftime_now": "2025-12-24"}}
    other = tmp_path / "b"
    other.mkdir()
    assert dated(run.config.model, run.model, other, then).chat_template_kwargs == {
        "strftime_now": "2025-12-24"
    }
    assert (other / TEMPLATE_TIME).read_text(encoding="utf-8") == "2025-12-24\n"
    chosen = run.config.model.model_copy(
        update={"chat_template_kwargs": {"strftime_now": "2024-02-29"}}
    )
    assert dated(chosen, run.model, run.folder, {}) == chosen


def test_the_templates_variables_do_not_change_within_a_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.values["model"] = {
        **run.values["model"],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with pytest.raises(ConfigError, match=r"model\.chat_template_kwargs.* was .*Set it back"):
        check(run.checkpoint, run.config, run.hashes)


def test_a_checkpoint_without_variables_of_the_template_is_continued(tmp_path: Path) -> None:
    run = Run(tmp_path)
    dates = {"strftime_now": "2026-01-31"}
    run.values["model"] = {**run.values["model"], "chat_template_kwargs": dates}
    then = run.checkpoint
    then.about["config"]["model"].pop("chat_template_kwargs", None)
    check(then, run.config, run.hashes)
