"""Alert rules and the dashboard of a run ask for metrics that are served, and promtool finds that
the rules do what they say.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import yaml

from rayloop.judge import transport as judge_metrics
from rayloop.run.records.metrics import METRICS

DEPLOY = Path(__file__).parents[3] / "deploy"
ALERTS = DEPLOY / "prometheus/alerts.yaml"
DCGM = {"DCGM_FI_DEV_XID_ERRORS"}
"""Of NVIDIA's dcgm-exporter, whose names are in its own documentation."""
LABELS = {"run", "role", "reason", "source", "instance", "ip"}
WORDS = {
    "sum",
    "max",
    "min",
    "by",
    "or",
    "and",
    "increase",
    "label_values",
    "policy",
    "driver",
    "h",
}


def served() -> set[str]:
    """Names at Prometheus: the run's and the judge's client's from their tables, Ray's from the
    file that registers them.
    """
    assert judge_metrics.BREAKER
    ours = {f"ray_{metric.prometheus}" for metric in METRICS}
    client = {metric.name for metric in prometheus_client.REGISTRY.collect()}
    return ours | client | DCGM | {f"ray_{name}" for name in _of_ray()}


def _of_ray() -> Iterator[str]:
    found = importlib.util.find_spec("ray.dashboard.modules.reporter.reporter_agent")
    assert found is not None
    assert found.origin is not None
    for node in ast.walk(ast.parse(Path(found.origin).read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "Gauge"
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def asked(query: str) -> set[str]:
    """The metric names in a query."""
    plain = re.sub(r"\"[^\"]*\"|\[\d+\w\]|(?<=by )\([^)]*\)|\$\w+", " ", query)
    plain = re.sub(r"\{[^}]*\}", " ", plain)
    return set(re.findall(r"[A-Za-z_]\w*", plain)) - LABELS - WORDS


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/run.json").read_text(encoding="utf-8"))
    return found


def test_every_alert_asks_for_what_is_served_and_says_what_to_do() -> None:
    assert len(rules()) >= 10
    for rule in rules():
        names = asked(rule["expr"])
        assert names, rule["alert"]
        assert names <= served(), rule["alert"]
        assert {"summary", "do"} <= rule["annotations"].keys()
        assert rule["labels"]["severity"] in ("page", "warn")


def test_every_panel_of_a_run_draws_what_is_served() -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert len(panels) >= 12
    for panel in panels:
        for target in panel["targets"]:
            names = asked(target["expr"])
            assert names, panel["title"]
            assert names <= served(), panel["title"]
    (run,) = (entry for entry in dashboard()["templating"]["list"] if entry["name"] == "run")
    assert asked(run["query"]) <= served()


def test_every_recovery_metric_is_drawn() -> None:
    drawn = set().union(
        *(asked(t["expr"]) for panel in dashboard()["panels"] for t in panel.get("targets", ()))
    )
    assert {f"ray_{m.prometheus}" for m in METRICS if m.name.startswith("recovery/")} <= drawn


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian: apt install prometheus)",
)
@pytest.mark.parametrize(
    "arguments", [["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]]
)
def test_promtool_accepts_the_rules_and_each_fires_when_it_should(arguments: list[str]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=ALERTS.parent, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_made_up_series_try_every_alert() -> None:
    """Quiet in the first test, firing in the second."""
    quiet, firing = yaml.safe_load(
        (ALERTS.parent / "alerts_test.yaml").read_text(encoding="utf-8")
    )["tests"]
    names = {rule["alert"] for rule in rules()}
    assert {entry["alertname"] for entry in quiet["alert_rule_test"]} == names
    samples = firing["promql_expr_test"][0]["exp_samples"]
    assert {sample["labels"].split('"')[1] for sample in samples} == names


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian: apt install prometheus)",
)
def test_promtool_reads_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    queries = [
        t["expr"].replace("$run", ".*")
        for panel in dashboard()["panels"]
        for t in panel.get("targets", ())
    ]
    recorded = [{"record": f"panel:q{n}", "expr": query} for n, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}), encoding="utf-8"
    )
    done = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "rules.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
