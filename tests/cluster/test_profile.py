"""``profile.steps``: torch's profile of each role, and the timeline of all actors, of a real run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.deadlines import WAITS, Span
from rayloop.run.records.timeline import chrome
from tests.support.runs import finished, settings


def opened(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return found


def by_actor(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"]]].append(event)
    return found


@pytest.mark.timeout(300)
@pytest.mark.slow_faults
def test_a_profiled_step_has_what_each_role_computed_and_when(
    tmp_path: Path, digits_model: Path
) -> None:
    changes: dict[str, Any] = {
        "profile__steps": [2],
        "policy__loss": {"kl_coef": 0.1},
        "reward__actors": 1,
    }
    made = finished(settings(tmp_path, digits_model, steps=3, **changes))
    assert made.named("warning") == []
    folder = made.folder / "profile"
    assert [path.name for path in folder.iterdir()] == ["step_000002"]
    files = {path.name for path in (folder / "step_000002").iterdir()}
    assert files == {
        "policy-0.json.gz",
        "rollout-0.json.gz",
        "reference-0.json.gz",
        "timeline.json",
    }
    names = {
        name: {event["name"] for event in opened(folder / "step_000002" / name) if "name" in event}
        for name in files
    }
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names["policy-0.json.gz"]
    assert any("Backward" in name for name in names["policy-0.json.gz"])
    assert "aten::searchsorted" in names["rollout-0.json.gz"], "the engine samples"
    assert "aten::mm" in names["reference-0.json.gz"]
    actors = by_actor(opened(folder / "step_000002" / "timeline.json"))
    assert list(actors) == [
        "driver",
        "policy 0",
        "rollout 0",
        "environment 0",
        "reward 0",
        "reference 0",
    ]
    did = {
        actor: {event["name"].split()[0] for event in events} for actor, events in actors.items()
    }
    assert {"gen", "update_actor", "update_weights"} <= did["driver"]
    assert {"fetch", "train", "export"} <= did["policy 0"]
    assert {"generate", "load"} <= did["rollout 0"]
    assert {"reset", "step", "episodes"} <= did["environment 0"]
    assert "score" in did["reward 0"]
    assert "annotate" in did["reference 0"]
    step = [record for record in made.metrics if record["step"] == 2]
    [trained] = [event for event in actors["driver"] if event["name"] == "update_actor"]
    assert trained["dur"] / 1e6 == pytest.approx(step[0]["timing_s/update_actor"], abs=0.01)
    generated = [event for event in actors["rollout 0"] if event["name"].startswith("generate")]
    assert len(generated) == 8, "one turn of each of two groups of four"
    loaded = next(event for event in actors["rollout 0"] if event["name"] == "load")
    assert all(event["ts"] + event["dur"] <= trained["ts"] for event in generated), (
        "nothing is generated ahead"
    )
    assert trained["ts"] + trained["dur"] <= loaded["ts"]


def test_nothing_is_kept_when_no_step_is_profiled() -> None:
    assert WAITS.spans is None
    WAITS.did("train of policy rank 0", 0.0)
    assert WAITS.spans is None


def lanes(events: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    return ((event["name"], event["tid"]) for event in events)


def test_what_overlaps_lies_in_lanes() -> None:
    spans = [
        Span("rollout 10", "generate 0/1", 11.0, 14.0),
        Span("rollout 10", "generate 0/0", 10.0, 12.0),
        Span("rollout 10", "generate 0/2", 12.0, 13.0),
        Span("", "load of rollout 2", 9.0, 10.0),
        Span("", "episodes 1/0@0 to 1/3@0 of task t on environment 0", 9.0, 10.0),
        Span("", "train of policy rank 1", 9.0, 10.5),
        Span("", "payloads for the checkpoint", 9.0, 10.0),
    ]
    actors = by_actor(chrome(spans)["traceEvents"])
    assert list(actors) == ["driver", "policy 1", "rollout 2", "rollout 10", "environment 0"]
    assert list(lanes(actors["rollout 10"])) == [
        ("generate 0/0", 0),
        ("generate 0/1", 1),
        ("generate 0/2", 0),
    ]
    assert [event["name"] for event in actors["environment 0"]] == [
        "episodes 1/0@0 to 1/3@0 of task t"
    ]
    [train] = actors["policy 1"]
    assert (train["name"], train["ts"], train["dur"], train["cat"]) == (
        "train",
        9_000_000,
        1_500_000,
        "policy",
    )
