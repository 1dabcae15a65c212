"""The shipped phone: a launcher with five apps, and tasks whose end is a state of the phone."""

import dataclasses
import functools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure
from rayloop.core.files import yaml_data
from rayloop.core.types import Task
from rayloop.envs.browser.web import WebPage

SHIPPED = Path(__file__).parent / "shipped"
"""The folder of the pages and tasks."""
PROMPT = "You see the screen of a phone. {instruction}"


class PhoneTask(SettingsModel):
    """A task of a phone, as a task file has it."""

    id: str
    instruction: str
    """What the policy is asked to do; ``{NAME}`` stands for a drawn value."""
    check: str
    """A JavaScript expression, as of ``WebPage``; ``{NAME}`` stands for a value as a text."""
    values: Mapping[str, tuple[str, ...]] = {}
    """Name -> values, of which a row's seed draws one."""
    start: Mapping[str, Any] = {}
    """Parts of the phone's state that differ at the beginning."""

    def drawn(self, seed: Any) -> dict[str, str]:
        """Return the values of a seed by name."""
        random_ = random.Random(f"{self.id} {seed}")
        return {name: random_.choice(values) for name, values in self.values.items()}

    def row(self, seed: Any) -> dict[str, str]:
        """Return the columns of a row of ``WebPage``."""
        instruction = self.instruction
        check = self.check
        for name, value in self.drawn(seed).items():
            instruction = instruction.replace("{" + name + "}", value)
            check = check.replace("{" + name + "}", json.dumps(value))
        query = urlencode({"seed": seed, "start": json.dumps(dict(self.start))})
        return {"url": f"index.html?{query}", "check": check, "instruction": instruction}


class Phone(WebPage):
    """A row names a ``phone`` task and a ``seed``; equal seeds give equal phones.

    ``evaluate`` is whether the phone's state is the one that the task asks for, and nothing else
    was changed.
    """

    class Settings(WebPage.Settings):
        """How large the screen is."""

        device: Literal["phone"] = "phone"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.model_copy(update={"folder": str(SHIPPED)}))

    def _prepare(self, task: Task) -> None:
        name = str(task.extra.get("phone"))
        if name not in tasks():
            raise DataFailure(
                task.id, f"the row's `phone` is {name!r}; there is {', '.join(tasks())}"
            )
        columns = tasks()[name].row(task.extra.get("seed", 0))
        super()._prepare(dataclasses.replace(task, extra={**task.extra, **columns}))


@functools.cache
def tasks() -> Mapping[str, PhoneTask]:
    """Return the shipped tasks by id."""
    content = yaml_data(SHIPPED / "tasks.yaml")
    return {entry["id"]: PhoneTask.model_validate(entry) for entry in content}
