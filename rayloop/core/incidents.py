"""Incidents: the events (events.py) of what went wrong, from a value that changed to a driver that
died.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rayloop.core.events import Event


class WaitingForResources(Event, by="cluster/services.py"):
    """The cluster has too little yet; nodes may still come.

    To do: join more nodes, or lower `actors` or `placement`.
    """

    lacks: str
    """What there is too little of."""
    seconds: float
    """How long it is waited for (`recovery.start_timeout`)."""


class Changed(Event, by="cluster/loop/restoring.py"):
    """The run continues from its checkpoint with other values. To do: check that you meant it."""

    values: Mapping[str, tuple[Any, Any]]
    """Key: then, now."""


class AlreadyDone(Event, by="rayloop/run/reporter.py"):
    """The restored checkpoint has all steps, or its run had stopped early.

    To do: follow `advice`, or leave it.
    """

    advice: str
    """Which key to raise."""


class WarningEvent(Event, by="cluster/driver.py"):
    """A configuration that is seldom meant, an old checkpoint that could not be removed, or a run
    that begins anew without its checkpoints. To do: change or restore what `why` names, or leave
    it.
    """

    why: str


class UpdatesSkipped(Event, by="cluster/loop/recording.py"):
    """The gradient of updates was not finite: they changed nothing, and their trajectories are
    spent. A run whose last step is one of these ends as diverged. To do: lower
    `policy.optimizer.lr`; look at `actor/loss` and at the rewards of the step.
    """

    skipped: int
    """In this step."""
    updates: int
    """That were to be done in it."""


class DataWarning(Event, by="rayloop/run/order.py"):
    """A data file can be read, but lacks answers or images.

    To do: look at it: `python -m rayloop data validate CONFIG`.
    """

    why: str


class Quarantined(Event, by="rayloop/run/reporter.py"):
    """A training row failed and is left out; it is in quarantine.jsonl.

    To do: repair the row; the run goes on without it.
    """

    path: str
    reason: str
    """What is wrong with it."""


class QuarantineCleared(Event, by="cluster/loop/restoring.py"):
    """A run that resumes plays tasks again that were quarantined (`checkpoint.resume` names a
    checkpoint). To do: leave the key out from the next start on, or the run begins there again.
    """

    tasks: Sequence[str]
    """Their ids."""


class BadData(Event, by="cluster/supervision/attempts.py"):
    """A held-out task cannot be played.

    It has no score; the training task of that id is another one. To do: repair the row.
    """

    task: str
    path: str
    why: str


class LogprobWarning(Event, by="cluster/loop/weight_sync.py"):
    """The log-prob check or the self-test failed, and `weight_sync.logprob_check` is warn.

    To do: what `why` says.
    """

    why: str


class ProbeFailed(Event, by="cluster/loop/weight_sync.py"):
    """A task could not be played for a comparison; another one is played.

    To do: look at the task if it comes again.
    """

    purpose: str
    """`log-prob check`, `drift`, or the group of parameters."""
    task: str
    why: str


class DriftUnknown(Event, by="cluster/loop/weight_sync.py"):
    """Fresh episodes were to be compared, and there were none.

    To do: nothing; it is tried again ten steps later.
    """

    why: str


class BroadcastFailedEvent(Event, by="cluster/loop/weight_sync.py"):
    """The broadcast failed; the version went through the object store.

    To do: if it comes again, check the ranks' network.
    """

    version: str
    why: str


class WeightsLost(Event, by="cluster/loop/weight_sync.py"):
    """The synced weights were lost with their node, or did not reach an engine in time, and are
    synced again, by a new policy if need be. To do: see why the node died, or the network.
    """

    version: str
    why: str


class EvaluationStopped(Event, by="cluster/loop/evaluating.py"):
    """A stop ended an evaluation; the run that continues begins with it."""


class CheckpointFailed(Event, by="cluster/loop/saving.py"):
    """A checkpoint could not be saved.

    It is tried again at the next step; from the fourth failure on training waits for the storage,
    until `recovery.start_timeout` after the first. To do: make room on the disk, or mount it.
    """

    failures: int
    """In a row."""
    why: str


class GraceTooShort(Event, by="rayloop/run/reporter.py"):
    """The longest update and the longest checkpoint together take more than a stop allows: it might
    not be saved. Emitted once. To do: raise `preemption.grace`, and the scheduler's limit, above
    `seconds`; or save more often, and to faster storage.
    """

    seconds: float
    """Of both."""
    grace: float
    """`preemption.grace`, in seconds."""


class CheckpointDamaged(Event, by="rayloop/run/checkpoint.py"):
    """A checkpoint cannot be restored: a file has changed, or cannot be read.

    The run continues from an older one; the folder is renamed to `NAME.damaged`, but for storage
    that did not answer for `recovery.start_timeout`. To do: look at the storage (`why`); remove the
    folder, or rename it back after a repair.
    """

    checkpoint: str
    """The folder's name before."""
    file: str
    """Which file of it; empty when that is not known."""
    why: str


