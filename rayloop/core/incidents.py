"""Incidents: the events (events.py) of what went wrong, from a value that changed to a driver that died."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayloop.core.events import Event


class WaitingForResources(Event, by="cluster/services.py"):
    """The cluster has too little yet; nodes may still come. To do: join more nodes, or lower `actors` or `placement`."""

    lacks: str
    """What there is too little of."""
    seconds: float
    """How long it is waited for (`recovery.start_timeout`)."""


class Changed(Event, by="cluster/driver.py"):
    """The run continues from its checkpoint with other values. To do: check that you meant it."""

    values: Mapping[str, tuple[Any, Any]]
    """Key: then, now."""


class AlreadyDone(Event, by="rayloop/run/reporter.py"):
    """The restored checkpoint has all the steps that were asked for, or its run had stopped early. To do: follow
    `advice`, or leave it."""

    advice: str
    """Which key to raise."""


class WarningEvent(Event, by="cluster/driver.py"):
    """A configuration that works and is seldom meant, an older checkpoint that could not be removed, or a run that begins anew
    since its checkpoints were removed. To do: change the key that `why` names, or bring back what it names, or leave it."""

    why: str


class DataWarning(Event, by="rayloop/run/rows.py"):
    """What may be wrong with a data file though its rows can be read (no answers, no images). To do: look at the file: `python -m
    rayloop data validate CONFIG`."""

    why: str


class Quarantined(Event, by="rayloop/run/reporter.py"):
    """A training row failed and is left out. Shown on the terminal; on record in quarantine.jsonl. To do: repair the row; the run
    goes on without it."""

    path: str
    """The file at fault, with its row."""
    reason: str
    """What is wrong with it."""


class QuarantineCleared(Event, by="cluster/driver.py"):
    """A run that resumes plays tasks again that were quarantined (`checkpoint.resume` names a checkpoint). To do: leave the key out
    from the next start on, or the run begins there again."""

    tasks: Sequence[str]
    """Their ids."""


class BadData(Event, by="cluster/supervision/attempts.py"):
    """A held-out task cannot be played. It has no score; the training task of that id is another one. To do: repair the row."""

    task: str
    path: str
    """The file at fault."""
    why: str


class LogprobWarning(Event, by="cluster/loop/weight_sync.py"):
    """The log-prob check or the self-test failed, and `weight_sync.logprob_check` is warn. To do: what `why` says."""

    why: str


class ProbeFailed(Event, by="cluster/loop/weight_sync.py"):
    """A task could not be played for one of these comparisons. To do: look at the task if it comes again; another one is
    played."""

    purpose: str
    """`log-prob check`, `drift`, or the group of parameters."""
    task: str
    why: str


class DriftUnknown(Event, by="cluster/loop/weight_sync.py"):
    """Fresh episodes were to be compared, and there were none. To do: nothing; it is tried again ten steps later."""

    why: str


class BroadcastFailedEvent(Event, by="cluster/loop/weight_sync.py"):
    """The ranks and engines did not all meet, or the broadcast broke: this version went through the object store. To do: when it
    comes again and again: check the network of the ranks."""

    version: str
    """`lineage.step`."""
    why: str


class WeightsLost(Event, by="cluster/loop/weight_sync.py"):
    """A new engine cannot have the synced weights: they went with the node that held them. They are synced again, by a new
    policy if that went too. To do: nothing; find out why a node died."""

    version: str
    """`lineage.step`."""
    why: str


class EvaluationStopped(Event, by="cluster/driver.py"):
    """A stop ended an evaluation; the run that continues begins with it."""


class CheckpointFailed(Event, by="cluster/loop/saving.py"):
    """A checkpoint could not be saved. To do: make room on the disk; it is tried again at the next step."""

    failures: int
    """In a row; three are allowed."""
    why: str


class GraceTooShort(Event, by="rayloop/run/reporter.py"):
    """The longest update and the longest checkpoint so far take more together than a stop allows: it might not be saved. Told once.
    To do: raise `preemption.grace`, and what the scheduler allows, above `seconds`; or save more often, and to faster storage."""

    seconds: float
    """Of both."""
    grace: float
    """`preemption.grace`, in seconds."""


class CheckpointDamaged(Event, by="rayloop/run/checkpoint.py"):
    """A checkpoint cannot be restored: a file is not as it was written, or cannot be read. The run continues from an older one, and
    the folder is called `NAME.damaged` from now on. To do: look at the storage (`why`); remove the folder, or rename it back when
    the storage is well again."""

    checkpoint: str
    """The folder's name before."""
    file: str
    """Which file of it; empty when that is not known."""
    why: str


class NotWritten(Event, by="rayloop/run/reporter.py"):
    """The storage refuses a file of the run folder: it is full, read-only or away. The run goes on. Records (`events.jsonl`,
    `metrics.jsonl`, `quarantine.jsonl`) are held and written when there is room again, the newest 10,000 of each; samples of a step
    are left out. Told once, and again only after it was well. To do: make room, or mount it again."""

    file: str
    """Which file."""
    why: str


class EpisodeFailed(Event, by="cluster/supervision/attempts.py"):
    """An episode failed through no fault of the policy: it is played again, or was given up. To do: read `why` if it comes again
    and again: `excluded` tells how much."""

    trajectory: str
    attempt: int
    """How often it had been issued before."""
    why: str


class PayloadLost(Event, by="rayloop/rollout/manager.py"):
    """Scored trajectories whose data went with the node that held them: excluded, and others played instead. To do: nothing; find
    out why a node died."""

    trajectories: Sequence[str]
    """As `group/sample`."""


