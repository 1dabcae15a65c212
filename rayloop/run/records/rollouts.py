"""Records of sampled trajectories (docs/run_folder.md), and the files of their images."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayloop.core.files import first_unused, write_whole
from rayloop.core.groups import Group, Member, Outcome, Scored, Unscored
from rayloop.core.types import ImageRef, TokenIds, Trajectory, Turn
from rayloop.data.images import encoding
from rayloop.run.records import plain_files
from rayloop.run.records.jsonl import SCHEMA_VERSION, Fits, JsonLines, encode

NEW_CONTEXT = "(a new context begins)"
STEPS = "step_" + 6 * "[0-9]" + ".json"
"""Pattern of the files that ``replay`` reads."""
MAX_CHARACTER_BYTES = 4
"""The most bytes of a character: a token may end within one."""


@dataclass(frozen=True)
class RolloutTurn:
    """A turn after the prompt, as text.

    ``images`` as in ``RolloutRecord``; ``Turn.executed``; ``Turn.reward``. ``logprobs``: for each
    sampled token the index in ``text`` where it ends, and its log-prob; empty where they are
    unknown. ``tokens``: number of tokens; ``times``: ``Turn.times``; ``said``: ``Turn.said``.
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
    said: tuple[tuple[str, tuple[str | None, ...]], ...] = ()


@dataclass(frozen=True)
class RolloutRecord:
    """One line of a rollout file.

    ``versions``: first and last that sampled. ``unscored``: why there is no ``reward``. ``status``:
    ``kept``, or why not. ``images`` (of the prompt): ``{sha256, width, height, file}`` or ``path``.
    ``length``: all tokens. ``reason``: ``Scored.reason``. ``states``: ``Trajectory.states``.
    ``advantages``: of each sampled turn, where they are not all ``advantage``; both are the
    trainer's. ``gaps``: for each sampled turn of a trained trajectory mean and largest |difference|
    of the engine's and the trainer's log-probs, None where the trainer computed none. ``sight``:
    ``rayloop.grpo.sight.TurnChanges``. ``said``: the messages of the prompt.
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
    sight: tuple[float | None, ...] = ()
    said: tuple[tuple[str, tuple[str | None, ...]], ...] = ()


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
"""The fields of a ``RolloutRecord`` that its readers take for granted."""


def is_rollout(record: Mapping[str, Any]) -> bool:
    """Whether it is a ``RolloutRecord`` as this or an older version writes it."""
    return record.keys() >= SHOWN_FIELDS


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
        """The records of a step; empty without a file."""
        lines = JsonLines(self.file(step), self._fits)
        yield from lines
        self._damaged[step] = lines.damaged

    def file(self, step: int) -> Path:
        """The file of a step's rollouts."""
        return self.path / f"step_{step:06d}.jsonl"

    def files(self) -> dict[int, Path]:
        """Step -> its file, in order, without superseded files."""
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

    def step_files(self, step: int) -> tuple[Path, Path]:
        """The files of all that ``replay`` needs of a step (``keep_rollouts: all``).

        They hold its structure, and its arrays.
        """
        file = self.file(step)
        return file.with_suffix(".json"), file.with_suffix(".safetensors")

    def replayable(self) -> list[int]:
        """The steps that ``replay`` can compute again, in order."""
        return [int(file.stem.removeprefix("step_")) for file in sorted(self.path.glob(STEPS))]

    def write_step(self, step: int, value: Any) -> None:
        """Write the plain values of a step. Raises OSError, CheckpointError."""
        structure, tensors = self.step_files(step)
        new_structure = structure.with_suffix(".json.tmp")
        new_tensors = tensors.with_suffix(".safetensors.tmp")
        plain_files.write(new_structure, new_tensors, value)
        # The structure last: where it is, the step is complete.
        os.replace(new_tensors, tensors)
        os.replace(new_structure, structure)

    def set_aside_after(self, step: int) -> None:
        """Rename the files of later steps to ``step_N.jsonl.attempt-K``."""
        for later, file in self.files().items():
            if later > step:
                file.rename(aside(file))
        for later in self.replayable():
            if later > step:
                for file in self.step_files(later):
                    file.rename(aside(file))


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
        unscored=_reason_without_score(outcome),
        advantage=member.advantage,
        status=_status(member),
        replayed=member.replayed,
        versions=(str(summary.first_version), str(summary.last_version)),
        truth=jsonable(group.task.ground_truth),
        length=summary.length,
        sampled_tokens=summary.sampled_tokens,
        reason=scored.reason if scored else "",
        states=summary.states,
        advantages=member.credit.turns if member.credit is not None else (),
        said=prompt.said,
    )


def _reason_without_score(outcome: Outcome) -> str | None:
    """The kind and the reason of an outcome without a score."""
    if not isinstance(outcome, Unscored):
        return None
    return ": ".join(filter(None, (outcome.kind, outcome.reason)))


def _status(member: Member) -> str:
    """The state in which a member ended, with its reason; ``kept`` for the others."""
    if member.status is None:
        return "kept"
    return ": ".join(filter(None, (member.status.state, member.status.reason)))


def _turn(turn: Turn, trajectory: Trajectory, text: Callable[[TokenIds], str]) -> RolloutTurn:
    if turn.restart:
        return RolloutTurn(turn.role, NEW_CONTEXT, False, tokens=len(turn.token_ids))
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
        turn.said,
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
            not piece.endswith("\ufffd") or len(pending) > MAX_CHARACTER_BYTES
        ):
            pending = []
            end += len(piece)
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


def aside(path: Path) -> Path:
    """``path`` with the first free suffix ``.attempt-K``, for records that a restart supersedes."""
    return first_unused(path, ".attempt-")