class NotWritten(Event, by="rayloop/run/reporter.py"):
    """The storage refuses a file of the run folder: it is full, read-only or away.

    The run goes on; the newest 10,000 records of each `*.jsonl` are written later, samples of a
    step are left out. Emitted once per outage. To do: make room, or mount it.
    """

    file: str
    """Which file."""
    why: str


class RecordsDamaged(Event, by="rayloop/run/reporter.py"):
    """Lines of a file are no records of it, such as zero bytes after a power loss.

    They are moved aside; the run goes on without them, and so do its curves. To do: look at the
    storage if it comes again.
    """

    file: str
    """Which file."""
    lines: int
    """How many."""


class EpisodeFailed(Event, by="cluster/supervision/attempts.py"):
    """An episode failed, not because of the policy: it is played again, or given up.

    To do: read `why` if many are `excluded`.
    """

    trajectory: str
    attempt: int
    """How often it had been issued before."""
    why: str


class PayloadLost(Event, by="rayloop/rollout/manager.py"):
    """Scored trajectories were lost with their node: others are played instead.

    To do: find out why a node died.
    """

    trajectories: Sequence[str]
    """As `group/sample`."""


class UnscoredEvent(Event, by="rayloop/grpo/alarms.py"):
    """The first trajectory without a reward of each kind.

    To do: read `why`; many of them raise an alarm.
    """

    trajectory: str
    task: str
    outcome: str
    """The kind: `timeout`, `grader_error`, ..."""
    why: str


class ItemUnscored(Event, by="cluster/stages/evaluate.py"):
    """An answer of `python -m rayloop eval` has no score.

    To do: run `eval` again with the same `--out`: it is played again.
    """

    arm: str
    """See run_folder.md."""
    task: str
    why: str


class GraderError(Event, by="rayloop/grpo/alarms.py"):
    """The first time that the reward raised.

    To do: repair the reward; look at it with `python -m rayloop try CONFIG`.
    """

    trajectory: str
    task: str
    why: str
    traceback: str
    """All of it."""


class Alarm(Event, by="rayloop/grpo/alarms.py"):
    """A limit of `alarms` was passed; emitted once per passing.

    To do: find the cause, or raise the limit when you know it.
    """

    alarm: str
    """Which one, as below `alarms` in the configuration."""
    why: str


class RolloutsNotWritten(Event, by="cluster/supervision/calls.py"):
    """The sampled rollouts of a group could not be described: they lack in `rollouts/`."""

    group: int
    """Its group number."""
    why: str


class WorkerLostEvent(Event, by="cluster/supervision/pool.py"):
    """An actor died, hung or is sick, and is replaced.

    To do: nothing while replacements serve; read `why` if it comes again.
    """

    role: str
    worker: int
    why: str
    node: str = ""


