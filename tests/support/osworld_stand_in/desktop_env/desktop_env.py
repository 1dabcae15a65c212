"""A stand-in for OSWorld's DesktopEnv 1.0.2, with its signatures and, when a task's ``stand_in``
asks for it, its ways to fail.
"""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

from PIL import Image

SETUP_TRIES = 5


class Setup:
    """Upstream's controller: True when all steps of a setup succeeded."""

    def __init__(self, env: DesktopEnv) -> None:
        self._env = env

    def setup(self, config: list[Any]) -> bool:
        return not self._env.stand_in.get("setup_fails")


class DesktopEnv:
    def __init__(
        self,
        provider_name: str = "vmware",
        action_space: str = "pyautogui",
        cache_dir: str = "cache",
        screen_size: tuple[int, int] = (1920, 1080),
        require_a11y_tree: bool = True,
        boot: str = "",
    ) -> None:
        if boot == "fails":
            raise TimeoutError("docker: the machine is not ready after 300 s")
        assert isinstance(screen_size, tuple)
        assert action_space == "pyautogui"
        self.size, self.machine = screen_size, Path(cache_dir).parent
        self.setup_controller = Setup(self)
        self.stand_in: dict[str, Any] = {}
        self._note("booted")

    def reset(
        self, task_config: Any = None, seed: Any = None, options: Any = None
    ) -> dict[str, Any]:
        self.stand_in, self.typed, self.last = task_config.get("stand_in", {}), 0, ""
        self._note("reset")
        resets = sum(line["what"] == "reset" for line in _notes(self.machine.parent))
        if resets <= self.stand_in.get("resets_fail", 0):
            raise ConnectionError("Connection reset by peer")
        for _ in range(SETUP_TRIES):
            if self.setup_controller.setup(task_config.get("config", [])):
                break
        return self._seen()  # also when no setup succeeded, as upstream

    def step(
        self, action: str, pause: float = 2
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        self._note("step", action=action)
        self.last = action
        if self.stand_in.get("step") == "hangs":
            time.sleep(600)
        if self.stand_in.get("step") == "dies":
            os._exit(1)
        self.typed += 2 if self.stand_in.get("step") == "runs twice" else 1
        time.sleep(pause)
        return self._seen(), 0, action in ("DONE", "FAIL"), {}

    def evaluate(self) -> float:
        self._note("evaluate")
        time.sleep(self.stand_in.get("evaluate_takes", 0))
        self._note("evaluated")
        if self.stand_in.get("evaluate") == "raises":
            raise KeyError("no such window")
        if self.stand_in.get("infeasible"):
            return float(self.last == "FAIL")
        return float(self.typed >= 2)

    def close(self) -> None:
        self._note("closed")

    def _seen(self) -> dict[str, Any]:
        if self.stand_in.get("screenshot") == "none" or (
            self.stand_in.get("screenshot") == "none later" and self.last
        ):
            return {
                "screenshot": None,
                "accessibility_tree": None,
                "terminal": None,
                "instruction": "",
            }
        encoded = io.BytesIO()
        Image.new("RGB", self.size, "navy").save(encoded, "PNG", compress_level=1)
        return {
            "screenshot": encoded.getvalue(),
            "accessibility_tree": None,
            "terminal": None,
            "instruction": "",
        }

    def _note(self, what: str, **more: Any) -> None:
        with open(self.machine.parent / "notes.jsonl", "a", encoding="utf-8") as file:
            file.write(
                json.dumps({"what": what, "machine": self.machine.name, "at": time.time(), **more})
                + "\n"
            )


def _notes(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / "notes.jsonl").read_text(encoding="utf-8").splitlines()
    ]
