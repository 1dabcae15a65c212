"""Events that a run records: one class for each kind, with typed fields.

The events of failures are in incidents.py. The suffix ``Event`` is not part of the kind.
docs/events.md is made from the docstrings and from ``by``, the emitting file.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, dataclass_transform


@dataclass_transform(frozen_default=True)
class Event:
    """The base of all kinds; each is a frozen dataclass.

    docs/events.md explains the fields without a docstring at its top.
    """

    kind: ClassVar[str]
    by: ClassVar[str]
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    def __init_subclass__(cls, *, by: str) -> None:
        # Each subclass becomes a dataclass here, so that no kind can forget the decorator.
        dataclass(frozen=True)(cls)
        cls.by = by
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Event")).lower()

    def record(self) -> dict[str, Any]:
        """The kind and all fields, as they are written to events.jsonl."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        return {"event": self.kind, **{field.name: getattr(self, field.name) for field in fields}}


Emit: TypeAlias = Callable[[Event], None]


class Start(Event, by="cluster/stages/train.py"):
    """The command starts, or starts again."""

    config: str
    """16 hex digits over the configuration, the run's name and folders left out."""
    software: Mapping[str, str]
    """Versions of Python and of the main packages."""
    protocol: str = ""
    """Hash of the protocol of its held-out numbers (docs/protocols.md); empty without any."""


class Starting(Event, by="cluster/services.py"):
    """The actors are about to be started."""

    actors: Mapping[str, int]
    """Their number by role."""


class Started(Event, by="cluster/services.py"):
    """All actors are ready."""

    seconds: float
    threads: str = ""
    """Torch threads of a rank and of an engine; empty on GPUs.

    They are set by `policy.engine.threads` and `rollout.engine.threads`.
    """
    sandbox: str = ""
    """The sandbox of the policy's code on the driver's machine, and why it is not stronger.

    Empty when no such code is run.
    """


class Begin(Event, by="rayloop/run/reporter.py"):
    """A lineage begins, at the start of the run or after a restore."""

    lineage: int
    """1 at first, one more at each restore."""
    restored: str | None
    """The checkpoint; null for the start model."""
    superseded_records: int
    """Metrics of later steps that were moved to another file."""
    best: Mapping[str, float] | None
    """The best held-out `reward` so far and its `step`."""


class LogprobCheck(Event, by="cluster/loop/weight_check.py"):
    """Engine and trainer were compared on fresh episodes.

    This happens before the first step, and when drift would not be seen otherwise. To do: when
    `mean` is above `tolerance`, give engine and trainer the same dtype, attention and sampling.
    """

    tokens: float
    """Sampled tokens that were compared."""
    mean: float
    """Mean |log-prob difference| in nats."""
    max: float
    """The largest one."""
    images: float
    """Images in the episodes."""
    swapped: float
    """Mean change in the trainer when the images are exchanged."""
    tolerance: float
    """The largest `mean` that is allowed."""


class SelfTest(Event, by="cluster/loop/weight_check.py"):
    """One group of parameters was changed visibly and synced; the engines must follow."""

    group: str
    """The parameters: `language`, `vision`, `merger`, `adapters`."""
    moved: float | None = None
    """Mean |log-prob change| in the trainer, in nats."""
    follows: float | None = None
    """Mean |log-prob difference| between the engines and the trainer then, in nats."""
    skipped: str | None = None
    """Why it could not be tested; null if it was."""


class Trained(Event, by="rayloop/run/reporter.py"):
    """A step is trained. Not shown on the terminal."""

    groups: Mapping[str, Sequence[int]]
    """Group number: its trained samples."""


class Evaluated(Event, by="rayloop/run/reporter.py"):
    """Held-out scores. The fields are the metrics `val/...` of metrics.md, by name."""

    scores: Mapping[str, float]

    def record(self) -> dict[str, Any]:
        """The kind and the scores by name."""
        return {"event": self.kind, **self.scores}


class Controls(Event, by="rayloop/run/reporter.py"):
    """Held-out scores with the right image, with wrong images and without images.

    Bounds are null for fewer than 8 items. To do: read `looks` by source: a policy that does not
    look has learned where answers usually are, and a mean over sources hides it.
    """

    items: int
    """Answers with the right image."""
    arms: Mapping[str, Any]
    """Arm: score: mean, and the bounds of its 95 % interval."""
    sources: Mapping[str, Any]
    """The right image's scores by data source."""
    differences: Mapping[str, Any]
    """Control: score: the right image minus it, paired."""
    looks: bool | None
    """Whether the right image is above every control by more than chance, on every source.

    Null when there are too few items to decide.
    """
    unscored: int
    """Answers without a score."""
    by_source: Mapping[str, Any] = field(default_factory=dict)
    """Source: `items`, `reward`, `differences` from each control, `looks` and further counts.

    These are the distinct `answers`, the number of the `commonest` one, and the `change` since the
    first evaluation (null for that one).
    """


class Gain(Event, by="rayloop/run/reporter.py"):
    """The run is done: the held-out reward now, against the first evaluation on record.

    To do: when the interval holds 0, more rows in `data.eval` or more `evaluation.samples` separate
    a small gain from chance.
    """

    since: int
    """The step of that first evaluation."""
    rewards: Mapping[str, Any]
    """`sampled`, `greedy`: `tasks` that both have, mean reward `before` and `after`, `gain`.

    The gain is the mean difference, and the bounds of its 95 % interval, paired by task; null for
    fewer than 8.
    """


class CheckpointEvent(Event, by="cluster/loop/saving.py"):
    """A checkpoint is complete."""

    folder: str
    """Its name below `checkpoints/`."""
    seconds: float
    """Seconds from its beginning.

    The loop was held for `timing_s/save_checkpoint` of them (`checkpoint.asynchronous`).
    """


class EarlyStop(Event, by="rayloop/run/reporter.py"):
    """Held-out reward has not become better for `evaluation.patience` evaluations.

    The run ends as finished. To do: use `checkpoints/best`; raise `evaluation.patience` to
    continue.
    """

    evaluations: int
    """The number of evaluations in a row."""
    best: Mapping[str, float]
    """The best held-out `reward` and its `step`."""


class FinishedEvent(Event, by="rayloop/run/reporter.py"):
    """All steps are trained, or an `early_stop` came before."""

    ledger: Mapping[str, int]


class PreemptedEvent(Event, by="cluster/loop/ending.py"):
    """The run was asked to stop, and is saved. To do: start it again; it continues."""

    ledger: Mapping[str, int]


class Failed(Event, by="rayloop/run/reporter.py"):
    """The run ended by an error.

    To do: repair the cause (`why`) and start it again; it continues from its checkpoint.
    """

    error: str
    """Its name."""
    why: str
    ledger: Mapping[str, int]
    saved: str = ""
    """The saved step, or why it is not saved, and the start of a resume."""
    traceback: str = ""
    """The traceback of an unforeseen error."""
