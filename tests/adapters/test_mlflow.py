"""docs/bring_your_own/metric.md: the logger of the page in the published MLflow."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rayloop.cluster.loop.loggers import open_logger
from rayloop.config.settings import Component
from rayloop.run.folder import RunFolder
from tests.support.runs import ROOT

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(120)]


def test_the_logger_of_the_page_keeps_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="make test-adapters installs mlflow-skinny")
    page = (ROOT / "docs/bring_your_own/metric.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python title=my_loggers.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_loggers.py").write_text(program, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "kept").as_uri())
    chosen = Component.model_validate({"use": "my_loggers:MLflow", "with": {"experiment": "mine"}})
    logger = open_logger(chosen, "named", {"steps": 2}, RunFolder.at(tmp_path / "run"))
    for step in (1, 2):
        logger.log(
            step,
            {"step": float(step), "reward/mean": 0.25 * step, "ledger/filtered[all_wrong]": 8.0},
        )
    logger.close()
    [run] = mlflow.search_runs(experiment_names=["mine"], output_format="list")
    assert (run.info.run_name, run.info.status) == ("named", "FINISHED")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5)]
    assert run.data.metrics["ledger/filtered/all_wrong"] == 8.0, json.dumps(run.data.metrics)
