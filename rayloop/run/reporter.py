"""The reports of a run: metrics, events, quarantined rows and sampled rollouts.

They go to the run folder and to the console.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from rayloop.config.settings import dump
from rayloop.core import events, incidents
from rayloop.core.events import Event
from rayloop.core.failures import CheckpointError, DataFailure
from rayloop.core.groups import Group, Member
from rayloop.core.types import TrajectoryId
from rayloop.grpo.sight import TurnChanges
from rayloop.grpo.staleness import LengthRatio
from rayloop.loggers.settings import AnySettings, PrometheusSettings
from rayloop.loggers.threads import Logger, Loggers
from rayloop.measure.controls import CONTROLS, Item, summarise
from rayloop.run.checkpoint import Checkpoint
from rayloop.run.config import RunConfig
from rayloop.run.folder import SHOWN_ROWS, RunFolder
from rayloop.run.held_out import gain, metrics, read_items
from rayloop.run.records.rollouts import RolloutRecord
from rayloop.run.records.step_metrics import Collected, step_metrics

Open = Callable[[AnySettings, str, Mapping[str, Any], RunFolder], Logger]


class Updates:
    """The newest ``KEPT_REPORTS`` reports for a console that polls.

    A report is ("event", record), ("step", metrics) or ("samples", completions).
    """

    KEPT_REPORTS = 1000

    def __init__(self) -> None:
        self._newest: deque[tuple[str, dict[str, Any]]] = deque(maxlen=self.KEPT_REPORTS)
        self.total = 0

    def append(self, update: tuple[str, dict[str, Any]]) -> None:
        """Keep an update, in place of the oldest when full."""
        self._newest.append(update)
        self.total += 1

    def since(self, number: int) -> tuple[int, list[tuple[str, dict[str, Any]]]]:
        """The number of all updates so far, and the held ones after the first ``number``."""
        updates = list(self._newest)
        unseen = self.total - number
        return self.total, updates[max(0, len(updates) - unseen) :]

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
        """The highest mean reward on the held-out tasks so far (``reward``), and its ``step``.

        It is saved with the run.
        """
        self.worse: list[int] = []
        """The steps of the evaluations since then; saved with the run too.

        A resume repeats one, which counts once.
        """
        self.gaps: Mapping[TrajectoryId, Any] = {}
        """``RolloutRecord.gaps`` of the trajectories that the last step trained."""
        self.sight: Mapping[TrajectoryId, TurnChanges] = {}
        """``RolloutRecord.sight`` of the trajectories of which it scored a turn again."""
        self.tokens: Sequence[Mapping[str, Any]] = ()
        """``TokenRecorder.result`` of the last step by rank, with ``keep_rollouts: all``."""

        self._lengths = LengthRatio()
        self._step = 0
        self._unwritten: set[str] = set()
        self._left_out = Counter[str]()
        self._longest = {"save": 0.0, "update": 0.0}
        """Seconds of the longest checkpoint and update of this process.

        A stop may have to wait for both.
        """
        self._warned_of_grace = False

        plain_config = config.model_dump(mode="json", by_alias=True)
        self.loggers = Loggers(
            (PrometheusSettings(), *config.loggers),
            lambda settings: open_logger(settings, config.name, plain_config, self.folder),
            lambda kind, why: self.event(incidents.LoggerFailed(kind, why)),
        )

    def event(self, event: Event, step: int | None = None) -> None:
        """Something that happened once, after ``step`` (default: the last one on record)."""
        record = self.folder.events.emit(event, self._step if step is None else step)
        self.updates.append(("event", record))
        self._watch("events.jsonl", self.folder.events.trouble)
        if isinstance(event, events.CheckpointEvent):
            self._count_seconds("save", event.seconds)

    def _count_seconds(self, work: str, seconds: float) -> None:
        """Report once that a run that is stopped now would be saved too late.

        An update under way ends first, and then there is a step to save.
        """
        self._longest[work] = max(self._longest[work], seconds)
        grace = self.config.preemption.grace
        needed = sum(self._longest.values())
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
        """A row that is left out, for quarantine.jsonl.

        The console shows the first ``SHOWN_ROWS`` rows of each reason.
        """
        self.folder.quarantine.append({"path": failure.path, "reason": failure.reason})
        self._watch("quarantine.jsonl", self.folder.quarantine.trouble)
        self._left_out[failure.reason] += 1
        if self._left_out[failure.reason] <= SHOWN_ROWS:
            event = incidents.Quarantined(failure.path, failure.reason)
            self.updates.append(("event", event.record()))

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        """Which trajectories ``step`` trains on: {group: samples}.

        For the record only; the console shows the counts.
        """
        samples: dict[str, list[int]] = {}
        for group in groups:
            samples[str(group.number)] = [member.summary.id.sample for member in group.kept]
        self.folder.events.emit(events.Trained(samples), step)

    def failed(self, why: BaseException, ledger: Mapping[str, int], traceback: str = "") -> None:
        """The run ends because of ``why``."""
        self.event(failure(why, ledger, traceback))

    def state(self) -> dict[str, Any]:
        """For the checkpoint: plain values."""
        return {"best": self.best, "worse": list(self.worse), "lengths": self._lengths.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        self.best = state["best"]
        self.worse = list(state.get("worse", ()))  # older checkpoints have none
        self._lengths.restore(state["lengths"])

    def begin(self, step: int, lineage: int, checkpoint: Checkpoint | None) -> None:
        """A lineage begins at ``step``.

        Later records are moved to another file, and this run's configuration is written.
        """
        self._step = step
        superseded_records = self.folder.truncate_after(step)
        self.folder.write_config(dump(self.config))
        self.event(
            events.Begin(
                lineage,
                checkpoint.folder.name if checkpoint else None,
                superseded_records=superseded_records,
                best=self.best,
            )
        )
        damaged_records = self.folder.metrics.damaged
        if damaged_records:
            self.event(incidents.RecordsDamaged(self.folder.metrics.path.name, damaged_records))

    def evaluated(self, step: int, items: Sequence[Item], images: Mapping[str, bytes]) -> None:
        """Held-out answers, which are written one by one.

        Their means are an event at once, and part of the step's metrics.
        """
        self._write("evaluations", lambda: self.folder.evaluations.write(step, items, images))
        has_controls = any(item.arm in CONTROLS for item in items)
        first_items = self._first_items(step) if has_controls else []
        unscored = sum(item.reward is None for item in items)
        summary = summarise(items, unscored, first_items)
        self._evaluation = metrics(items, summary["arms"])

        reward = self._evaluation.get("val/reward/mean")
        if reward is not None:
            self._compare_with_best(step, reward)
        if self.best is not None:
            self._evaluation["val/best"] = self.best["reward"]
            self._evaluation["val/best_step"] = float(self.best["step"])

        self.event(events.Evaluated(self._evaluation), step)
        if summary["differences"]:
            self.event(events.Controls(**summary), step)
        if self.best is not None and self.given_up:
            self.event(events.EarlyStop(len(self.worse), self.best), step)

    def _compare_with_best(self, step: int, reward: float) -> None:
        if self.best is None or reward > self.best["reward"]:
            self.best = {"reward": reward, "step": step}
            self.worse = []
        # An evaluation that a resume repeats does not count again.
        elif step > max([self.best["step"], *self.worse]):
            self.worse.append(step)

    def _first_items(self, step: int) -> list[Item]:
        """The items of the first evaluation on record before ``step``.

        Empty without such an evaluation that can be read.
        """
        files = self.folder.evaluations.files()
        first_step = min(files, default=step)
        with suppress(OSError):
            return read_items(files[first_step]) if first_step < step else []
        return []

    @property
    def given_up(self) -> bool:
        """Whether ``evaluation.patience`` is at its end."""
        patience = self.config.evaluation.patience
        return patience is not None and len(self.worse) >= patience

    def already_done(self, step: int) -> None:
        """There is nothing to do after ``step``: say what to change for more."""
        limit = f"steps above {step}"
        if self.given_up and self.worse:
            limit = f"evaluation.patience above {len(self.worse)}"
        self.event(incidents.AlreadyDone(advice=f"raise {limit} to continue"))

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
        # An evaluation does not count; the bound avoids a division by 0.
        busy_seconds = max(seconds - timings.get("testing", 0.0), 1e-9)
        trajectories = sum(len(group.members) for group in collected.ended_groups)
        group_metrics = step_metrics(collected, self.config.algorithm.target)
        tokens = group_metrics.get("rollout/tokens", 0.0)
        record = {
            "step": float(step),
            **group_metrics,
            **self._length_ratio(collected),
            **report,
            **self._evaluation,
            **{f"timing_s/{name}": value for name, value in timings.items()},
            "timing_s/step": seconds,
            "perf/trajectories_per_second": trajectories / busy_seconds,
            "perf/tokens_per_second": tokens / busy_seconds,
            **playing,
            **{f"ledger/{name}": float(count) for name, count in ledger.items()},
        }

        self.folder.metrics.append({**record, "step": step})
        self._watch("metrics.jsonl", self.folder.metrics.trouble)
        replay = collected.replay
        if replay:
            self._write("replay_buffer_stats.json", lambda: self.folder.write_replay(step, replay))

        self.loggers.log(step, record)
        self._count_seconds("update", timings.get("update_actor", 0.0))
        self.updates.append(("step", record))
        self._evaluation = {}
        return record

    def _length_ratio(self, collected: Collected) -> dict[str, float]:
        played = _fresh_lengths(chain(*(group.members for group in collected.ended_groups)))
        trained = _fresh_lengths(chain(*(group.kept for group in collected.groups)))
        self._lengths.observe(played, trained)
        ratio = self._lengths.value
        return {} if ratio is None else {"rollout/trained_length_ratio": ratio}

    def rollouts(
        self, step: int, records: Sequence[RolloutRecord], images: Mapping[str, bytes]
    ) -> None:
        """Write the sampled rollouts of a step."""
        complete: list[RolloutRecord] = []
        for record in records:
            trajectory_id = TrajectoryId(record.group, record.sample)
            gaps = self.gaps.get(trajectory_id, ())
            sight = self.sight.get(trajectory_id, ())
            complete.append(replace(record, gaps=gaps, sight=sight))
        self._write("rollouts", lambda: self.folder.rollouts.write(step, complete, images))
        self.loggers.rollouts(step, complete)

    def replayable(self, step: int, value: Any) -> None:
        """Write what ``replay`` needs of a step: plain values with arrays."""

        def write() -> None:
            try:
                self.folder.rollouts.write_step(step, value)
            except CheckpointError as error:
                # A step that cannot be replayed must not end the run that trained it.
                raise OSError(str(error)) from error

        self._write("rollouts", write)

    def quoted_before(self, begins: str) -> str:
        """The text of the newest failure on record from the words ``begins`` on.

        "" when it does not have them.
        """
        with suppress(OSError):
            failures = [event for event in self.folder.events if event["event"] == "failed"]
            reason = failures[-1]["why"] if failures else ""
            _, first_words, rest = str(reason).partition(begins)
            return first_words + rest
        return ""

    def close(self, step: int, ledger: Mapping[str, int]) -> dict[str, Any]:
        """Report the gain on held-out tasks, and that the run is finished."""
        self._gain(step)
        self.event(events.FinishedEvent(dict(ledger)))
        self.folder.close()
        return {"steps": step, "ledger": dict(ledger)}

    def _gain(self, step: int) -> None:
        """Compare the last evaluation with the first one on record.

        An earlier start of this run may have made the first one.
        """
        files = self.folder.evaluations.files()
        first_step = min(files, default=step)
        if step not in files or first_step >= step:
            return
        last_items = read_items(files[step])
        first_items = read_items(files[first_step])
        rewards = gain(last_items, first_items, greedy=self.config.evaluation.greedy)
        if rewards:
            self.event(events.Gain(first_step, rewards), step)


def _fresh_lengths(members: Iterable[Member]) -> list[int]:
    """Sampled tokens of the trajectories that were played for this step."""
    return [
        member.summary.sampled_tokens
        for member in members
        if member.summary.length and not member.replayed
    ]


def failure(why: BaseException, ledger: Mapping[str, int], traceback: str = "") -> events.Failed:
    """The event of a run that ends because of ``why``, with the notes that it carries."""
    notes = "; ".join(getattr(why, "__notes__", ()))
    return events.Failed(
        type(why).__name__, why=str(why), ledger=dict(ledger), saved=notes, traceback=traceback
    )
