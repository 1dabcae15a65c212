"""Real runs on vLLM: text and images, against the same run with transformers, and with its
processes killed.
"""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.support.runs import ROOT, Run, eventually, ledger_closes, run, settings
from tests.support.vllm_processes import engine_cores, engine_workers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(480)]

EXTRA = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 8192}
VLLM = {"kind": "vllm", "dtype": "float32", "extra": EXTRA}
START, END = 240.0, 400.0
"""Seconds that a run may take to begin, and altogether: vLLM's processes import for half a minute
on two busy cores.
"""


def text(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    return settings(
        folder, model, rollout__engine=VLLM, weight_sync={"logprob_check": "self_test"}, **changes
    )


def pages(folder: Path, engine: dict[str, Any], steps: int) -> dict[str, Any]:
    """The quickstart with few, small groups; before the first step its greedy answers to 24
    held-out pages are kept.
    """
    config: dict[str, Any] = yaml.safe_load(
        (ROOT / "recipes/arc_vision/quickstart.yaml").read_text(encoding="utf-8")
    )
    return {
        **config,
        "name": engine["kind"],
        "output": str(folder),
        "steps": steps,
        "rollout": {**config["rollout"], "engine": engine},
        "algorithm": {"group_size": 4, "groups_per_step": 2},
        "evaluation": {"every": 3, "limit": 24},
        "weight_sync": {"logprob_check": "self_test"},
        "report": {},
    }


def finished(config: dict[str, Any]) -> Run:
    with run(config) as made:
        made.ends(0, deadline=END)
    return made


def healthy(made: Run, groups: set[str]) -> None:
    """Three steps, and engine and trainer agreed all along."""
    assert [record["step"] for record in made.metrics] == [1, 2, 3]
    [logprob_check] = made.named("logprob_check")
    assert logprob_check["mean"] < 1e-4
    tests = made.named("self_test")
    assert {test["group"] for test in tests} == groups
    assert all(test["follows"] < 1e-4 < 1e-3 < test["moved"] for test in tests), tests
    assert all(record["actor/logprob_mismatch_mean"] < 1e-4 for record in made.metrics)
    ledger_closes(made.named("finished")[0]["ledger"])


def answers(made: Run) -> list[tuple[Any, ...]]:
    """Before the first step: what was shown and answered, and what it earned."""
    lines = (made.folder / "evaluations/step_000000.jsonl").read_text(encoding="utf-8").splitlines()
    records = sorted((json.loads(line) for line in lines), key=lambda record: record["task"])
    return [
        (r["task"], [i["sha256"] for i in r["images"]], r["text"], r["reward"]) for r in records
    ]


def test_three_steps_on_text_with_engines_of_two_processes(
    tmp_path: Path, digits_model: Path
) -> None:
    """Every actor lives in a placement group, where vLLM by itself would start its workers through
    Ray. Both processes are members of the group in which weights are broadcast.
    """
    config = text(tmp_path, digits_model, recovery={"health_timeout": 1.0})
    config["weight_sync"]["transport"] = {"kind": "collective"}
    config["rollout"]["engine"] = VLLM | {"extra": EXTRA | {"tensor_parallel_size": 2}}
    made = finished(config)
    healthy(made, {"embedding", "language"})
    assert not made.named("broadcast_failed")
    assert 0 <= made.metrics[-1]["rollout/cache"] < 0.9
    assert all("rollout/in_flight_limit" not in record for record in made.metrics)


def test_three_steps_with_top_p_agree_with_the_trainer(tmp_path: Path, digits_model: Path) -> None:
    """Over all tokens the mismatch would be the logarithm of the kept probability."""
    config = text(
        tmp_path,
        digits_model,
        rollout__sampling={"max_tokens": 8, "top_p": 0.8},
        policy__loss={"kl_coef": 0.05},
    )
    made = finished(config)
    healthy(made, {"embedding", "language"})
    for record in made.metrics:
        names = (
            "logprob_mismatch_mean",
            "logprob_mismatch_max",
            "ratio_max",
            "effective_sample_size",
            "kl",
        )
        print(record["step"], {name: record[f"actor/{name}"] for name in names})
        assert record["actor/logprob_mismatch_max"] < 1e-4
        assert record["actor/ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert made.metrics[0]["actor/kl"] < 1e-8, "the reference is over the kept tokens too"


def test_three_steps_with_adapters_alone_agree_with_the_trainer(
    tmp_path: Path, digits_model: Path
) -> None:
    config = text(
        tmp_path, digits_model, policy__engine={"lora": {"rank": 8}}, policy__loss={"kl_coef": 0.05}
    )
    made = finished(config)
    healthy(made, {"adapters"})
    assert made.metrics[-1]["actor/kl"] > 0, "the adapters moved"


def test_three_steps_on_pages_whose_greedy_answers_are_those_of_transformers(
    tmp_path: Path,
) -> None:
    made = finished(pages(tmp_path, VLLM, 3))
    healthy(made, {"embedding", "language", "merger", "vision"})
    other = finished(pages(tmp_path, {"kind": "transformers", "threads": 1}, 1))
    assert len({text for _, _, text, _ in answers(made)}) > 12, "the policy answers what it sees"
    assert answers(made) == answers(other)


def vllm_metrics(made: Run) -> str:
    """One of vLLM's gauges at the metrics port of the run's node."""
    for file in made.temporary.rglob("metrics_export_port_*"):
        with suppress(httpx.TransportError, ValueError):
            page = httpx.get(
                f"http://127.0.0.1:{int(file.read_text(encoding='utf-8'))}/metrics", trust_env=False
            ).text
            return "".join(line for line in page.splitlines() if "num_requests_running" in line)
    return ""


def test_killed_engines_are_replaced_before_any_traffic_and_leave_nothing(
    tmp_path: Path, digits_model: Path
) -> None:
    """First vLLM's engine process alone, then the actor.

    No health check runs: the calls that fail must notice.
    """
    config = text(
        tmp_path, digits_model, steps=40, rollout__sampling={"max_tokens": 200, "min_tokens": 200}
    )
    with run(config) as made:
        for number in (1, 2):
            step = made.metrics[-1]["step"] if made.metrics else 0
            made.until(lambda: made.metrics and made.metrics[-1]["step"] > step, "a step", START)  # noqa: B023
            actor = made.actors("RolloutActor")[-1]
            made.until(
                lambda: "rollout-0" in vllm_metrics(made), "vLLM's metrics at Ray's port", 60
            )
            (core,), (worker,) = engine_cores(actor), engine_workers(actor)
            (core if number == 1 else actor).kill()
            made.until(
                lambda: len(made.named("worker_replaced", role="rollout")) == number,  # noqa: B023
                "a replacement",
                START,
            )
            eventually(lambda: not alive(actor, core, worker), "all of them are gone", 10)  # noqa: B023
        made.until(lambda: made.metrics[-1]["step"] > step + 1, "another step", START)
        made.process.send_signal(signal.SIGTERM)
        made.ends(75, deadline=END)
    assert len(made.named("worker_lost", role="rollout")) == 2
    assert all(record["actor/logprob_mismatch_mean"] < 1e-4 for record in made.metrics), (
        "each was on the current weights"
    )


def alive(*processes: psutil.Process) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
