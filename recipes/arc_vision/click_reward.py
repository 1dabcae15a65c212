"""A reward for UI grounding with a model's own actions: whether it clicks into the true box."""

from rayloop.core.groups import Outcome, Scored
from rayloop.core.protocols import ScoreContext
from rayloop.core.types import Task, Trajectory
from rayloop.envs.grammar.actions import Mistake
from rayloop.envs.grammar.screens import ScreenSettings
from rayloop.recipes.arc_vision.boxes import grounding
from rayloop.recipes.arc_vision.data import box
from rayloop.recipes.arc_vision.reward import IoUReward, size_of
from rayloop.view.screen_turns import actions_of, mark


class ClickReward:
    """1 where a turn in the model's language acts within the task's box, else 0.

    It has the components and flags of ``IoUReward``, for a box without an area. A turn without a
    place is ``unparsable``, too.
    """

    Settings = ScreenSettings

    def __init__(self, settings: ScreenSettings) -> None:
        self._settings = settings

    def score(self, trajectory: Trajectory, task: Task, context: ScoreContext) -> Outcome:
        """The click. Raises DataFailure when the ground truth is not a box."""
        truth = box(task.ground_truth, f"ground truth of task {task.id}")
        size = size_of(trajectory, task, IoUReward.Settings(pixels="image"))
        if size is None:
            return Scored(0.0, grounding(None, truth), ("unknown_size",))
        width, height = map(int, size)
        actions = actions_of(context.texts[-1], self._settings, (width, height))
        marks = [] if isinstance(actions, Mistake) else list(filter(None, map(mark, actions)))
        if not marks:
            return Scored(0.0, grounding(None, truth), ("unparsable",))
        x, y = marks[0]["at"][:2]
        components = grounding((x / width, y / height, x / width, y / height), truth)
        return Scored(components["click"], components)
