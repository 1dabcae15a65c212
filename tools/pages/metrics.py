"""``python -m tools.pages.metrics`` prints docs/metrics.md."""

from __future__ import annotations

from rayloop.run.records.metrics import METRICS

HEADER = """# Metrics

Made by `python -m tools.pages.metrics` from the table in `rayloop/run/records/metrics.yaml`;
do not edit. One record per step is in `metrics.jsonl` (see run_folder.md). `<...>` stands for any
text. A metric is absent when it does not apply.

While a run lives, Prometheus finds the newest value of each at the metrics port of the node with
the driver, under the name of the last column, to which Ray adds `ray_`:
`ray_rayloop_reward_mean{run="quickstart"}`. The label `run` is the run's name; a part `<...>` is a
label too, and empty where a metric of the same name does not have it. `prometheus.json` in the run
folder lists the ports for Prometheus' `file_sd_configs` while the run lives; of a cluster that
grows Ray's own list is complete (`prom_metrics_service_discovery.json` in the head's temporary
folder). A value that is not finite is left out. Those of `recovery/` are renewed every 3 seconds,
also when no step ends, and are in no record of a step; `python -m rayloop status RUN_DIR` shows the
same. Alert rules are in deploy/prometheus, a dashboard in deploy/grafana/run.json.

| name | unit | meaning | Prometheus |
|---|---|---|---|
"""


def reference() -> str:
    """docs/metrics.md."""
    return HEADER + "".join(
        f"| `{m.name}` | {m.unit} | {m.meaning.replace('|', chr(92) + '|')} |"
        f" `{m.prometheus}{_braces(m.labels)}` |\n"
        for m in METRICS
    )


def _braces(labels: tuple[str, ...]) -> str:
    return f"{{{', '.join(labels)}}}" if labels else ""


if __name__ == "__main__":
    print(reference(), end="")
