"""Actors in service, losses and recovery budgets of a run, from its events alone.

``status`` and Prometheus show them.
"""

import shutil
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from rayloop.core import events
from rayloop.run.folder import RunFolder
from rayloop.run.lifetime import CheckpointSettings, RecoverySettings
from rayloop.run.records.events import KINDS
from rayloop.view.reader import ENDS, Record

HOUR_S = 3600.0
_ORDINARY = {kind for kind, event in KINDS.items() if event.__module__ == events.__name__}
PROGRESS = _ORDINARY - set(ENDS)
"""Events that happen only while the run makes progress."""
INCIDENTS_SHOWN = 5


class RoleHealth:
    """Actors of one role."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        """Actors that the role should have."""
        self.lost = 0
        """Actors that were lost since the start."""
        self.out: set[int] = set()
        """Workers that are out of service."""
        self.spent: deque[float] = deque()
        """When units of the budget were spent."""

    def loss(self, when: float, workers: Iterable[int] = (), lost: int = 1) -> None:
        """Count ``lost`` actors at once, for one unit of the budget."""
        self.lost += lost
        self.out |= set(workers)
        self.spent.append(when)

    def budget_left(self, per_hour: int, now: float) -> int:
        """The number of ``per_hour`` units of the budget that are left at ``now``."""
        while self.spent and self.spent[0] < now - HOUR_S:
            self.spent.popleft()
        return max(0, per_hour - len(self.spent))


class RunHealth:
    """The state of the run in ``folder``. ``update`` reads the events since its last call."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        """``settings``: the run's configuration as plain data."""
        self.folder = folder
        self.recovery = RecoverySettings.model_validate(settings.get("recovery") or {})
        self.every = CheckpointSettings.model_validate(settings.get("checkpoint") or {}).every
        self.step = self.checkpoint_step = 0
        self.checkpoint_time: float | None = None
        self.progress: float | None = None
        self.up = False
        self.roles: dict[str, RoleHealth] = {}
        self.driver = RoleHealth(1)
        self.end: Record | None = None
        self.incidents: deque[Record] = deque(maxlen=INCIDENTS_SHOWN)
        self._position = 0

    def update(self) -> None:
        """Take the events since the last call. Raises OSError when they cannot be read."""
        records, self._position = self.folder.events.since(self._position)
        for record in records:
            self.take(record)

    def take(self, record: Record) -> None:
        """Take one more event."""
        kind = record["event"]
        when = record["time"]
        if kind in PROGRESS:
            self.progress = when
        elif kind not in ENDS:
            self.incidents.append(record)
        match kind:
            case "start":
                self.end = None
                self.roles = {}
                self.driver = RoleHealth(1)
            case "starting":
                self._starting(record["actors"])
            case "started":
                self.up = True
            case "begin":
                self._begin(record)
            case "trained":
                self.step = int(record["step"])
            case "checkpoint":
                self.checkpoint_step = int(record["step"])
                self.checkpoint_time = when
            case "driver_lost":
                self.driver.loss(when)
                self.up = False
            case "worker_lost":
                self._role(record["role"]).loss(when, [record["worker"]])
            case "node_lost":  # the events do not record which of its roles spends the budget
                for role, workers in record.get("workers", {}).items():
                    self._role(role).loss(when, workers, len(workers))
            case "replacement_failed":
                self._role(record["role"]).spent.append(when)
            case "worker_replaced":
                self._role(record["role"]).out.discard(record["worker"])
            case "policy_lost":
                policy = self._role("policy")
                policy.loss(when, range(policy.wanted))
            case "policy_rebuilt":
                self._role("policy").out.clear()
            case _ if kind in ENDS:
                self.end = record
                self.up = False

    def _role(self, name: str) -> RoleHealth:
        return self.roles.setdefault(name, RoleHealth(0))

    def _starting(self, actors: Mapping[str, int]) -> None:
        """A new driver starts with full budgets; losses since the start stay counted."""
        former = self.roles
        self.roles = {name: RoleHealth(wanted) for name, wanted in actors.items()}
        self.up = False
        for name, role in self.roles.items():
            role.lost = former[name].lost if name in former else 0

    def _begin(self, record: Record) -> None:
        self.end = None
        self.step = self.checkpoint_step = int(record.get("step") or 0)
        self.checkpoint_time = (
            None if record["restored"] is None else self.checkpoint_time or record["time"]
        )

    def budget(self, name: str, now: float) -> int:
        """The number of actors of the role that may still be replaced in this hour.

        For the policy it is the number of rebuilds, for the driver the number of restarts.
        """
        if name == "driver":
            return self.driver.budget_left(self.recovery.driver_restarts, now)
        role = self.roles[name]
        if name == "policy":
            return role.budget_left(self.recovery.policy_restarts, now)
        return role.budget_left(self.recovery.replacements * role.wanted, now)

    def in_service(self, name: str) -> int:
        """The number of the role's actors that serve."""
        role = self.roles[name]
        return max(0, role.wanted - len(role.out)) if self.up else 0

    def metrics(self, now: float | None = None) -> dict[str, float]:
        """The rows ``recovery/...`` of the table of metrics."""
        now = time.time() if now is None else now
        values: dict[str, float] = {"recovery/budget_left/driver": self.budget("driver", now)}
        values["recovery/lost/driver"] = self.driver.lost
        for name, role in self.roles.items():
            values[f"recovery/wanted/{name}"] = role.wanted
            values[f"recovery/in_service/{name}"] = self.in_service(name)
            values[f"recovery/lost/{name}"] = role.lost
            values[f"recovery/budget_left/{name}"] = self.budget(name, now)
        values["recovery/steps_since_checkpoint"] = self.step - self.checkpoint_step
        values["recovery/checkpoint_every"] = self.every
        disk = shutil.disk_usage(self.folder.path)
        values["recovery/disk_used"] = 1 - disk.free / disk.total
        times = {
            "checkpoint": self.checkpoint_time,
            "progress": self.progress,
            "lock": self.folder.lock.heartbeat(),
        }
        for name, when in times.items():
            if when is not None:
                values[f"recovery/{name}_age"] = now - when
        return {name: float(value) for name, value in values.items()}
