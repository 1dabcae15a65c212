"""What a run tells about itself: metrics, events, quarantined rows and sampled rollouts, in the run folder and to the console."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any

from cluster.loop.evaluation import metrics
from cluster.loop.loggers import Loggers, open_logger
from rayloop.config.settings import dump
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Group, Member, Scored
from rayloop.grpo.staleness import LengthRatio
from rayloop.measure.controls import Item, summarise
from rayloop.run.checkpoint import Checkpoint
from rayloop.run.config import RunConfig
from rayloop.run.folder import RolloutRecord, RunFolder
from rayloop.run.loggers import PrometheusSettings

if TYPE_CHECKING:
    from cluster.loop.production import Production


class Reporter:
    """Writes the run folder. ``updates`` is what the console polls: ("event", record) or ("step", metrics)."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
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
        self, step: int, report: Mapping[str, float], groups: Sequence[Group], production: Production,
        ledger: Mapping[str, int], timings: Mapping[str, float], playing: Mapping[str, float],
    ) -> dict[str, float]:  # fmt: skip
        """Write one record to metrics.jsonl, hand it to the other loggers, and forget what was collected for it."""
        self._step = step
        seconds = sum(timings.values())
        record = {
            "step": float(step),
            **production_metrics(production.finished, groups, self.config.algorithm.target),
            **self._length_ratio(production.finished, groups),
            **{name: float(count) for name, count in production.dropped.items()},
            **report,
            **self._evaluation,
            **{f"timing_s/{name}": value for name, value in timings.items()},
            "timing_s/step": seconds,
            "perf/trajectories_per_second": sum(len(g.members) for g in production.finished) / max(seconds, 1e-9),
            "rollout/acceptance": production.acceptance.value,
            **playing,
            **{f"ledger/{name}": float(count) for name, count in ledger.items()},
        }
        self.folder.metrics.append({**record, "step": step})
        self.loggers.log(step, record)
        self.updates.append(("step", record))
        self._evaluation = {}
        production.forget_step()
        return record

    def _length_ratio(self, finished: Sequence[Group], trained: Sequence[Group]) -> dict[str, float]:
        played, taken = (
            [m.summary.sampled_tokens for m in members if m.summary.length and not m.replayed]
            for members in ([m for g in finished for m in g.members], [m for g in trained for m in g.kept])
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


def production_metrics(finished: Sequence[Group], trained: Sequence[Group], target: int) -> dict[str, float]:
    """What the groups that ended since the last step were like, and how many of their trajectories the step took."""
    members = [m for g in finished for m in g.members]
    played = [m for m in members if m.summary.length]
    metrics: dict[str, float] = {
        "rollout/groups": float(len(finished)),
        "rollout/trajectories": float(len(members)),
        "rollout/trained": float(sum(len(g.kept) for g in trained)),
        "rollout/trained_share": sum(len(g.kept) for g in trained) / target,
        "rollout/replayed": float(sum(g.replay_of is not None for g in trained)),
        **_reward_metrics(members),
    }
    if played:
        summaries = [m.summary for m in played]
        metrics |= {
            "response_length/mean": mean(s.sampled_tokens for s in summaries),
            "response_length/max": float(max(s.sampled_tokens for s in summaries)),
            "response_length/clip_ratio": mean(float(s.cut) for s in summaries),
            "prompt_length/mean": mean(s.length - s.sampled_tokens for s in summaries),
            "rollout/tokens": float(sum(s.sampled_tokens for s in summaries)),
            "rollout/turns/mean": mean(s.turns for s in summaries),
            "rollout/seconds/mean": mean(s.seconds for s in summaries),
            "rollout/seconds/max": max(s.seconds for s in summaries),
        }
        ends = Counter(str(s.end_reason) for s in summaries)
        metrics |= {f"end_reason/{name}": count / len(summaries) for name, count in ends.items()}
    fates = Counter(f"{m.fate.state}/{m.fate.reason}" for m in members if m.fate is not None)
    return metrics | {name: float(count) for name, count in fates.items()}


def _reward_metrics(members: Sequence[Member]) -> dict[str, float]:
    """Over fresh scored members: the policy's performance, before any filter."""
    values: dict[str, list[float]] = defaultdict(list)
    for member in members:
        if isinstance(member.outcome, Scored) and not member.replayed:
            values["reward"].append(member.outcome.value)
            if member.summary.source:
                values[f"reward/{member.summary.source}"].append(member.outcome.value)
            for name, value in member.outcome.components.items():
                values[f"reward/component/{name}"].append(value)
            for flag in member.outcome.flags:
                values[f"flag/{flag}"].append(1.0)
    flags = {name: len(numbers) / len(values["reward"]) for name, numbers in values.items() if name.startswith("flag/")}
    means = {
        f"{name}/mean": mean(numbers) for name, numbers in values.items() if numbers and not name.startswith("flag/")
    }
    if not values["reward"]:
        return {}
    return means | flags | {
        "reward/std": pstdev(values["reward"]), "reward/min": min(values["reward"]), "reward/max": max(values["reward"])
    }  # fmt: skip
