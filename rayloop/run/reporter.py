"""The reports of a run: metrics, events, quarantined rows and sampled rollouts, in the run folder
and to the console.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayloop.config.settings import dump
from rayloop.core import events, incidents
from rayloop.core.events import Event
from rayloop.core.failures import DataFailure
from rayloop.core.groups import Group
from rayloop.core.types import TrajectoryId
from rayloop.grpo.staleness import LengthRatio
from rayloop.loggers.settings import AnySettings, PrometheusSettings
from rayloop.loggers.threads import Logger, Loggers
from rayloop.measure.controls import CONTROLS, Item, summarise
from rayloop.run.checkpoint import Checkpoint
from rayloop.run.config import RunConfig
from rayloop.run.folder import SHOWN, RolloutRecord, RunFolder
from rayloop.run.held_out import gain, metrics, read_items
from rayloop.run.records.step_metrics import Collected, step_metrics

Open = Callable[[AnySettings, str, Mapping[str, Any], RunFolder], Logger]


class Updates:
    """The newest ``KEPT`` reports for a console that polls: ("event", record), ("step", metrics) or
    ("samples", completions).
    """

    KEPT = 1000

    def __init__(self) -> None:
        self._newest: deque[tuple[str, dict[str, Any]]] = deque(maxlen=self.KEPT)
        self.total = 0

    def append(self, update: tuple[str, dict[str, Any]]) -> None:
        """Keep an update, in place of the oldest when full."""
        self._newest.append(update)
        self.total += 1

    def since(self, number: int) -> tuple[int, list[tuple[str, dict[str, Any]]]]:
        """How many there have been, and those from this number on, as far as they are held."""
        held = list(self._newest)
        return self.total, held[max(0, len(held) - (self.total - number)) :]

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return iter(self._newest)


class Reporter:
    """Writes the run folder. ``updates`` is what the console polls."""

    def __init__(self, config: RunConfig, folder: Path, open_logger: Open) -> None:
        self.config = config
        self.folder = RunFolder.at(folder)
        self.updates = Updates()

        self._evaluation: dict[str, float] = {}
        self.best: dict[str, float] | None = None
        """The highest mean reward on the held-out tasks so far (``reward``), and its ``step``; it
        is saved with the run.
        """
        self.worse: list[int] = []
        """The steps of the evaluations since then; saved with the run too.

        A resume repeats one, which counts once.
        """
        self.gaps: Mapping[TrajectoryId, Any] = {}
        """``RolloutRecord.gaps`` of what the last step trained."""

        self._lengths = LengthRatio()
        self._step = 0
        self._unwritten: set[str] = set()
        self._left_out = Counter[str]()
        self._longest = {"save": 0.0, "update": 0.0}
        """Seconds of the longest checkpoint and update of this process, which a stop may have to
        wait for.
        """
        self._warned_of_grace = False

        shown = config.model_dump(mode="json", by_alias=True)
        self.loggers = Loggers(
            (PrometheusSettings(), *config.loggers),
            lambda chosen: open_logger(chosen, config.name, shown, self.folder),
            lambda kind, why: self.event(incidents.LoggerFailed(kind, why)),
        )

    def event(self, event: Event, step: int | None = None) -> None:
        """Something that happened once, after ``step`` (default: the last one on record)."""
        self.updates.append(
            ("event", self.folder.events.emit(event, self._step if step is None else step))
        )
        self._watch("events.jsonl", self.folder.events.trouble)
        if isinstance(event, events.CheckpointEvent):
            self._took("save", event.seconds)

    def _took(self, what: str, seconds: float) -> None:
        """Report once that a stop now would come too late: an update under way ends first, and then
        there is a step to save.
        """
        self._longest[what] = max(self._longest[what], seconds)
        grace, needed = self.config.preemption.grace, sum(self._longest.values())
        if self._longest["save"] and needed > grace and not self._warned_of_grace:
            self._warned_of_grace = True
            self.event(incidents.GraceTooShort(round(needed, 1), grace))

    def _watch(self, file: str, trouble: OSError | None) -> None:
        """Report that a file cannot be written, once until it can."""
        if trouble is None:
            self._unwritten.discard(file)
        elif file not in self._unwritten:
            # Before the event, which is written to a file and comes here again when that fails.
            self._unwritten.add(file)
            self.event(incidents.NotWritten(file, why=str(trouble)))

    def _write(self, file: str, write: Callable[[], None]) -> None:
        """Do without a file that the storage refuses."""
        try:
            write()
        except OSError as error:
            self._watch(file, error)
        else:
            self._watch(file, None)

    def bad_row(self, failure: DataFailure) -> None:
        """A row that is left out, for quarantine.jsonl; the console shows the first ``SHOWN`` rows
        of each reason.
        """
        self.folder.quarantine.append({"path": failure.path, "reason": failure.reason})
        self._watch("quarantine.jsonl", self.folder.quarantine.trouble)
        self._left_out[failure.reason] += 1
        if self._left_out[failure.reason] <= SHOWN:
            self.updates.append(
                ("event", incidents.Quarantined(failure.path, failure.reason).record())
            )

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        """Which trajectories ``step`` trains on: {group: samples}.

        For the record only; the console shows the counts.
        """
        ids = {str(group.number): [m.summary.id.sample for m in group.kept] for group in groups}
        self.folder.events.emit(events.Trained(ids), step)

    def failed(self, why: BaseException, ledger: Mapping[str, int], traceback: str = "") -> None:
        """The run ends because of ``why``."""
        self.event(failure(why, ledger, traceback))

    def state(self) -> dict[str, Any]:
        """For the checkpoint: plain values."""
        return {"best": self.best, "worse": list(self.worse), "lengths": self._lengths.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self.best = state["best"]
        self.worse = list(state.get("worse", ()))  # older checkpoints have none
        self._lengths.restore(state["lengths"])

    def begin(self, step: int, lineage: int, checkpoint: Checkpoint | None) -> None:
        """A lineage begins at ``step``: later records are moved aside, and this run's configuration
        is written.
        """
        self._step = step
        moved = self.folder.truncate_after(step)
        self.folder.write_config(dump(self.config))
        self.event(
            events.Begin(
                lineage,
                checkpoint.folder.name if checkpoint else None,
                superseded_records=moved,
                best=self.best,
            )
        )
        if damaged := self.folder.metrics.damaged:
            self.event(incidents.RecordsDamaged(self.folder.metrics.path.name, damaged))

    def evaluated(self, step: int, items: Sequence[Item], images: Mapping[str, bytes]) -> None:
        """Held-out answers: kept one by one; their means are an event at once, and part of the
        step's metrics.
        """
        self._write("evaluations", lambda: self.folder.evaluations.write(step, items, images))
        controlled = any(item.arm in CONTROLS for item in items)
        before = self._first_items(step) if controlled else []
        summary = summarise(items, sum(item.reward is None for item in items), before)
        self._evaluation = metrics(items, summary["arms"])

        reward = self._evaluation.get("val/reward/mean")
        if reward is not None and (self.best is None or reward > self.best["reward"]):
            self.best, self.worse = {"reward": reward, "step": step}, []
        elif (
            reward is not None
            and self.best is not None
            and step > max([self.best["step"], *self.worse])
        ):
            self.worse.append(step)
        if self.best is not None:
            self._evaluation |= {
                "val/best": self.best["reward"],
                "val/best_step": float(self.best["step"]),
            }

        self.event(events.Evaluated(self._evaluation), step)
        if summary["differences"]:
            self.event(events.Controls(**summary), step)
        if self.best is not None and self.given_up:
            self.event(events.EarlyStop(len(self.worse), self.best), step)

    def _first_items(self, step: int) -> list[Item]:
        """The items of the first evaluation on record before ``step``; none without one that can be
        read.
        """
        files = self.folder.evaluations.files()
        since = min(files, default=step)
        with suppress(OSError):
            return read_items(files[since]) if since < step else []
        return []

    @property
    def given_up(self) -> bool:
        """Whether ``evaluation.patience`` is at its end."""
        patience = self.config.evaluation.patience
        return patience is not None and len(self.worse) >= patience

    def already_done(self, step: int) -> None:
        """There is nothing to do after ``step``: say what to change for more."""
        patience = self.given_up and len(self.worse)
        key, value = ("evaluation.patience", patience) if patience else ("steps", step)
        self.event(incidents.AlreadyDone(advice=f"raise {key} above {value} to go on"))

    def is_best(self, step: int) -> bool:
        """Whether no evaluation had a better reward than the one after ``step``."""
        return self.best is not None and self.best["step"] == step

    def step(
        self,
        step: int,
        report: Mapping[str, float],
        collected: Collected,
        ledger: Mapping[str, int],
        timings: Mapping[str, float],
        playing: Mapping[str, float],
    ) -> dict[str, float]:
        """Write one record to metrics.jsonl, and hand it to the other loggers."""
        self._step = step
        seconds = sum(timings.values())
        busy = max(seconds - timings.get("testing", 0.0), 1e-9)

        found = step_metrics(collected, self.config.algorithm.target)
        record = {
            "step": float(step),
            **found,
            **self._length_ratio(collected),
            **report,
            **self._evaluation,
            **{f"timing_s/{name}": value for name, value in timings.items()},
            "timing_s/step": seconds,
            "perf/trajectories_per_second": sum(len(g.members) for g in collected.finished) / busy,
            "perf/tokens_per_second": found.get("rollout/tokens", 0.0) / busy,
            **playing,
            **{f"ledger/{name}": float(count) for name, count in ledger.items()},
        }

        self.folder.metrics.append({**record, "step": step})
        self._watch("metrics.jsonl", self.folder.metrics.trouble)
        if (stats := collected.replay) is not None and stats:
            self._write("replay_buffer_stats.json", lambda: self.folder.write_replay(step, stats))

        self.loggers.log(step, record)
        self._took("update", timings.get("update_actor", 0.0))
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
        return (
            {}
            if self._lengths.value is None
            else {"rollout/trained_length_ratio": self._lengths.value}
        )

    def rollouts(
        self, step: int, records: Sequence[RolloutRecord], images: Mapping[str, bytes]
    ) -> None:
        """Write the sampled rollouts of a step."""
        records = [
            replace(one, gaps=self.gaps.get(TrajectoryId(one.group, one.sample), ()))
            for one in records
        ]
        self._write("rollouts", lambda: self.folder.rollouts.write(step, records, images))
        self.loggers.rollouts(step, records)

    def quoted_before(self, begins: str) -> str:
        """What the newest failure on record says from the words ``begins`` on; "" when it does not
        have them.
        """
        with suppress(OSError):
            why = next(
                (
                    event["why"]
                    for event in reversed([*self.folder.events])
                    if event["event"] == "failed"
                ),
                "",
            )
            _, found, rest = str(why).partition(begins)
            return found + rest
        return ""

    def close(self, step: int, ledger: Mapping[str, int]) -> dict[str, Any]:
        """The run's last word: what its held-out tasks have gained, and that it is finished."""
        self._gain(step)
        self.event(events.FinishedEvent(dict(ledger)))
        self.folder.close()
        return {"steps": step, "ledger": dict(ledger)}

    def _gain(self, step: int) -> None:
        """The last evaluation against the first one on record, which an earlier start of this run
        may have made.
        """
        files = self.folder.evaluations.files()
        since = min(files, default=step)
        if step in files and since < step:
            after, before = read_items(files[step]), read_items(files[since])
            if rewards := gain(after, before, greedy=self.config.evaluation.greedy):
                self.event(events.Gain(since, rewards), step)


def failure(why: BaseException, ledger: Mapping[str, int], traceback: str = "") -> events.Failed:
    """The event of a run that ends because of ``why``, with the notes that it carries."""
    notes = "; ".join(getattr(why, "__notes__", ()))
    return events.Failed(
        type(why).__name__, why=str(why), ledger=dict(ledger), saved=notes, traceback=traceback
    )
