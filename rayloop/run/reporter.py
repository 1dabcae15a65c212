"""What a run tells about itself: metrics, events, quarantined rows and sampled rollouts, in the run folder and to the console."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayloop.config.settings import dump
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Group
from rayloop.grpo.staleness import LengthRatio
from rayloop.loggers.settings import AnySettings, PrometheusSettings
from rayloop.loggers.threads import Logger, Loggers
from rayloop.measure.controls import Item, summarise
from rayloop.run.checkpoint import Checkpoint
from rayloop.run.config import RunConfig
from rayloop.run.folder import RolloutRecord, RunFolder
from rayloop.run.held_out import metrics
from rayloop.run.step_metrics import Collected, step_metrics

Open = Callable[[AnySettings, str, Mapping[str, Any], RunFolder], Logger]
"""Makes a logger, of the run's name and configuration."""


class Reporter:
    """Writes the run folder. ``updates`` is what the console polls: ("event", record) or ("step", metrics)."""

    def __init__(self, config: RunConfig, folder: Path, open_logger: Open) -> None:
        self.config = config
        self.folder = RunFolder.at(folder)
        self.updates: list[tuple[str, Any]] = []
        self._evaluation: dict[str, float] = {}
        self.best: dict[str, float] | None = None
        """The highest mean reward on the held-out tasks so far (``reward``), and its ``step``; it is saved with the run."""
        self._lengths = LengthRatio()
        self._step = 0
        shown = config.model_dump(mode="json", by_alias=True)
        self.loggers = Loggers(
            (PrometheusSettings(), *config.loggers),
            lambda chosen: open_logger(chosen, config.name, shown, self.folder),
            lambda kind, why: self.event("logger_failed", logger=kind, why=why),
        )

    def event(self, kind: str, **fields: Any) -> None:
        """Something that happened once, with the step during which it did."""
        record = {"event": kind, "step": self._step, **fields}
        self.folder.events.append(record)
        self.updates.append(("event", record))

    def bad_row(self, failure: DataFailure) -> None:
        record = {"path": failure.path, "reason": failure.reason}
        self.folder.quarantine.append(record)
        self.updates.append(("event", {"event": "quarantined", **record}))

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        """Which trajectories ``step`` trains on: {group: samples}. For the record only; the console shows the counts."""
        ids = {str(group.issue): [m.summary.id.sample for m in group.kept] for group in groups}
        self.folder.events.append({"event": "trained", "step": step, "groups": ids})

    def begin(self, step: int, lineage: int, checkpoint: Checkpoint | None) -> None:
        """A lineage begins at ``step``: what an earlier one recorded of later steps is moved aside.

        Only now, when the checkpoint has been restored, does this run's configuration replace the one in the folder.
        """
        self._step, self.best = step, checkpoint.about.get("best") if checkpoint else None
        moved = self.folder.truncate_after(step)
        self.folder.write_config(dump(self.config))
        restored = checkpoint.folder.name if checkpoint else None
        self.event("begin", lineage=lineage, restored=restored, superseded_records=moved, best=self.best)

    def evaluated(self, step: int, items: Sequence[Item], images: Mapping[str, bytes]) -> None:
        """Held-out answers: kept one by one; their means are an event at once, and part of the step's metrics."""
        self.folder.evaluations.write(step, items, images)
        summary = summarise(items, sum(item.reward is None for item in items))
        self._evaluation = metrics(items, summary["arms"])
        reward = self._evaluation.get("val/reward/mean")
        if reward is not None and (self.best is None or reward > self.best["reward"]):
            self.best = {"reward": reward, "step": step}
        if self.best is not None:
            self._evaluation |= {"val/best": self.best["reward"], "val/best_step": float(self.best["step"])}
        self.event("evaluated", step=step, **self._evaluation)
        if summary["differences"]:
            self.event("controls", step=step, **summary)

    def step(
        self, step: int, report: Mapping[str, float], collected: Collected, ledger: Mapping[str, int],
        timings: Mapping[str, float], playing: Mapping[str, float],
    ) -> dict[str, float]:  # fmt: skip
        """Write one record to metrics.jsonl, and hand it to the other loggers."""
        self._step = step
        seconds = sum(timings.values())
        record = {
            "step": float(step),
            **step_metrics(collected, self.config.algorithm.target),
            **self._length_ratio(collected),
            **report,
            **self._evaluation,
            **{f"timing_s/{name}": value for name, value in timings.items()},
            "timing_s/step": seconds,
            "perf/trajectories_per_second": sum(len(g.members) for g in collected.finished) / max(seconds, 1e-9),
            **playing,
            **{f"ledger/{name}": float(count) for name, count in ledger.items()},
        }
        self.folder.metrics.append({**record, "step": step})
        self.loggers.log(step, record)
        self.updates.append(("step", record))
        self._evaluation = {}
        return record

    def _length_ratio(self, collected: Collected) -> dict[str, float]:
        played, taken = (
            [m.summary.sampled_tokens for m in members if m.summary.length and not m.replayed]
            for members in (
                [m for g in collected.finished for m in g.members],
                [m for g in collected.groups for m in g.kept],
            )
        )
        self._lengths.observe(played, taken)
        return {} if self._lengths.value is None else {"rollout/trained_length_ratio": self._lengths.value}

    def rollouts(self, step: int, records: Sequence[RolloutRecord], images: Mapping[str, bytes]) -> None:
        self.folder.rollouts.write(step, records, images)

    def close(self, step: int, ledger: Mapping[str, int]) -> dict[str, Any]:
        """The run's last word."""
        self.event("finished", ledger=dict(ledger))
        self.folder.close()
        return {"steps": step, "ledger": dict(ledger)}
