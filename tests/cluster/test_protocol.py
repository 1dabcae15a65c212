"""``eval --protocol`` and ``--like``: a number is published with all that it depends on, and measured
again; what differs, what was edited and what cannot be read is said.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayloop.cli import main
from rayloop.cluster.stages import evaluate as stage
from rayloop.measure.controls import Item
from rayloop.measure.protocol import hash_of, read
from rayloop.run.held_out import AnswerRequest
from rayloop.run.preflight import Prepared
from rayloop.run.protocols import conditions as found
from rayloop.run.records.jsonl import JsonLines
from tests.support.runs import settings

Scores = Callable[[AnswerRequest, int], float]


@pytest.fixture
def config(tmp_path: Path, digits_model: Path) -> Path:
    file = tmp_path / "run.yaml"
    values = settings(tmp_path, digits_model, evaluation={"limit": 12, "samples": 2})
    values["data"]["eval"] = values["data"]["train"]
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


@pytest.fixture
def rewards(monkeypatch: pytest.MonkeyPatch) -> list[Scores]:
    """What answers score: the last function of the list says it."""
    functions: list[Scores] = [lambda answer, place: place / 10]

    def play(prepared: Prepared, out: Path, missing: list[AnswerRequest], *_: Any) -> str:
        items = JsonLines(out / "items.jsonl")
        for place, answer in enumerate(missing):
            reward = functions[-1](answer, place)
            item = Item(answer.arm, answer.task.id, "", answer.sample, reward=reward)
            items.append(asdict(item))
        items.close()
        return ""

    monkeypatch.setattr(stage, "_evaluate_on_ray", play)
    return functions


@pytest.fixture
def published(config: Path, rewards: list[Scores], tmp_path: Path) -> Path:
    file = tmp_path / "number.json"
    assert (
        main(["eval", str(config), "--out", str(tmp_path / "first"), "--protocol", str(file)]) == 0
    )
    return file


def again(file: Path, *options: str) -> int:
    return main(["eval", "--like", str(file), *options])


def test_a_number_is_measured_again_by_its_file_alone(
    published: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.unlink()
    name = read(published).hash
    assert again(published) == 0
    text = capsys.readouterr().out
    assert f"bootstrap over items), protocol {name}" in text
    assert "36 answers to play, 0 of them on record" in text
    assert f"compared with {published}, {name}, by the same protocol" in text
    assert "the same weights, paired by task:" in text
    assert "right reward: 0.550 -> 0.550, +0.000 [+0.000, +0.000], which holds 0; 12 tasks" in text
    assert "sampled reward: 2.350 -> 2.350" in text
    summaries = {
        json.loads(file.read_text())["protocol"] for file in tmp_path.rglob("summary.json")
    }
    assert summaries == {name}


def test_a_paired_difference_has_its_interval(
    published: Path, rewards: list[Scores], capsys: pytest.CaptureFixture[str]
) -> None:
    rewards.append(lambda answer, place: place / 10 + 0.2)
    assert again(published) == 0
    text = capsys.readouterr().out
    assert "right reward: 0.550 -> 0.750, +0.200 [+0.200, +0.200], which does not hold 0" in text


def test_the_parts_that_differ_are_named_and_no_others(
    published: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = found.version
    monkeypatch.setattr(found, "version", lambda name: "9.9" if name == "torch" else real(name))
    assert again(published, "rollout.sampling.temperature=0.5", "seed=3") == 0
    text = capsys.readouterr().out
    then = read(published)
    torch = then.protocol["packages"]["torch"]
    start = text.index(
        f"compared with {published}, {then.hash}, by another protocol. Parts that differ:"
    )
    assert text[start:].splitlines()[1:5] == [
        f"  packages.torch: {torch!r} -> '9.9'",
        "  settings.rollout.sampling.temperature: 1.0 -> 0.5",
        "  settings.seed: 0 -> 3",
        "the same weights, paired by task:",
    ]


def test_other_code_is_named_and_is_not_another_protocol(
    published: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = found.code()
    assert read(published).code == now
    changed = {**now, "commit": "c0ffee", "source": "5eed"}
    monkeypatch.setattr(stage, "code", lambda: changed)
    assert again(published) == 0
    text = capsys.readouterr().out
    assert "by the same protocol\n" in text
    assert f"\nthe code differs: {' '.join(now.values())} -> {' '.join(changed.values())}\n" in text
    # Another commit with the same source is the same code.
    monkeypatch.setattr(stage, "code", lambda: {**now, "commit": "c0ffee"})
    assert again(published) == 0
    assert "the code differs" not in capsys.readouterr().out


def test_answers_of_other_code_are_not_mixed_into_a_folder(
    published: Path,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["eval", str(config), "--out", str(tmp_path / "first")]
    assert main(command) == 0
    monkeypatch.setattr(stage, "code", lambda: {**found.code(), "source": "5eed"})
    assert main(command) == 2
    assert "first holds an evaluation with another code" in capsys.readouterr().err


def test_a_file_that_has_the_code_as_a_part_is_repeated(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads(published.read_text(encoding="utf-8"))
    name = record["hash"]
    code = record.pop("code")
    del code["commit"]
    record["schema"] = "rayloop-protocol/1"
    record["protocol"]["rayloop"] = {**code, "source": "5eed"}
    record["hash"] = hash_of(record["protocol"])
    del record["checksum"]
    record["checksum"] = hash_of(record)
    file = tmp_path / "older.json"
    file.write_text(json.dumps(record), encoding="utf-8")
    assert again(file) == 0
    text = capsys.readouterr().out
    assert f"compared with {file}, {name}, by the same protocol" in text
    assert f"the code differs: {code['version']} 5eed -> " in text


def test_a_file_that_is_there_must_have_the_same_protocol(
    published: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = published.read_bytes()
    command = ["eval", str(config), "--protocol", str(published)]
    assert main([*command, "--out", str(tmp_path / "second")]) == 0
    assert "by the same protocol" in capsys.readouterr().out
    assert main([*command, "--out", str(tmp_path / "third"), "seed=3"]) == 2
    error = capsys.readouterr().err
    assert "settings.seed was 0 and is 3" in error
    assert not (tmp_path / "third" / "items.jsonl").exists()
    assert published.read_bytes() == before


def test_rows_that_changed_are_refused_unless_they_are_named(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Path(read(published).measured.data)
    lines = rows.read_text(encoding="utf-8").splitlines(keepends=True)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(lines[:-1]), encoding="utf-8")
    assert again(published, "--data", str(other)) == 0
    assert "  tasks.rows: " in capsys.readouterr().out
    kept = rows.read_bytes()
    try:
        rows.write_text("".join(lines[:-1]), encoding="utf-8")
        assert again(published) == 2
    finally:
        rows.write_bytes(kept)
    assert "tasks.rows was" in capsys.readouterr().err


def test_an_incomplete_number_is_not_written(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def play(prepared: Prepared, out: Path, missing: list[AnswerRequest], *_: Any) -> str:
        items = JsonLines(out / "items.jsonl")
        items.append(asdict(Item(missing[0].arm, missing[0].task.id, "", reward=1.0)))
        items.close()
        return "t2: timeout"

    monkeypatch.setattr(stage, "_evaluate_on_ray", play)
    file = tmp_path / "number.json"
    assert main(["eval", str(config), "--out", str(tmp_path / "x"), "--protocol", str(file)]) == 1
    assert f"{file} is not written" in capsys.readouterr().out
    assert not file.exists()


def edited(record: dict[str, Any]) -> None:
    record["protocol"]["settings"]["seed"] = 1


def better(record: dict[str, Any]) -> None:
    [samples, *_] = record["number"]["answers"]["right"].values()
    samples[0][0] = 1.0


def with_new_hash(record: dict[str, Any]) -> None:
    edited(record)
    record["hash"] = hash_of(record["protocol"])


def of_another_schema(record: dict[str, Any]) -> None:
    record["schema"] = "rayloop-protocol/9"


def with_a_new_key(record: dict[str, Any]) -> None:
    record["more"] = 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edited, "was edited after it was written"),
        (better, "was edited after it was written"),
        (with_new_hash, "was edited after it was written"),
        (of_another_schema, "has the schema 'rayloop-protocol/9'"),
        (with_a_new_key, "is not a protocol's file: more"),
    ],
)
def test_a_changed_file_is_a_sentence(
    published: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], None],
    words: str,
) -> None:
    record = json.loads(published.read_text(encoding="utf-8"))
    change(record)
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(record), encoding="utf-8")
    out = tmp_path / "refused"
    assert again(file, "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize("text", ["", "[]", "not JSON", '{"schema": 1}'])
def test_another_file_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "number.json"
    file.write_text(text, encoding="utf-8")
    assert again(file) == 2
    assert again(tmp_path / "none.json") == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
