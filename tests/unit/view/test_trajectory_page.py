"""The report: what the page of a run folder holds, that a browser shows it, and the pictures of a
finished run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rayloop.cli import main, parsed
from rayloop.core import events, incidents
from rayloop.measure.controls import CONTROLS
from rayloop.recipes.arc_vision.boxes import GroundingBoxes
from rayloop.run.folder import RunFolder
from rayloop.run.records.jsonl import encode
from rayloop.run.records.rollouts import RolloutRecord, RolloutTurn
from rayloop.view.charts import BOTTOM_EDGE, TOP_EDGE, charts, drawn
from rayloop.view.page import content, write_page
from rayloop.view.pictures import curves, draw_or_emit
from rayloop.view.reader import by_step, evenly, matching
from tests.support.pictures import picture

NASTY = (
    "</script><script>document.title = 'owned'</script><img src=x"
    " onerror=\"document.title='owned'\">"
)
TRUTH = [0.1, 0.2, 0.5, 0.6]
READER = GroundingBoxes()
CONFIG = """
steps: 3
keep_rollouts: 3
model: {path: some/model, position_tint: 0.3}
report: {boxes: {use: "rayloop.recipes.arc_vision.boxes:GroundingBoxes"}}
"""


ABOVE, LEVEL = [0.4, 0.3, 0.5], [0.0, 0.0, 0.0]
JUDGED = {
    name: {
        "items": 9,
        "reward": [0.1, 0.1, 0.1],
        "differences": dict.fromkeys(CONTROLS, found),
        "looks": found is ABOVE,
        "answers": 1,
        "commonest": 9,
        "change": None,
    }
    for name, found in (("color", LEVEL), ("dialog", ABOVE))
}


def answer(
    group: int, sample: int, text: str, reward: float, status: str = "kept"
) -> RolloutRecord:
    image = {"sha256": "aa" * 32, "width": 60, "height": 40, "file": f"images/{'aa' * 32}.png"}
    return RolloutRecord(
        group,
        sample,
        0,
        f"task-{group}",
        "pages",
        f"Where is it? {NASTY}",
        (image,),
        (RolloutTurn("assistant", text, True),),
        "done",
        reward,
        {"iou": reward},
        advantage=2 * reward - 1,
        status=status,
        replayed=sample == 1 and group == 2,
        versions=("1.0", "1.0"),
        truth=TRUTH,
        length=30,
        sampled_tokens=9,
    )


def item(task: str, text: str, reward: float) -> dict[str, Any]:
    image = {"sha256": "bb" * 32, "width": 60, "height": 40, "file": f"images/{'bb' * 32}.png"}
    return {
        "arm": "right",
        "task": task,
        "sample": 0,
        "reward": reward,
        "text": text,
        "truth": TRUTH,
        "images": [image],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    """A run of three steps with five groups, restored once: what the first lineage did after step 1
    is superseded.
    """
    with RunFolder(tmp_path, "run").acquired() as run:
        run.write_config(CONFIG)
        run.events.emit(events.Start("0123abcd", {"torch": "2.13"}))
        run.events.emit(events.Begin(1, None, 0, None), 0)
        for step, reward in ((0, 0.1), (2, 0.9)):
            bounds = {"val/reward/low": reward - 0.1, "val/reward/high": reward + 0.1}
            run.events.emit(
                events.Evaluated(
                    {"val/reward/mean": reward, **bounds, "val_sampled/reward/mean": 0.05}
                ),
                step,
            )
        run.events.emit(events.Begin(2, "step_000001", 0, None), 1)
        run.events.emit(incidents.WorkerLostEvent("rollout", 1, NASTY), 1)
        for step in (1, 2, 3):
            record = {
                "step": step,
                "reward/mean": 0.2 * step,
                "actor/loss": None if step == 2 else 0.1,
                "actor/kl": 0.01 * step,
                "actor/logprob_mismatch_k3": 1e-12 * step,
                "rollout/turns/mean": 1.0,
            }
            run.metrics.append(record)
        run.metrics.append({"step": 3, "filtered/all_wrong": 2.0})
        wrong = [answer(3, sample, NASTY, 0.0, "filtered: all_wrong") for sample in (0, 1)]
        first = [
            answer(g, s, "<bbox>[0.1,0.2,0.5,0.6]</bbox>", float(s)) for g in (1, 2) for s in (0, 1)
        ]
        rest = [answer(g, s, "<bbox>[0.3,0.3,0.6,0.7]</bbox>", 0.5) for g in (4, 5) for s in (0, 1)]
        run.rollouts.write(1, first, {"aa" * 32: picture(60, 40)})
        run.rollouts.write(2, wrong + rest, {})
        ending = {
            "val/reward/mean": 0.6,
            "val/reward/low": 0.5,
            "val/reward/high": 0.7,
            "val/pages/reward/mean": 0.6,
        }
        run.events.emit(events.Evaluated({**ending, "val_sampled/reward/mean": 0.45}), 3)
        arms = {"right": {"reward": [0.6, 0.5, 0.7]}, "blind": {"reward": [0.2, 0.1, 0.3]}}
        gain = {arm: {"reward": [0.4, 0.3, 0.5]} for arm in CONTROLS}
        run.events.emit(
            events.Controls(5, arms, {}, gain, looks=False, unscored=0, by_source=JUDGED), 3
        )
        pair = {"tasks": 12, "before": 0.05, "after": 0.45, "gain": [0.4, 0.3, 0.5]}
        run.events.emit(events.Gain(0, {"sampled": pair}), 3)
        run.events.emit(
            events.FinishedEvent({"issued": 10, "trained": 8, "filtered[all_wrong]": 2}), 3
        )
        yield run


@pytest.fixture
def evaluated(folder: RunFolder) -> RunFolder:
    """The same with the items of two evaluations."""
    folder.evaluations.keep({"bb" * 32: picture(60, 40, "blue")})
    answers = {0: NASTY, 3: "<bbox>[0.1,0.2,0.4,0.6]</bbox>"}
    for step, text in answers.items():
        rows = [item(f"held-out-{n}", text, 0.75 if step else 0.0) for n in range(12)]
        folder.evaluations.file(step).write_text(
            "".join(encode(row) + "\n" for row in rows), encoding="utf-8"
        )
    return folder


def said(folder: RunFolder, groups: int = 200) -> str:
    """The page's text, its markup taken away."""
    html = write_page(folder.path, None, groups).read_text(encoding="utf-8")
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_the_content_is_what_the_run_recorded(folder: RunFolder) -> None:
    data = content(folder, groups=200)
    about = said(folder)
    for fact in (
        "configuration 0123abcd",
        "steps 3 of 3",
        "end finished",
        "lineages 1 from the start model, 2 from step_000001",
    ):
        assert fact in about
    assert [event["event"] for event in data["incidents"]] == ["worker_lost"]
    assert data["ledger"]["trained"] == 8
    assert [e["step"] for e in data["evaluations"]] == [0, 3]
    assert data["constants"] == [("rollout/turns/mean", 1.0)]
    assert not [chart for chart in data["charts"] if chart["title"].startswith("Turns")], (
        "it says nothing that a line does not"
    )
    assert data["gains"] == [
        "held-out reward, sampled: 0.050 -> 0.450, gain 0.400 (95 % interval 0.300 to 0.500 over 12"
        " tasks)"
    ]
    assert data["verdict"].startswith("The policy looks on 1 of 2 sources")
    assert "Not shown to look: color" in data["verdict"]
    assert "color not shown to look 9 1 0.100 [0.100, 0.100]" in about


