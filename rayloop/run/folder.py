"""The run folder and its layout (docs/run_folder.md).

The process that starts the run acquires it; the driver writes into it.
"""

import dataclasses
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from rayloop.core.failures import ConfigError, RunNameInUse, StorageFailed
from rayloop.core.files import content, mount_of, needed, write_whole
from rayloop.core.groups import Group, Member, Scored, Unscored
from rayloop.core.types import ImageRef, TokenIds, Trajectory, Turn
from rayloop.data.images import encoding
from rayloop.run.lock import RunLock
from rayloop.run.records.events import EventLog
from rayloop.run.records.jsonl import SCHEMA_VERSION, Fits, JsonLines, encode, is_number

MOST_CONFIG = 2**22
MOST_VALUES = 100_000
SHOWN = 10
"""Rows left out for one reason that the console shows; quarantine.jsonl has all."""


class RunFolder:
    """``<root>/<name>/``.

    ``metrics``, ``events`` and ``quarantine`` are append-only record files.
    """

    def __init__(self, root: str | Path, name: str) -> None:
        self.path = Path(root) / name
        self.config = self.path / "config.yaml"
        self.metrics = JsonLines(self.path / "metrics.jsonl", is_step)
        self.events = EventLog(self.path / "events.jsonl")
        self.quarantine = JsonLines(self.path / "quarantine.jsonl")
        self.rollouts = RolloutDump(self.path / "rollouts", is_rollout)
        self.evaluations = RolloutDump(self.path / "evaluations", is_answer)
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "weights"
        self.logs = self.path / "logs"
        self.tensorboard = self.path / "tensorboard"
        self.wandb = self.path / "wandb"
        self.cluster = self.path / "cluster.json"
        self.lock = RunLock(self.path / "run.lock")

    @classmethod
    def at(cls, path: str | Path) -> Self:
        """The run folder at ``path``, for the processes that were given one."""
        return cls(Path(path).parent, Path(path).name)

    @classmethod
    def begun(cls, path: Path) -> Self:
        """The folder of a run that has begun, for those who read it.

        Raises ConfigError when there is none at ``path``.
        """
        folder = cls.at(path.resolve())
        if not folder.used:
            lacks = (
                "neither config.yaml nor metrics.jsonl is there. Name a run's folder,"
                " <output>/<name>."
            )
            raise ConfigError(f"{path} holds no run: {lacks}")
        return folder

    @property
    def configuration(self) -> dict[str, Any]:
        """The run's configuration as plain data.

        Another version of rayloop may have written it.
        """
        return configuration(self.config) if self.config.exists() else {}

    @contextmanager
    def acquired(self, resume: str = "auto") -> Iterator[Self]:
        """Make the layout and hold the lock.

        ``resume``: auto, never, or a checkpoint folder. Raises RunNameInUse (a live holder; with
        ``never`` any run), ConfigError (not possible to make) and StorageFailed (not writable).
        """
        make_folder(self.path, "output=FOLDER")
        try:
            with needed(self.lock.path):
                self.lock.acquire()
            # Under the lock, since another start may just be making the run.
            if resume == "never" and self.used:
                raise RunNameInUse(
                    f"{self.path} holds a run already (last step: {self.last_step()}). To continue"
                    " it, start it again with checkpoint.resume=auto; to start afresh, choose"
                    " another name=... or remove the folder."
                )
            with needed(self.path):
                for folder in (
                    self.rollouts.path,
                    self.evaluations.path,
                    self.checkpoints,
                    self.weights,
                    self.logs,
                ):
                    folder.mkdir(exist_ok=True)
            yield self
        finally:  # a signal may have ended acquire itself
            self.close()
            with suppress(OSError):  # then it is taken over, as that of a process that was killed
                self.lock.release()

    def begun_before(self) -> None:
        """For a start after a failure: raises StorageFailed when the folder is missing.

        The first start has made it.
        """
        if not (self.path.is_dir() and any(self.path.iterdir())):
            raise StorageFailed(
                f"{self.path} is not there, or empty, and this is a restart of the run that began"
                f" in it: is its storage mounted (now it would be on {mount_of(self.path)})?"
                " Nothing was begun anew. If the run had not begun, start it by hand, or submit"
                " its job again"
            )

    @property
    def used(self) -> bool:
        """Whether a run has begun here."""
        return self.config.exists() or self.metrics.path.exists()

    def last_step(self) -> int:
        """The last step on record; 0 when there is none."""
        return max((int(record["step"]) for record in self.metrics if "step" in record), default=0)

    def write_config(self, text: str) -> None:
        """Write the expanded configuration.

        The one of an earlier attempt is kept in another file when it differs.
        """
        with needed(self.config):
            previous = self.config.read_bytes() if self.config.exists() else text.encode()
            # A copy and no rename, so that the folder has a configuration at every moment.
            if previous != text.encode():
                write_whole(_aside(self.config), previous)
            write_whole(self.config, text.encode())

    def write_replay(self, step: int, stats: Mapping[str, Any]) -> None:
        """What the replay buffer held at ``step``, in place of what was known of it before."""
        record = {"schema_version": SCHEMA_VERSION, "step": step, **stats}
        write_whole(
            self.path / "replay_buffer_stats.json", (encode(record) + "\n").encode(), durable=False
        )

    def damage(self) -> str:
        """A sentence on the damaged lines that the last reads left out; "" without any."""
        files = (self.metrics, self.events, self.rollouts, self.evaluations)
        counts = [f"{file.damaged} of {file.path.name}" for file in files if file.damaged]
        return f"damaged lines are left out: {', '.join(counts)}" if counts else ""

    def truncate_after(self, step: int) -> int:
        """Move the records of later steps, and damaged lines, to ``*.attempt-K`` after a restore.

        Returns the number of metrics records moved.
        """
        with needed(self.path):
            moved_records = self.metrics.split(
                lambda record: int(record["step"]) <= step, _aside(self.metrics.path)
            )
            self.rollouts.set_aside_after(step)
            self.evaluations.set_aside_after(step)
        return moved_records

    def close(self) -> None:
        """Close the record files; a later append opens them again."""
        for records in (self.metrics, self.quarantine):
            records.close()
        self.events.close()