class UnscoredEvent(Event, by="rayloop/grpo/alarms.py"):
    """The first trajectory without a reward of each kind. To do: read `why`; an alarm tells when there are many."""

    trajectory: str
    task: str
    outcome: str
    """The kind: `timeout`, `grader_error`, ..."""
    why: str


class ItemUnscored(Event, by="cluster/stages/evaluate.py"):
    """An answer of `python -m rayloop eval` has no score. To do: run `eval` again with the same `--out`: it is played again."""

    arm: str
    """See run_folder.md."""
    task: str
    why: str


class GraderError(Event, by="rayloop/grpo/alarms.py"):
    """The first time that the reward raised. To do: repair the reward; look at it with `python -m rayloop try CONFIG`."""

    trajectory: str
    task: str
    why: str
    traceback: str
    """All of it."""


class Alarm(Event, by="rayloop/grpo/alarms.py"):
    """A limit of `alarms` was passed. Again only after it was well. To do: find the cause, or raise the limit when you know
    it."""

    alarm: str
    """Which one, as below `alarms` in the configuration."""
    why: str


class RolloutsNotWritten(Event, by="cluster/supervision/calls.py"):
    """The sampled rollouts of a group could not be described: they lack in `rollouts/`."""

    group: int
    """Its group number."""
    why: str


class WorkerLostEvent(Event, by="cluster/supervision/pool.py"):
    """An actor died, hung or is sick. It is ended, and another takes its place. To do: nothing while replacements serve; read
    `why` when it comes again and again."""

    role: str
    worker: int
    why: str
    node: str = ""
    """Host name and address of the node that it was on; empty where that is not known."""


class NodeLost(Event, by="cluster/supervision/nodes.py"):
    """A node is gone with every actor on it; all are replaced where there is room, which costs one unit of one budget. To do:
    nothing while others have room; bring the node back, or join another."""

    name: str
    """Its host name and address."""
    node: str
    """Ray's id of it."""
    roles: Mapping[str, int]
    """How many actors of each role were on it."""
    workers: Mapping[str, Sequence[int]]
    """Serial numbers of those that were in service, by role: they have no `worker_lost`. The policy tells of its own loss."""


class NodeAvoided(Event, by="cluster/supervision/nodes.py"):
    """Actors failed again and again on a node that lives: those that are replaced go elsewhere if there is room, for twenty
    minutes, and what they had reserved, such as a bad GPU, is given to nobody. To do: look at the node; drain it."""

    name: str
    """Its host name and address."""
    node: str
    """Ray's id of it."""
    failures: int
    """Within an hour."""


class ReplacementFailed(Event, by="cluster/supervision/pool.py"):
    """The replacement of an actor did not start; another is tried. To do: read `why`; `recovery.replacements` bounds how often in
    an hour."""

    role: str
    worker: int
    """The serial number of the one that was lost."""
    why: str
    node: str = ""
    """Host name and address of the node on which it came so far as to answer; empty where that is not known."""


class WorkerReplaced(Event, by="cluster/supervision/pool.py"):
    """The replacement of an actor serves."""

    role: str
    worker: int
    """The serial number of the one that was lost."""
    seconds: float
    node: str = ""
    """Host name and address of the node that the replacement is on; empty where that is not known."""


class PolicyLostEvent(Event, by="cluster/driver.py"):
    """A rank of the policy died or hangs: all ranks are replaced, and the run goes on from its newest checkpoint. To do: nothing
    the first time; then read `why` and the ranks' files in `logs/`."""

    why: str
    nodes: Sequence[str] = ()
    """Host names and addresses of the nodes whose ranks failed, as far as they are known."""


class PolicyRebuilt(Event, by="cluster/driver.py"):
    """All ranks of the policy are new."""

    seconds: float
    nodes: Sequence[str] = ()
    """Host names and addresses of their nodes, by rank."""


class DriverLostEvent(Event, by="cluster/stages/train.py"):
    """The driver died: another one goes on from the newest checkpoint. To do: nothing the first time; then look whether its node
    lacks memory."""

    restarts: int
    """How often it had been replaced before."""
    why: str
    node: str = ""
    """Host name of the node that it was on, which is that of `train`."""


class Silent(Event, by="cluster/supervision/watchdog.py"):
    """An actor answers nothing, not even which machine it is on: its process is stopped, or hangs, or its machine does. It is
    replaced when the deadline of the awaited call is over. Emitted once, and again only after it answered. To do: look at its
    process (`python -m rayloop stacks RUN`) and its machine."""

    actor: str
    """Its role and slot: `rollout 0`, `policy rank 1`."""
    seconds: float
    """How long an answer has been awaited."""
    awaited: str
    """What it should answer."""


class DriverSilent(Event, by="cluster/stages/train.py"):
    """The driver answers nothing: its process is stopped, or hangs, or its machine does. It is given up, and another takes its
    place, after `recovery.stall_timeout`. To do: look at its process (`python -m rayloop stacks RUN`) and its machine."""

    seconds: float
    """How long an answer has been awaited."""
    left: float
    """Seconds until it is given up."""


class StalledEvent(Event, by="cluster/supervision/watchdog.py"):
    """Nothing that the driver waits for has ended for a while. To do: read `stacks` of what is `awaited`; the run ends at
    `recovery.stall_timeout`."""

    phase: str
    """What the driver is doing."""
    seconds: float
    """How long."""
    awaited: str
    """The oldest waits, each with its duration."""
    stacks: str
    """The file with the stacks of the driver and of the awaited actors; empty when the storage refused it."""


class LoggerFailed(Event, by="rayloop/run/reporter.py"):
    """A logger is dropped for the rest of this driver's life. To do: repair it; metrics.jsonl has everything."""

    logger: str
    """Its kind."""
    why: str