def test_the_charts_have_what_was_recorded(folder: RunFolder) -> None:
    found = charts(list(folder.metrics), by_step(folder.events, "evaluated"))
    lines = {line["name"]: line["points"] for chart in found for line in chart["lines"]}
    sampled, greedy = found[0]["lines"]
    assert (sampled["name"], greedy["name"]) == ("val_sampled/reward/mean", "val/reward/mean")
    assert (sampled["points"], sampled["start"], sampled["low"]) == (
        [(0, 0.05), (3, 0.45)],
        0.05,
        [],
    )
    assert (greedy["start"], greedy["low"], greedy["high"]) == (
        0.1,
        [(0, 0.0), (3, 0.5)],
        [(0, 0.2), (3, 0.7)],
    )
    titles = {line["name"]: chart["title"] for chart in found for line in chart["lines"]}
    assert titles["actor/kl"] == "KL to the reference (nats/token)"
    assert "KL" not in titles["actor/logprob_mismatch_k3"]
    assert lines["val/reward/mean"] == [(0, 0.1), (3, 0.6)]
    assert lines["actor/loss"] == [(1, 0.1), (2, None), (3, 0.1)]
    assert dict(lines["filtered/all_wrong"]) == {1: 0.0, 2: 0.0, 3: 2.0}


@pytest.mark.parametrize(
    "values",
    [
        (0.9999, 1.0001),
        (1e-12, 3e-12),
        (0.0, 0.7),
        (-0.2, 1234567.0),
        (5.0, 5.0),
        (1.0, 1.0 + 1e-15),
    ],
)
def test_the_labels_of_an_axis_differ_and_hold_the_values(values: tuple[float, float]) -> None:
    chart = drawn({"title": "", "lines": [{"name": "a", "points": list(enumerate(values))}]})
    labels = [text for _, text in chart["y"]]
    assert len(set(labels)) == len(labels) > 2
    assert max(map(len, labels)) <= 9, "there is no more room beside the axis"
    assert all(TOP_EDGE <= y <= BOTTOM_EDGE for _, y in chart["lines"][0]["path"])


