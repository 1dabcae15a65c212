"""Actors in service, losses and recovery budgets of a run, from its events alone: for ``status``,
and for Prometheus.
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

HOUR = 3600.0
PROGRESS = {kind for kind, event in KINDS.items() if event.__module__ == events.__name__} - set(
    ENDS
)
"""Events that happen only while things go as they should."""
NEWEST = 5
"""Incidents that are kept to be shown."""


class RoleVitals:
    """Actors of one role: how many there should be, how many are out of service, and when one was
    lost.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted, self.lost = wanted, 0
        self.out: set[int] = set()
        self.spent: deque[float] = deque()

    def loss(self, when: float, workers: Iterable[int] = (), lost: int = 1) -> None:
        """``lost`` at once, for one unit of the budget."""
        self.lost += lost
        self.out |= set(workers)
        self.spent.append(when)

    def budget_left(self, per_hour: int, now: float) -> int:
        """How many of ``per_hour`` units of the budget are left at ``now``."""
        while self.spent and self.spent[0] < now - HOUR:
            self.spent.popleft()
        return max(0, per_hour - len(self.spent))


class Vitals:
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
        self.roles: dict[str, RoleVitals] = {}
        self.driver = RoleVitals(1)
        self.end: Record | None = None
        self.incidents: deque[Record] = deque(maxlen=NEWEST)
        self._read = 0

    def update(self) -> None:
        """Raises OSError when the events cannot be read."""
        records, self._read = self.folder.events.since(self._read)
        for record in records:
            self.take(record)

    def take(self, record: Record) -> None:
        """One more event."""
        kind, when = record["event"], record["time"]
        if kind in PROGRESS:
            self.progress = when
        elif kind not in ENDS:
            self.incidents.append(record)
        match kind:
            case "start":
                self.end, self.roles, self.driver = None, {}, RoleVitals(1)
            case "starting":
                self._starting(record["actors"])
            case "started":
                self.up = True
            case "begin":
                self._begin(record)
            case "trained":
                self.step = int(record["step"])
            case "checkpoint":
                self.checkpoint_step, self.checkpoint_time = int(record["step"]), when
            case "driver_lost":
                self.driver.loss(when)
                self.up = False
            case "worker_lost":
                self._role(record["role"]).loss(when, [record["worker"]])
            case "node_lost":  # one of its roles pays: which one is not recorded
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
                self.end, self.up = record, False

    def _role(self, name: str) -> RoleVitals:
        return self.roles.setdefault(name, RoleVitals(0))

    def _starting(self, actors: Mapping[str, int]) -> None:
        """A new driver has its budgets anew; what was lost since the start stays counted."""
        former, self.roles, self.up = (
            self.roles,
            {role: RoleVitals(wanted) for role, wanted in actors.items()},
            False,
        )
        for name, role in self.roles.items():
            role.lost = former[name].lost if name in former else 0

    def _begin(self, record: Record) -> None:
        self.end = None
        self.step = self.checkpoint_step = int(record.get("step") or 0)
        self.checkpoint_time = (
            None if record["restored"] is None else self.checkpoint_time or record["time"]
        )

    def budget(self, name: str, now: float) -> int:
        """How often in this hour an actor of the role may still be replaced (the policy rebuilt,
        the driver restarted).
        """
        if name == "driver":
            return self.driver.budget_left(self.recovery.driver_restarts, now)
        role = self.roles[name]
        per_hour = (
            self.recovery.policy_restarts
            if name == "policy"
            else self.recovery.replacements * role.wanted
        )
        return role.budget_left(per_hour, now)

    def in_service(self, name: str) -> int:
        """How many actors of the role serve."""
        role = self.roles[name]
        return max(0, role.wanted - len(role.out)) if self.up else 0

    def metrics(self, now: float | None = None) -> dict[str, float]:
        """The rows ``recovery/...`` of the table of metrics."""
        now = time.time() if now is None else now
        found: dict[str, float] = {"recovery/budget_left/driver": self.budget("driver", now)}
        found["recovery/lost/driver"] = self.driver.lost
        for name, role in self.roles.items():
            found[f"recovery/wanted/{name}"] = role.wanted
            found[f"recovery/in_service/{name}"] = self.in_service(name)
            found[f"recovery/lost/{name}"] = role.lost
            found[f"recovery/budget_left/{name}"] = self.budget(name, now)
        found["recovery/steps_since_checkpoint"] = self.step - self.checkpoint_step
        found["recovery/checkpoint_every"] = self.every
        disk = shutil.disk_usage(self.folder.path)
        found["recovery/disk_used"] = 1 - disk.free / disk.total
        times = {
            "checkpoint": self.checkpoint_time,
            "progress": self.progress,
            "lock": self.folder.lock.heartbeat(),
        }
        found |= {
            f"recovery/{name}_age": now - when for name, when in times.items() if when is not None
        }
        return {key: float(value) for key, value in found.items()}
