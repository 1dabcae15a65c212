"""Incidents: the events (events.py) of faults, from a changed value to a dead driver."""

from collections.abc import Mapping, Sequence
from typing import Any

from rayloop.core.events import Event


class WaitingForResources(Event, by="cluster/services.py"):
    """The cluster has too little yet; nodes may still come.

    To do: join more nodes, or lower `actors` or `placement`.
    """

    lacks: str
    """The resources that are missing."""
    seconds: float
    """The longest wait for them (`recovery.start_timeout`)."""


class Changed(Event, by="cluster/loop/restoring.py"):
    """The run continues from its checkpoint with other values.

    To do: check that you meant it.
    """

    values: Mapping[str, tuple[Any, Any]]
    """Key: then, now."""


class AlreadyDone(Event, by="rayloop/run/reporter.py"):
    """The restored checkpoint has all steps, or its run had stopped early.

    To do: follow `advice`, or leave it.
    """

    advice: str
    """Which key to raise."""


class WarningEvent(Event, by="cluster/driver.py"):
    """A warning that does not stop the run.

    The configuration is seldom meant, an old checkpoint could not be removed, or the run begins
    again without its checkpoints. To do: change or restore what `why` names, or leave it.
    """

    why: str


class UpdatesSkipped(Event, by="cluster/loop/recording.py"):
    """The gradient of updates was not finite.

    They changed nothing, and their trajectories are spent. A run whose last step is one of these
    ends as diverged. To do: lower `policy.optimizer.lr`; look at `actor/loss` and at the rewards of
    the step.
    """

    skipped: int
    """Skipped updates of this step."""
    updates: int
    """All updates of this step."""


class DataWarning(Event, by="rayloop/run/order.py"):
    """A data file can be read, but lacks answers or images.

    To do: look at it: `python -m rayloop data validate CONFIG`.
    """

    why: str


class Quarantined(Event, by="rayloop/run/reporter.py"):
    """A training row failed and is left out; it is in quarantine.jsonl.

    To do: repair the row; the run continues without it.
    """

    path: str
    reason: str
    """The fault of the row."""


class QuarantineCleared(Event, by="cluster/loop/restoring.py"):
    """A resumed run plays tasks again that were quarantined.

    `checkpoint.resume` names a checkpoint. To do: leave the key out from the next start on, or the
    run begins there again.
    """

    tasks: Sequence[str]
    """Their ids."""


class BadData(Event, by="cluster/supervision/attempts.py"):
    """A held-out task cannot be played.

    It has no score; a training task with the same id is not affected. To do: repair the row.
    """

    task: str
    path: str
    why: str


class LogprobWarning(Event, by="cluster/loop/weight_check.py"):
    """The log-prob check or the self-test failed, and `weight_sync.logprob_check` is warn.

    To do: what `why` says.
    """

    why: str


class ProbeFailed(Event, by="cluster/loop/weight_check.py"):
    """A task could not be played for a comparison; another one is played.

    To do: look at the task if it comes again.
    """

    purpose: str
    """`log-prob check`, `drift`, or the group of parameters."""
    task: str
    why: str


class DriftUnknown(Event, by="cluster/loop/weight_check.py"):
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
    """The synced weights were lost with their node, or did not reach an engine in time.

    They are synced again, by a new policy if necessary. To do: find out why the node or the network
    failed.
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
    """The number of failures in a row."""
    why: str


class GraceTooShort(Event, by="rayloop/run/reporter.py"):
    """The longest update and the longest checkpoint together take more than a stop allows.

    The run might not be saved. Emitted once. To do: raise `preemption.grace`, and the scheduler's
    limit, above `seconds`; or save more often, and to faster storage.
    """

    seconds: float
    """Seconds of both together."""
    grace: float
    """`preemption.grace`, in seconds."""


class CheckpointDamaged(Event, by="rayloop/run/origin.py"):
    """A checkpoint cannot be restored: a file has changed, or cannot be read.

    The run continues from an older one; the folder is renamed to `NAME.damaged`, except where
    storage did not answer for `recovery.start_timeout`. To do: look at the storage (`why`); remove
    the folder, or rename it back after a repair.
    """

    checkpoint: str
    """The folder's name before the renaming."""
    file: str
    """The damaged file; empty when it is not known."""
    why: str