def test_groups_carry_boxes_verdicts_and_each_image_once(folder: RunFolder) -> None:
    data = content(folder, groups=200)
    by_issue = {group["group"]: group for group in data["groups"]}
    assert list(by_issue) == [1, 2, 3, 4, 5]
    assert (by_issue[2]["verdicts"], by_issue[3]["verdicts"]) == (
        ["kept", "replayed"],
        ["filtered: all_wrong"],
    )
    assert by_issue[1]["true"] == ((0.1, 0.2, 0.5, 0.6),)
    assert (by_issue[1]["mean"], by_issue[1]["std"]) == (0.5, pytest.approx(0.5**0.5))
    assert by_issue[4]["members"][1]["boxes"] == ((0.3, 0.3, 0.6, 0.7),)
    assert by_issue[3]["members"][0]["boxes"] == ()
    (image,) = data["images"].values()
    assert (image["width"], image["height"]) == (60, 40)
    assert image["uri"].startswith("data:image/webp;base64,")


def test_the_page_says_what_the_groups_are(folder: RunFolder) -> None:
    assert "at most 3 groups of each step" in said(folder)
    assert "shows 2 of these 5, evenly spread" in said(folder, groups=2)
    assert "shows all 5 of them" in said(folder)
    folder.write_config("steps: 3\n")
    assert "some groups of each step" in said(folder)


def test_an_image_that_is_gone_is_reported(folder: RunFolder) -> None:
    for file in folder.rollouts.images.iterdir():
        file.unlink()
    (image,) = content(folder, groups=200)["images"].values()
    assert "cannot be read" in image["why"]


def test_a_run_without_boxes_or_an_end_has_a_page_too(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "run").acquired() as run:
        run.write_config("steps: 3\n")
    data = content(run, groups=10)
    assert (data["end"], data["groups"], data["charts"]) == (None, [], [])
    assert "end not on record: still running, or killed" in said(run)


def test_what_was_learned_comes_first(evaluated: RunFolder) -> None:
    html = write_page(evaluated.path, None, groups=200).read_text(encoding="utf-8")
    parts = (
        "gain 0.400",
        "The policy looks",
        "before and after: 4 tasks",
        "Held-out reward, sampled",
        "more charts",
        "Step 1, group 1",
        "0123abcd",
    )
    assert [html.index(part) for part in parts] == sorted(map(html.index, parts))
    before, after = content(evaluated, groups=0)["compared"][0]["members"]
    assert (before["sample"], before["reward"], after["sample"], after["reward"]) == (
        "step 0",
        0.0,
        "step 3",
        0.75,
    )


def test_the_command_writes_the_page_or_says_why_not(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(folder.path), "--out", str(out), "--groups", "2"]) == 0
    assert out.exists()
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["report", str(folder.path), "--groups", "-1"]) == 2
    assert main(["report", str(folder.path), "--out", str(tmp_path / "missing" / "page.html")]) == 2
    assert "page.html cannot be written: No such file" in capsys.readouterr().err


def test_groups_are_spread_evenly() -> None:
    assert evenly(range(10), 4) == [0, 2, 5, 7]
    assert evenly([1, 2], 4) == [1, 2]
    assert evenly([1, 2], 0) == []


def test_a_star_stands_for_a_name_without_slash() -> None:
    names = ["val/iou/mean", "val/pages/reward/mean", "val/reward/mean", "loss"]
    assert matching(names, ["loss", "val/*/mean"]) == ["loss", "val/iou/mean", "val/reward/mean"]


def test_what_a_restore_superseded_is_left_out(folder: RunFolder) -> None:
    assert [event["step"] for event in by_step(folder.events, "evaluated")] == [0, 3]


def test_a_run_that_goes_on_after_its_end_shows_its_newest_ledger(folder: RunFolder) -> None:
    folder.events.emit(events.Begin(3, "step_000003", 0, None), 3)
    folder.metrics.append({"step": 4, "ledger/issued": 14.0, "ledger/trained": 12.0})
    data = content(folder, groups=0)
    assert data["ledger"] == {"issued": 14, "trained": 12}
    assert data["end"] is None


def test_the_curves_show_both_kinds_of_answers_with_their_start_and_interval(
    folder: RunFolder,
) -> None:
    (axes,) = curves(folder).axes
    drawn = {str(line.get_label()): list(line.get_ydata()) for line in axes.lines}
    assert drawn["training (T=1)"] == [0.2, 0.4, pytest.approx(0.6)]
    assert drawn["held-out (T=1)"] == [0.05, 0.45]
    assert drawn["held-out (greedy)"] == [0.1, 0.6]
    assert [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [
        0.05,
        0.1,
    ], "the start values"
    assert len(axes.collections) == 1, "only greedy answers have bounds here"
    assert "gain 0.400 (95 % interval" in axes.get_title()


def test_a_drawing_that_fails_is_reported_and_fails_nothing(folder: RunFolder) -> None:
    emitted: list[str] = []
    draw_or_emit(folder, emitted.append)
    assert Image.open(folder.path / "curves.png").size[0] > 500
    written, *commands = emitted[0].splitlines()
    assert written == f"wrote {folder.path / 'curves.png'}"
    assert len(commands) == 3
    for command in commands:
        parsed(shlex.split(command.removeprefix("next:"), comments=True)[3:])
    folder.config.write_bytes(b"\xff")
    draw_or_emit(folder, emitted.append)
    assert emitted[1].startswith("curves.png could not be drawn: ConfigError: ")
    assert "config.yaml cannot be read" in emitted[1]
