"""Large boxes first (``data.order``): the curriculum that Arc Vision's authors asked for after their runs had collapsed."""

from __future__ import annotations

from rayloop.config.settings import SettingsModel
from rayloop.core.types import Task
from rayloop.recipes.arc_vision.data import box


class LargeFirst:
    """In the first epoch rows whose true box covers more than the first of ``areas``, then more than the second, then all others;
    later epochs are mixed."""

    class Settings(SettingsModel):
        areas: tuple[float, ...] = (0.05, 0.03)
        """Shares of the image's area, falling. Change them for boxes of other sizes, so that each tier fills some steps."""

    def __init__(self, settings: LargeFirst.Settings) -> None:
        self._areas = settings.areas

    def tier(self, task: Task) -> int:
        """Raises DataFailure when the ground truth is no box."""
        x1, y1, x2, y2 = box(task.ground_truth, f"ground truth of task {task.id}")
        return sum((x2 - x1) * (y2 - y1) <= area for area in self._areas)
