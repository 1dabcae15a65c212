"""``python -m benchmarks.evidence NAME``: what a run's folder becomes, which runs are taken as they
are, and the tables.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence import __main__ as driver
from benchmarks.evidence import runs
from benchmarks.evidence.experiments import EXPERIMENTS, SUPERVISED, HeldOutRows
from benchmarks.evidence.tables import markdown
from rayloop.config.settings import check_components, load
from rayloop.measure.protocol import read
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder

ROOT = Path(__file__).parents[3]
RECORDS = sorted((ROOT / "benchmarks" / "evidence").glob("*.json"))
PROTOCOLS = sorted((ROOT / "benchmarks" / "evidence" / "protocols").glob("*.json"))
BYTES = 400_000
"""The size of all records together."""
TASKS = 10


def answers(step: int, score: str, rise: float) -> list[dict[str, Any]]:
    """Ten tasks of two sources, greedy and sampled, whose score rises."""
    return [
        {
            "arm": arm,
            "task": f"t{task}",
            "source": f"page{task % 2}",
            "reward": task / 20 + rise * step,
            "components": {score: task / 20 + rise * step},
        }
        for arm in ("right", "sampled")
        for task in range(TASKS)
    ]


def lines(file: Path, records: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands that were run instead of ``python -m rayloop``; each writes what a run of two steps
    leaves.
    """
    commands: list[str] = []

    def timed(*arguments: object) -> dict[str, Any]:
        words = list(map(str, arguments))
        commands.append(" ".join(words))
        given = dict(word.split("=", 1) for word in words if "=" in word)
        score = "success" if "arpo" in words[1] else "reward"
        folder = Path(given["output"]) / given["name"]
        rise = 0.1 if "algorithm.replay.kind=corrected" in words else 0.05
        lines(
            folder / "metrics.jsonl",
            [
                {
                    "step": step,
                    "time": 10.0 + step,
                    "timing_s/step": 1.0,
                    "rollout/tokens": 100,
                    "rollout/turns/mean": 1.0 + step / 2,
                    "actor/tokens": 90 + step,
                    "prompt_length/mean": 50.0,
                    "reward/mean": 0.5,
                }
                for step in (1, 2)
            ],
        )
        lines(
            folder / "events.jsonl",
            [
                {"event": "start", "time": 1.0},
                {"event": "finished", "time": 20.0, "ledger": {"issued": 4}},
            ],
        )
        for step in (0, 2):
            lines(folder / "evaluations" / f"step_{step:06d}.jsonl", answers(step, score, rise))
        return {"wall_s": 100.0, "cpu_s": 50}

    monkeypatch.setattr(runs, "timed", timed)
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs")
    monkeypatch.chdir(ROOT)
    return commands


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_a_configuration_that_is_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "reasoning":
        pytest.importorskip(
            "reasoning_gym",
            reason="make test-adapters installs it, and trains with this configuration",
        )
    monkeypatch.chdir(ROOT)
    experiment = EXPERIMENTS[name]
    for overrides in experiment.arms.values():
        config = load(experiment.config, [*experiment.common, *overrides], RunConfig)
        check_components(config)
        assert config.evaluation.every or config.data.eval is None
    assert all(Path(rows.path).is_file() for rows in experiment.sets.values())
    assert experiment.supervised is None or experiment.supervised.is_file()
    assert SUPERVISED not in experiment.arms


