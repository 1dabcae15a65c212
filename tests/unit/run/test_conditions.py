"""What a number depends on, as the protocol has it, and the model card of an exported checkpoint."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import rayloop
from rayloop.config.yaml_source import flat
from rayloop.core.events import Evaluated, Start
from rayloop.data.cursor import evenly
from rayloop.envs.browser.web import WebPage
from rayloop.judge import conditions as judged
from rayloop.judge.reward import JudgeReward
from rayloop.measure.protocol import differences, hash_of
from rayloop.run.checkpoint import Checkpoint
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder
from rayloop.run.preflight import prepare
from rayloop.run.protocols import conditions as found
from rayloop.run.protocols.conditions import conditions, held_out_protocol
from rayloop.run.protocols.model_card import write_card
from tests.support.runs import settings


def parts(values: dict[str, Any]) -> Any:
    config = RunConfig.model_validate(values)
    data = config.data.train
    tasks = evenly(list(config.data.rows(data, print)), 4)
    return conditions(prepare(config), data, tasks, samples=2)


def test_what_decides_answers_is_a_part_and_what_does_not_is_none(
    tmp_path: Path, text_folder: Path
) -> None:
    same = settings(tmp_path, text_folder)
    other = settings(
        tmp_path,
        text_folder,
        name="other",
        steps=9,
        policy={"optimizer": {"lr": 0.5}},
        checkpoint={"every": 3},
    )
    assert hash_of(parts(same)) == hash_of(parts(other))
    changed = settings(
        tmp_path,
        text_folder,
        seed=4,
        rollout__sampling={"temperature": 0.7},
        environment={"episode": {"max_turns": 2}},
    )
    assert set(differences(parts(same), parts(changed))) >= {
        "settings.seed",
        "settings.rollout.sampling.temperature",
        "settings.environment.episode.max_turns",
    }


def test_code_is_described_with_the_commit_of_its_own_repository_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    package = repository / "site-packages" / "rayloop"
    package.mkdir(parents=True)
    module = package / "__init__.py"
    module.write_text("")
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "Begin"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(rayloop, "__file__", str(module))
    monkeypatch.setattr(found, "version", lambda _: "7.1")

    # A repository that holds an installation is not the one of the code.
    installed = found.code.__wrapped__()
    assert installed == {"version": "7.1", "commit": "", "source": installed["source"]}

    (repository / ".git").rename(package.with_name(".git"))
    checkout = found.code.__wrapped__()
    assert re.fullmatch("[0-9a-f]{40}", checkout["commit"])
    assert checkout["source"] == installed["source"]
    module.write_text("CHANGED = True")
    assert found.code.__wrapped__()["source"] != installed["source"]


def test_another_model_folder_with_the_same_prompt_is_the_same_protocol(
    tmp_path: Path, text_folder: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(text_folder, copy)
    before = parts(settings(tmp_path, text_folder))
    assert differences(before, parts(settings(tmp_path, copy))) == {}
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert set(differences(before, parts(settings(tmp_path, copy)))) == {"prompt.chat template"}


def test_the_content_of_a_folder_counts_and_not_its_place(
    tmp_path: Path, text_folder: Path
) -> None:
    def with_pages(folder: Path) -> Any:
        page = {"use": "rayloop.envs.browser.web:WebPage", "with": {"folder": str(folder)}}
        return parts(
            settings(tmp_path, text_folder, environment={"episode": {"environment": page}})
        )

    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text("one")
    before = with_pages(tmp_path / "here")
    assert differences(before, with_pages(tmp_path / "there")) == {}
    (tmp_path / "there" / "index.html").write_text("two")
    [key] = differences(before, with_pages(tmp_path / "there"))
    assert key.endswith("folder")
    assert str(tmp_path) not in json.dumps(before)
    assert {"browser.version", "browser.fonts"} <= set(flat(before))


def test_a_browser_says_its_version(tmp_path: Path) -> None:
    program = tmp_path / "browser"
    program.write_text("#!/bin/sh\necho Browser 7.1\n")
    program.chmod(0o755)
    for name, version in ((str(program), "Browser 7.1"), ("no-such-browser", "unknown")):
        options = WebPage.Settings.model_validate({"browser": {"program": name}})
        assert WebPage.protocol_parts(options)["browser"]["version"] == version


def test_a_runs_own_numbers_have_the_protocol_of_eval(tmp_path: Path, text_folder: Path) -> None:
    values = settings(tmp_path, text_folder, evaluation={"every": 2, "samples": 2, "limit": 4})
    values["data"]["eval"] = values["data"]["train"]
    prepared = prepare(RunConfig.model_validate(values))
    assert held_out_protocol(prepared) == hash_of(parts(values))
    values["evaluation"]["every"] = 0
    assert held_out_protocol(prepare(RunConfig.model_validate(values))) == ""


def test_a_judge_is_named_with_its_rubric_and_its_own_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"with": {"path": str(tmp_path / "judge.json")}}
    options = JudgeReward.Settings.model_validate({"judge": {"discovery": where}})
    scores = [{"count": 9}, {"count": 80, "accuracy": 0.9, "kappa": 0.8, "attack_rate": 0.0}]
    report = {"fingerprint": "vllm-1", "scores": scores}
    (tmp_path / "judge_calibration.json").write_text(json.dumps(report))

    unreached = JudgeReward.protocol_parts(options)["judge"]
    assert unreached["fingerprint"] == "no judge answered"
    assert unreached["calibration"] == {}
    assert unreached["rubric"]

    async def answers(_: Any) -> str:
        return "vllm-1"

    monkeypatch.setattr(judged, "_fingerprint", answers)
    assert JudgeReward.protocol_parts(options)["judge"]["calibration"] == {
        "count": "80",
        "accuracy": "0.9",
        "kappa": "0.8",
        "attack_rate": "0",
    }


def test_the_card_of_an_exported_model_has_each_number_with_its_protocol(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "mine")
    run.path.mkdir()
    run.config.write_text("model: {path: base/model}")
    run.events.emit(Start("c", {}, "aaaa"))
    for step, mean in ((2, 0.25), (4, 0.5)):
        scores = {"val/reward/mean": mean, "val/reward/low": 0.1, "val/reward/high": 0.9}
        run.path.joinpath("events.jsonl").open("a").write(
            json.dumps({**Evaluated(scores).record(), "step": step, "time": 1.0}) + "\n"
        )
    checkpoint = Checkpoint(run.checkpoints / "step_000004", 4, 1)
    for name, model in (
        ("mine-eval", "x/mine-step_000004-1"),
        ("mine-old", "x/mine-step_000002-1"),
    ):
        (tmp_path / name).mkdir()
        results = {
            "model": model,
            "data": "val.jsonl",
            "protocol": "bbbb",
            "arms": {"sampled": {"iou": [0.75, None, None]}},
        }
        (tmp_path / name / "results.json").write_text(json.dumps(results))
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("the base model's")
    write_card(checkpoint, out)
    lines = (out / "README.md").read_text().splitlines()
    assert lines[0] == "# mine, step 4"
    assert "base/model" in lines[2]
    assert lines[6:] == [
        "|held-out rows of the run|greedy|reward|0.500 [0.100, 0.900]|aaaa|",
        "|val.jsonl|sampled|iou|0.750|bbbb|",
    ]
    assert (out / "README-of-the-base-model.md").read_text() == "the base model's"