class NodeLost(Event, by="cluster/supervision/nodes.py"):
    """A node is gone with its actors; all are replaced where there is room, at the cost of one
    replacement. To do: nothing while others have room; bring the node back, or join another.
    """

    name: str
    node: str
    """Ray's id of it."""
    roles: Mapping[str, int]
    """How many actors of each role were on it."""
    workers: Mapping[str, Sequence[int]]
    """Serial numbers of its workers by role, which have no `worker_lost`.

    The policy has `policy_lost`.
    """


class NodeAvoided(Event, by="cluster/supervision/nodes.py"):
    """Actors failed repeatedly on a node that lives: their replacements go elsewhere if there is
    room, for twenty minutes, and no actor gets their resources, such as a bad GPU. To do: look at
    the node; drain it.
    """

    name: str
    node: str
    """Ray's id of it."""
    failures: int
    """Within an hour."""


class ReplacementFailed(Event, by="cluster/supervision/pool.py"):
    """The replacement of an actor did not start; another is tried (`recovery.replacements` per
    hour). To do: read `why`.
    """

    role: str
    worker: int
    why: str
    node: str = ""


class WorkerReplaced(Event, by="cluster/supervision/pool.py"):
    """The replacement of an actor serves."""

    role: str
    worker: int
    seconds: float
    node: str = ""


class PolicyLostEvent(Event, by="cluster/loop/rebuilding.py"):
    """A rank of the policy died or hangs: all ranks are replaced, and the run goes on from its
    newest checkpoint. To do: the second time, read `why` and the ranks' files in `logs/`.
    """

    why: str
    nodes: Sequence[str] = ()
    """Host names and addresses of the nodes whose ranks failed, as far as they are known."""


class PolicyRebuilt(Event, by="cluster/loop/rebuilding.py"):
    """All ranks of the policy are new."""

    seconds: float
    nodes: Sequence[str] = ()
    """Host names and addresses of their nodes, by rank."""


class DriverLostEvent(Event, by="cluster/stages/train.py"):
    """The driver died: another one goes on from the newest checkpoint.

    To do: the second time, check the memory of its node.
    """

    restarts: int
    """How often it had been replaced before."""
    why: str
    node: str = ""
    """Host name of the node that it was on, which is that of `train`."""


class Silent(Event, by="cluster/supervision/watchdog.py"):
    """An actor answers no call: its process or machine is stopped or hangs.

    It is replaced after `recovery.health_timeout`. Emitted once per silence. To do: look at its
    process (`python -m rayloop stacks RUN`) and its machine.
    """

    actor: str
    """Its role and slot: `rollout 0`, `policy rank 1`."""
    seconds: float
    """How long an answer has been awaited."""
    awaited: str
    """What it should answer."""


class DriverSilent(Event, by="cluster/stages/following.py"):
    """The driver answers no call: its process or machine is stopped or hangs, and it is replaced
    after `recovery.health_timeout`; or only its loop waits, for storage that hangs, and it is
    replaced after `recovery.stall_timeout`. To do: look at its process (`python -m rayloop stacks
    RUN`), its machine and the storage.
    """

    seconds: float
    """How long an answer has been awaited."""
    left: float
    """Seconds until it is given up."""


class StalledEvent(Event, by="cluster/supervision/watchdog.py"):
    """No wait of the driver has ended for a while.

    To do: read `stacks`; the run ends at `recovery.stall_timeout`.
    """

    phase: str
    """What the driver is doing."""
    seconds: float
    awaited: str
    """The oldest wait of each actor with its duration, what that actor waits for itself, and the
    load of the driver's machine.
    """
    stacks: str
    """The file with the stacks of the awaited actors, of those that they wait for, and of the
    driver; empty when the storage refused it.
    """


class LoggerFailed(Event, by="rayloop/run/reporter.py"):
    """A logger is dropped for the rest of this driver's life.

    To do: repair it; metrics.jsonl has everything.
    """

    logger: str
    """Its kind."""
    why: str
