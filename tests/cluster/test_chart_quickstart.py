"""Three steps of Chart-RVR's quickstart with the real parts: generated charts, the shipped model,
the seven rewards, controls.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rayloop.recipes.chart_rvr.prepare import main
from rayloop.recipes.chart_rvr.rewards.reading import SEVEN
from tests.support.runs import ROOT, ledger_closes, run

pytestmark = [pytest.mark.slow_faults, pytest.mark.timeout(300)]


def test_three_steps_of_the_quickstart(tmp_path: Path) -> None:
    assert (
        main(["--out", str(tmp_path / "rows"), "--train", "40", "--val", "12", "--test", "0"]) == 0
    )
    config = yaml.safe_load(
        (ROOT / "recipes/chart_rvr/quickstart.yaml").read_text(encoding="utf-8")
    )
    config |= {"output": str(tmp_path), "name": "run", "steps": 3, "checkpoint": {"every": 3}}
    config["data"] |= {
        name: str(tmp_path / f"rows/{split}.jsonl")
        for name, split in (("train", "train"), ("eval", "val"))
    }
    config["algorithm"] = {"group_size": 4, "groups_per_step": 4}
    config["evaluation"] |= {"every": 3, "samples": 1}
    with run(config) as made:
        made.ends(0, deadline=240)
    assert [record["step"] for record in made.metrics] == [1, 2, 3]
    for record in made.metrics:
        assert 5.0 < record["reward/mean"] <= 10.75
        assert all(record[f"reward/component/{name}/mean"] >= 0 for name in SEVEN)
        assert record["reward/component/format/mean"] > 1.0, "the shipped model knows the form"
    assert made.named("logprob_check")[0]["mean"] < 1e-3
    ledger_closes(made.named("finished")[0]["ledger"])
    first, last = (
        [
            json.loads(line)
            for line in (
                (made.folder / f"evaluations/step_00000{step}.jsonl")
                .read_text(encoding="utf-8")
                .splitlines()
            )
        ]
        for step in (0, 3)
    )
    for items in (first, last):
        assert {item["arm"] for item in items} == {
            "right",
            "same source",
            "other source",
            "blind",
            "sampled",
        }
        assert all(item["reward"] is not None for item in items)