class NotWritten(Event, by="rayloop/run/reporter.py"):
    """The storage refuses a file of the run folder: it is full, read-only or unreachable.

    The run continues; the newest 10,000 records of each `*.jsonl` are written later, samples of a
    step are left out. Emitted once per outage. To do: make room, or mount it.
    """

    file: str
    """The file that could not be written."""
    why: str


class RecordsDamaged(Event, by="rayloop/run/reporter.py"):
    """Lines of a file are not records, such as zero bytes after a power loss.

    They are moved to another file; the run and its curves continue without them. To do: look at the
    storage if it comes again.
    """

    file: str
    """The damaged file."""
    lines: int
    """The number of damaged lines."""


class EpisodeFailed(Event, by="cluster/supervision/attempts.py"):
    """An episode failed, not because of the policy: it is played again, or given up.

    To do: read `why` if many are `excluded`.
    """

    trajectory: str
    attempt: int
    """The number of earlier issues."""
    why: str
    cause: str = ""
    """As in the metric `lost/cause/<cause>`."""
    node: str = ""
    server: str = ""
    """The address of the server that failed, where there is one."""


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
    """The whole traceback."""


class Alarm(Event, by="rayloop/grpo/alarms.py"):
    """A limit of `alarms` was passed; emitted once per passing.

    To do: find the cause, or raise the limit when you know it.
    """

    alarm: str
    """Its key below `alarms` in the configuration."""
    why: str


class RolloutsNotWritten(Event, by="cluster/supervision/calls.py"):
    """The sampled rollouts of a group could not be described, and are missing in `rollouts/`."""

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
    """A node was lost with its actors.

    All are replaced where there is room, at the cost of one replacement. To do: nothing while the
    other nodes have free resources; bring the node back, or join another.
    """

    name: str
    node: str
    """Ray's id of the node."""
    roles: Mapping[str, int]
    """The number of its actors by role."""
    workers: Mapping[str, Sequence[int]]
    """Serial numbers of its workers by role, which have no `worker_lost`.

    The policy has `policy_lost`.
    """


class NodeAvoided(Event, by="cluster/supervision/nodes.py"):
    """Actors failed repeatedly on a node that is alive.

    Their replacements go elsewhere if there is room, for twenty minutes, and no actor gets their
    resources, such as a bad GPU. To do: look at the node; drain it.
    """

    name: str
    node: str
    """Ray's id of the node."""
    failures: int
    """The number of failures within an hour."""


class ReplacementFailed(Event, by="cluster/supervision/pool.py"):
    """The replacement of an actor did not start.

    Another is tried (`recovery.replacements` per hour). To do: read `why`.
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
    """A rank of the policy died or hangs.

    All ranks are replaced, and the run continues from its newest checkpoint. To do: the second
    time, read `why` and the ranks' files in `logs/`.
    """

    why: str
    nodes: Sequence[str] = ()
    """Host names and addresses of the nodes whose ranks failed, where they are known."""


class PolicyRebuilt(Event, by="cluster/loop/rebuilding.py"):
    """All ranks of the policy are new."""

    seconds: float
    nodes: Sequence[str] = ()
    """Host names and addresses of their nodes, by rank."""


class DriverLostEvent(Event, by="cluster/stages/train.py"):
    """The driver died: another one continues from the newest checkpoint.

    To do: the second time, check the memory of its node.
    """

    restarts: int
    """The number of earlier replacements."""
    why: str
    node: str = ""
    """Host name of the driver's node, where `train` runs too."""


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
    """The call that it should answer."""


class DriverSilent(Event, by="cluster/stages/following.py"):
    """The driver answers no call.

    Its process or machine is stopped or hangs, and it is replaced after `recovery.health_timeout`;
    or only its loop waits, for storage that hangs, and it is replaced after
    `recovery.stall_timeout`. To do: look at its process (`python -m rayloop stacks RUN`), its
    machine and the storage.
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
    """The driver's current phase."""
    seconds: float
    awaited: str
    """The oldest wait of each actor with its duration, and the load of the driver's machine.

    It names the call that such an actor waits for itself, too.
    """
    stacks: str
    """The file with the stacks of the driver, and of the actors that it waits for in turn.

    Empty when the storage refused it.
    """


class LoggerFailed(Event, by="rayloop/run/reporter.py"):
    """A logger is dropped for the rest of this driver's life.

    To do: repair it; metrics.jsonl has everything.
    """

    logger: str
    """Its kind."""
    why: str