@pytest.mark.parametrize("file", PROTOCOLS, ids=lambda file: file.stem)
def test_a_published_number_is_measured_as_its_experiment_says(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    experiment = EXPERIMENTS[file.stem]
    published = read(file)
    then = RunConfig.model_validate(published.measured.config)
    # The variants' corrected arms are the quickstarts, which have files of their own.
    source = experiment.files.get("original", experiment.config)
    now = load(source, list(experiment.common), RunConfig)
    assert then.seed == now.seed
    assert then.model == now.model
    assert then.data.reader == now.data.reader
    assert then.environment.episode == now.environment.episode
    assert then.environment.history == now.environment.history
    assert then.rollout.sampling == now.rollout.sampling
    assert then.reward == now.reward
    rows = experiment.sets.get("test", HeldOutRows(now.data.eval or "", now.evaluation.samples))
    assert published.measured.data == rows.path
    assert published.measured.samples == rows.samples
    tasks = {answer.task for answer in published.number.answers}
    assert len(published.number.answers) == len(tasks) * (1 + rows.samples)
    assert len(tasks) == published.protocol["tasks"]["count"]


def test_a_promise_is_checked_and_a_run_of_the_same_configuration_is_taken_as_it_is(
    played: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["quickstart", "--out", str(tmp_path / "found.json"), "--note", "alone"]
    assert driver.main(asked) == 0
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert list(found["runs"]) == ["0", "1", "2"]
    run = found["runs"]["0"]["as shipped"]
    assert (
        run["note"],
        run["steps"],
        run["wall_s"],
        run["median_step_s"],
        run["first_step_s"],
    ) == ("alone", 2, 100.0, 1.0, 10.0)
    assert run["gain"]["sampled"]["reward"] == [0.1, 0.1, 0.1]
    assert run["held_out"]["2"]["tokens"] == 200
    assert (run["trained_tokens"], run["turns"], run["prompt_tokens"]) == (183, 1.75, 50)
    assert (
        "| 0 | as shipped | 100.0 | 50 | 2 | 200 | 0.225 -> 0.325 (+0.100 [+0.100, +0.100]) |"
        in capsys.readouterr().out
    )
    assert len(played) == 3
    assert all("checkpoint.resume=never" in command for command in played)

    shutil.rmtree(tmp_path / "runs" / "quickstart" / "as_shipped-1")
    assert driver.main([*asked, "policy.optimizer.lr=1e-5", "--only", "0"]) == 0
    assert len(played) == 4, "another configuration is another run"
    assert driver.main([*asked, "--only", "1"]) == 0
    assert len(played) == 5, "its folder is gone"
    assert driver.main([*asked, "--only", "1"]) == 0
    assert len(played) == 5


def test_a_run_that_gains_too_little_or_takes_too_long_is_named(
    played: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole: Callable[..., dict[str, Any]] = runs.timed
    monkeypatch.setattr(runs, "timed", lambda *words: whole(*words) | {"wall_s": 241.0})
    assert driver.main(["quickstart", "--only", "0", "--out", str(tmp_path / "found.json")]) == 1
    assert "not as promised" in capsys.readouterr().out


def test_arms_are_compared_task_by_task_with_the_first(
    played: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        driver.main(["ablation_replay", "--only", "3", "--out", str(tmp_path / "found.json")]) == 0
    )
    compared = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["compared"]["3"]
    assert compared.keys() == {"with replay"}
    assert compared["with replay"]["steps"] == [2, 2]
    assert compared["with replay"]["greedy"]["success"] == [0.1, 0.1, 0.1]
    assert "| with replay |" in capsys.readouterr().out


def test_seeds_are_pooled_task_by_task(tmp_path: Path) -> None:
    rises = {("0", "full"): 0.1, ("1", "full"): 0.3, ("0", "last_images 1"): 0.5}
    found: dict[str, dict[str, Any]] = {"0": {}, "1": {}}
    for (seed, arm), rise in rises.items():
        folder = tmp_path / f"{arm}-{seed}"
        for step in (0, 1):
            file = folder / "evaluations" / f"step_{step:06d}.jsonl"
            lines(file, answers(step, "success", rise))
        found[seed][arm] = {"folder": str(folder), "held_out": {"0": {}, "1": {}}}

    pooled = runs.pooled(EXPERIMENTS["histories"], found)

    assert pooled["full"].keys() == {"gain"}
    assert pooled["full"]["gain"]["sampled"]["success"] == [0.2, 0.2, 0.2]
    other = pooled["last_images 1"]
    assert other["gain"]["greedy"]["success"] == [0.5, 0.5, 0.5]
    assert other["difference"]["greedy"]["success"] == [0.3, 0.3, 0.3]
    table = markdown(EXPERIMENTS["ablation_replay"], {"runs": {}, "compared": {}, "pooled": pooled})
    assert "| last_images 1 | difference | +0.300 [+0.300, +0.300] |" in "\n".join(table)


def test_between_its_ends_a_run_keeps_what_its_picture_draws(tmp_path: Path) -> None:
    metrics = {"time": 2.0, "timing_s/step": 1.0, "rollout/tokens": 100, "actor/entropy": 1.0}
    drawn = {"reward/mean": 0.5, "reward/component/accuracy/mean": 0.25}
    lines(tmp_path / "metrics.jsonl", [{"step": step, **metrics, **drawn} for step in (1, 2)])
    begin = {"event": "start", "time": 1.0}
    end = {"event": "finished", "time": 20.0, "ledger": {"issued": 4}}
    lines(tmp_path / "events.jsonl", [begin, end])
    for step in range(3):
        played = answers(step, "accuracy", 0.1)
        for answer in played:
            answer["components"]["table"] = 0.0
        lines(tmp_path / "evaluations" / f"step_{step:06d}.jsonl", played)

    run = runs.recorded(EXPERIMENTS["variants_chart_rvr"], RunFolder.at(tmp_path))

    assert run["training"] == {
        "reward/mean": [0.5, 0.5],
        "reward/component/accuracy/mean": [0.25, 0.25],
    }
    first, between, last = run["held_out"].values()
    assert between.keys() == {"tokens", "arms"}
    assert between["arms"]["sampled"].keys() == {"accuracy", "reward"}
    assert first["arms"]["sampled"].keys() == last["arms"]["sampled"].keys()
    assert last["arms"]["sampled"].keys() == {"accuracy", "reward", "table"}
    assert "sources" not in last


def test_a_record_has_a_line_for_each_run(tmp_path: Path) -> None:
    record = {"experiment": "e", "start": {}, "runs": {"0": {"a": {"x": [1, 2]}, "b": {"x": []}}}}
    runs.write(tmp_path / "e.json", record)
    text = (tmp_path / "e.json").read_text(encoding="utf-8")
    assert json.loads(text) == record
    assert '"a":{"x":[1,2]},\n"b":{"x":[]}\n' in text


def test_the_records_are_small() -> None:
    assert sum(file.stat().st_size for file in RECORDS) < BYTES


def test_records_are_as_they_are_written_and_their_tables_can_be_made(tmp_path: Path) -> None:
    compared = []
    for file in RECORDS:
        record = json.loads(file.read_text(encoding="utf-8"))
        if "experiment" not in record:
            continue  # of a simulation
        experiment = EXPERIMENTS[file.stem]
        runs.write(tmp_path / file.name, record)
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
        assert markdown(experiment, record)
        for by_arm in record["runs"].values():
            for run in by_arm.values():
                assert [*run["training"]] == [*experiment.curves.values()]
        compared.append(file.stem)
    assert len(compared) >= 8