def configuration(file: Path) -> dict[str, Any]:
    """The mapping in a run's YAML file, which may be another user's.

    It has at most ``MOST_CONFIG`` bytes and ``MOST_VALUES`` values, where the values behind an
    alias count each time. Raises ConfigError.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast
    try:
        document = yaml.load(content(file, MOST_CONFIG).decode("utf-8"), loader)
        # A stack, since recursion could end at a deep nesting; it counts an alias each time.
        pending = [document]
        count = 0
        while pending:
            value = pending.pop()
            count += 1
            if count > MOST_VALUES:
                raise ValueError(f"it has more than {MOST_VALUES} values")
            if isinstance(value, dict):
                pending += value.values()
            elif isinstance(value, list):
                pending += value
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(document, dict | None):
        raise ConfigError(
            f"{file} holds no configuration: expected keys and values, found"
            f" {type(document).__name__}"
        )
    return document or {}


def make_folder(path: Path, choice: str) -> None:
    """Make the folder unless it is there.

    Raises ConfigError, which names ``choice``, when it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission to write")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made or written to: {error.strerror}. Choose another folder with"
            f" {choice}"
        ) from error


RESTARTS = "(a context begins anew)"
MOST_BYTES = 4
"""Of a character: a token may end within one."""


@dataclass(frozen=True, slots=True)
class RolloutTurn:
    """A turn after the prompt, as text.

    ``images`` as in ``RolloutRecord``; ``Turn.executed``; ``Turn.reward``. ``logprobs``: for each
    sampled token the index in ``text`` where it ends, and its log-prob; empty where they are
    unknown. ``tokens``: number of tokens; ``times``: ``Turn.times``.
    """

    role: str
    text: str
    sampled: bool
    images: tuple[Mapping[str, Any], ...] = ()
    executed: bool | None = None
    reward: float = 0.0
    logprobs: tuple[tuple[int, float], ...] = ()
    tokens: int = 0
    times: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One line of a rollout file.

    ``versions``: first and last that sampled. ``unscored``: why there is no ``reward``. ``status``:
    ``kept``, or why not. ``images`` (of the prompt): ``{sha256, width, height, file}`` or ``path``.
    ``length``: all tokens. ``reason``: ``Scored.reason``. ``states``: ``Trajectory.states``.
    ``advantages``: of each sampled turn, where they are not all ``advantage``; both are those that
    the trainer got. ``gaps``: for each sampled turn of a trained trajectory mean and largest
    |difference| of the engine's and the trainer's log-probs, None where the trainer computed none.
    """

    group: int
    sample: int
    attempt: int
    task: str
    source: str
    prompt: str
    images: tuple[Mapping[str, Any], ...]
    turns: tuple[RolloutTurn, ...]
    end_reason: str
    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    unscored: str | None = None
    advantage: float | None = None
    status: str = "kept"
    replayed: bool = False
    versions: tuple[str, str] = ("", "")
    truth: Any = None
    length: int = 0
    sampled_tokens: int = 0
    reason: str = ""
    states: tuple[str, ...] = ()
    advantages: tuple[float, ...] = ()
    gaps: tuple[tuple[float, float] | None, ...] = ()


def is_step(record: Mapping[str, Any]) -> bool:
    """Whether it is a record of metrics.jsonl.

    That is a step's numbers by name, null where one was not finite.
    """
    placed = is_number(record.get("step")) and is_number(record.get("time"))
    return placed and all(value is None or is_number(value) for value in record.values())


SHOWN_FIELDS = frozenset(
    (
        "step",
        "group",
        "sample",
        "task",
        "source",
        "prompt",
        "images",
        "turns",
        "reward",
        "flags",
        "status",
        "replayed",
    )
)
"""Of a ``RolloutRecord``: what its readers take for granted."""


def is_rollout(record: Mapping[str, Any]) -> bool:
    """Whether it is a ``RolloutRecord`` as this or an older version writes it."""
    return record.keys() >= SHOWN_FIELDS


def is_answer(record: Mapping[str, Any]) -> bool:
    """Whether it is an answer of an evaluation (rayloop/measure/controls.py)."""
    return record.keys() >= {"arm", "task", "reward"}


class RolloutDump:
    """``step_000012.jsonl`` and the images of all steps, each stored once by its hash."""

    def __init__(self, path: Path, fits: Fits = is_rollout) -> None:
        """``fits``: as of ``JsonLines``."""
        self.path = path
        self.images = path / "images"
        self._fits = fits
        self._damaged: dict[int, int] = {}

    @property
    def damaged(self) -> int:
        """Damaged lines of all files that were read."""
        return sum(self._damaged.values())

    def read(self, step: int) -> Iterator[dict[str, Any]]:
        """The records of a step; none when there is no file."""
        lines = JsonLines(self.file(step), self._fits)
        yield from lines
        self._damaged[step] = lines.damaged

    def file(self, step: int) -> Path:
        """The file of a step's rollouts."""
        return self.path / f"step_{step:06d}.jsonl"

    def files(self) -> dict[int, Path]:
        """Step -> its file, in order; none of those that were set aside."""
        return {
            int(file.stem.removeprefix("step_")): file
            for file in sorted(self.path.glob("step_*.jsonl"))
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The records of all steps, in order."""
        return (record for step in self.files() for record in self.read(step))

    def write(self, step: int, records: Sequence[Any], images: Mapping[str, bytes]) -> None:
        """Write the records (dataclasses) of a step, replacing an earlier file.

        ``images``: sha256 -> encoded bytes.
        """
        self.keep(images)
        rows = (
            {"schema_version": SCHEMA_VERSION, "step": step, **dataclasses.asdict(record)}
            for record in records
        )
        write_whole(
            self.file(step), "".join(encode(row) + "\n" for row in rows).encode(), durable=False
        )

    def keep(self, images: Mapping[str, bytes]) -> None:
        """Store images that are not there yet."""
        self.images.mkdir(
            exist_ok=True
        )  # not its parents: where the storage is not mounted, they would be below its mount point
        for sha256, data in images.items():
            target = self.images / image_file(sha256, data)
            if not target.exists():
                write_whole(target, data, durable=False)

    def set_aside_after(self, step: int) -> None:
        """Rename the files of later steps to ``step_N.jsonl.attempt-K``."""
        for later, file in self.files().items():
            if later > step:
                file.rename(_aside(file))


def rollout_record(
    group: Group,
    member: Member,
    trajectory: Trajectory,
    plain: Callable[[TokenIds], str],
    shown: Callable[[TokenIds], str],
) -> RolloutRecord:
    """The record of one trajectory.

    ``plain`` decodes sampled turns as the reward sees them, ``shown`` others with markup.
    """
    prompt, *turns = trajectory.turns
    outcome = member.outcome
    summary = member.summary
    scored = outcome if isinstance(outcome, Scored) else None
    return RolloutRecord(
        group=group.number,
        sample=summary.id.sample,
        attempt=trajectory.attempt,
        task=trajectory.task_id,
        source=summary.source,
        prompt=shown(prompt.token_ids),
        images=_entries(prompt.images, trajectory),
        turns=tuple(_turn(turn, trajectory, plain if turn.sampled else shown) for turn in turns),
        end_reason=str(trajectory.end_reason),
        reward=scored.value if scored else None,
        components=scored.components if scored else {},
        flags=scored.flags if scored else (),
        unscored=(
            ": ".join(filter(None, (outcome.kind, outcome.reason)))
            if isinstance(outcome, Unscored)
            else None
        ),
        advantage=member.advantage,
        status=(
            "kept"
            if member.status is None
            else ": ".join(filter(None, (member.status.state, member.status.reason)))
        ),
        replayed=member.replayed,
        versions=(str(summary.first_version), str(summary.last_version)),
        truth=jsonable(group.task.ground_truth),
        length=summary.length,
        sampled_tokens=summary.sampled_tokens,
        reason=scored.reason if scored else "",
        states=summary.states,
        advantages=member.credit.turns if member.credit is not None else (),
    )


def _turn(turn: Turn, trajectory: Trajectory, text: Callable[[TokenIds], str]) -> RolloutTurn:
    if turn.restart:
        return RolloutTurn(turn.role, RESTARTS, False, tokens=len(turn.token_ids))
    images = _entries(turn.images, trajectory)
    content_text = text(turn.token_ids)
    logprobs = tuple(_ends(turn, content_text, text)) if turn.sampled else ()
    return RolloutTurn(
        turn.role,
        content_text,
        turn.sampled,
        images,
        turn.executed,
        turn.reward,
        logprobs,
        len(turn.token_ids),
        turn.times,
    )


def _ends(turn: Turn, whole: str, text: Callable[[TokenIds], str]) -> list[tuple[int, float]]:
    """``RolloutTurn.logprobs``; empty where tokens' texts are not the whole.

    A character of several tokens belongs to the last.
    """
    ends = list[tuple[int, float]]()
    pending = list[int]()
    end = 0
    for token, logprob in zip(turn.token_ids, turn.logprobs or (), strict=True):
        pending.append(token)
        piece = text(tuple(pending))
        if whole.startswith(piece, end) and (
            not piece.endswith("\ufffd") or len(pending) > MOST_BYTES
        ):
            pending = []
            end = end + len(piece)
        ends.append((end, round(logprob, 3)))
    return ends if end == len(whole) else []


def jsonable(value: Any) -> Any:
    """``value`` when JSON can hold it, else its description."""
    try:
        encode({"value": value})
    except TypeError:
        return repr(value)
    return value


def image_file(sha256: str, data: bytes) -> str:
    """The name of an image below ``rollouts/images``.

    It is its hash, with the suffix of its encoding (PNG, JPEG, WebP).
    """
    return f"{sha256}.{encoding(data).replace('jpeg', 'jpg')}"


def _entries(images: Sequence[ImageRef], trajectory: Trajectory) -> tuple[Mapping[str, Any], ...]:
    def where(image: ImageRef) -> dict[str, str]:
        data = trajectory.image_bytes.get(image.sha256)
        if data is None:
            return {"path": image.path or ""}
        return {"file": f"images/{image_file(image.sha256, data)}"}

    return tuple(
        {"sha256": i.sha256, "width": i.width, "height": i.height, **where(i)} for i in images
    )


def _aside(path: Path) -> Path:
    """``path`` with the first free suffix ``.attempt-K``."""
    for attempt in itertools.count(1):
        aside = path.with_name(f"{path.name}.attempt-{attempt}")
        if not aside.exists():
            break
    return aside
