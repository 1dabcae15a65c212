"""ScreenSpot-v2 and ScreenSpot-Pro: rows in the published layout become rows of the benchmark, with
a score for each cell.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rayloop import recipes
from rayloop.cluster.stages.evaluate import _more
from rayloop.config.settings import load
from rayloop.core.groups import Scored
from rayloop.core.protocols import ScoreContext
from rayloop.data.dataset import Dataset
from rayloop.data.published.prepare import prepare
from rayloop.data.published.source import ColumnMap
from rayloop.measure.controls import RIGHT, Item, summarise
from rayloop.measure.report import table
from rayloop.rewards.saved import EMPTY_TRAJECTORY
from rayloop.run.config import read
from tests.support.runs import ROOT


def evaluated(name: str, published: Path, out: Path) -> tuple[dict[str, Any], list[str]]:
    """Prepare, read, and score an answer for each row, right for the first of each two: its
    summary, and its lines.
    """
    written, left_out = prepare(load(recipes.datasets()[name], (), ColumnMap), published, out)
    assert (list(written), left_out) == (["test"], [])
    config = read(
        ROOT / "recipes/arc_vision/arc_vision.yaml",
        [f"data.eval={out}/test.jsonl"],
        [recipes.benchmarks()[name]],
    )
    tasks = list(Dataset(config.data.eval or "", config.data.reader.build(), True, print))
    source, items = config.reward.source.build(), []
    for index, task in enumerate(tasks):
        answer = task.ground_truth if index % 2 == 0 else (0.9, 0.9, 1.0, 1.0)
        scored = source.score(
            EMPTY_TRAJECTORY, task, ScoreContext(0, [f"<bbox>{list(answer)}</bbox>"])
        )
        assert isinstance(scored, Scored)
        items.append(
            Item(
                RIGHT,
                task.id,
                "",
                0,
                scored.value,
                dict(scored.components) | {"reward": scored.value},
            )
        )
    summary = {**summarise(items, 0), **_more(config.evaluation, tasks, items)}
    return summary, table(summary)


def test_v2_has_six_cells_and_their_average(tmp_path: Path) -> None:
    shots = tmp_path / "hub/screenspotv2_image"
    shots.mkdir(parents=True)
    Image.new("RGB", (200, 100)).save(shots / "s.png")
    kinds = {"mobile": "ios", "desktop": "macos", "web": "gitlab"}
    for platform, source in kinds.items():
        rows = [
            {
                "img_filename": "s.png",
                "bbox": [20, 10, 40, 30],
                "instruction": "go",
                "data_type": kind,
                "data_source": source,
            }
            for kind in ("text", "icon", *(["text"] if platform == "web" else []))
        ]
        (tmp_path / f"hub/screenspot_{platform}_v2.json").write_text(
            json.dumps(rows), encoding="utf-8"
        )
    summary, lines = evaluated("screenspot_v2", tmp_path / "hub", tmp_path / "out")
    cells = summary["by"]["platform+element"]
    assert set(cells) == {f"{platform} {kind}" for platform in kinds for kind in ("text", "icon")}
    means = [cells[cell]["click"][0] for cell in cells]
    assert summary["cells"]["platform+element"]["click"] == pytest.approx(sum(means) / 6)
    assert summary["arms"][RIGHT]["click"][0] == pytest.approx(4 / 7), (
        "over all rows, as newer tables have it"
    )
    assert lines[1] == "right  click 0.571 [too few items]"
    assert lines[2].startswith("other means, right: reward 0.")
    assert "  iou 0." in lines[2]
    assert lines[3] == "by platform+element, right image:"
    assert [line.split("  click ")[1] for line in lines[4:10]] == [
        f"{mean:.3f} [too few items]" for mean in means
    ]
    assert lines[10] == f"  mean of these 6  click {sum(means) / 6:.3f}"
    assert sum("iou" in line for line in lines) == 1, "the others are not in the tables"
    row = json.loads((tmp_path / "out/test.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert row["bbox"] == pytest.approx([0.1, 0.1, 0.3, 0.4])


def test_pro_has_a_cell_of_each_group_and_element(tmp_path: Path) -> None:
    (tmp_path / "hub/annotations").mkdir(parents=True)
    (tmp_path / "hub/images/blender_windows").mkdir(parents=True)
    Image.new("RGB", (400, 200)).save(tmp_path / "hub/images/blender_windows/s.png")
    for group in ("Creative", "CAD"):
        rows = [
            {
                "id": f"{group}_{kind}",
                "img_filename": "blender_windows/s.png",
                "bbox": [40, 20, 80, 60],
                "img_size": [400, 200],
                "instruction": "go",
                "instruction_cn": "x",
                "application": "blender",
                "platform": "windows",
                "ui_type": kind,
                "group": group,
            }
            for kind in ("text", "icon")
        ]
        (tmp_path / f"hub/annotations/{group}.json").write_text(json.dumps(rows), encoding="utf-8")
    summary, _ = evaluated("screenspot_pro", tmp_path / "hub", tmp_path / "out")
    assert set(summary["by"]["group+element"]) == {
        f"{group} {kind}" for group in ("Creative", "CAD") for kind in ("text", "icon")
    }
    assert summary["cells"]["group+element"]["click"] == pytest.approx(0.5)
