"""An Android device or emulator over its debug bridge, adb. Never exercised on a device."""

import shlex
import subprocess
from collections.abc import Sequence

from rayloop.core.failures import EnvironmentFailed
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Task
from rayloop.envs.grammar import actions as acts
from rayloop.envs.grammar.actions import Action, Point
from rayloop.envs.grammar.screens import ScreenEnvironment, ScreenSettings

CALL_TIMEOUT_S = 20.0
"""Seconds of one call of adb."""
CODES = {"recent": "app_switch"}
"""Buttons whose names are others in Android."""


class Android(ScreenEnvironment):
    """A row has an ``instruction``. It returns no result: a judge looks at the screens."""

    SCREEN = "phone"

    class Settings(ScreenSettings):
        """Which device."""

        serial: str
        """The device's name in ``adb devices``, as emulator-5554."""
        width: int = 1080
        """Pixels of its screen from left to right."""
        height: int = 2400
        """Pixels of its screen from top to bottom."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._settings = settings

    def reset(self, task: Task) -> Observation:
        """Show the home screen. Raises EnvironmentFailed without a device."""
        self._adb("shell", command(acts.PhoneButton("home")))
        return self._first(task, str(task.extra.get("instruction", "")), self._look())

    def screen_size(self) -> tuple[int, int]:
        """Return the size of the screen."""
        return self._settings.width, self._settings.height

    def evaluate(self) -> None:
        """Return None."""

    def close(self) -> None:
        """Leave the device as it is."""

    def _carry_out(self, actions: Sequence[Action]) -> StepResult:
        ends = False
        for action in actions:
            ends = isinstance(action, acts.Finish | acts.CallUser)
            if ends:
                break
            for part in self.basic(action):
                self._adb("shell", command(part))
        return StepResult(self._shown(self._look()), done=ends)

    def _look(self) -> ImageSource:
        return ImageSource(data=self._adb("exec-out", "screencap -p"))

    def _adb(self, *arguments: str) -> bytes:
        serial = self._settings.serial
        call = ["adb", "-s", serial, *arguments]
        try:
            return subprocess.check_output(call, stderr=subprocess.DEVNULL, timeout=CALL_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise EnvironmentFailed(
                f"no Android device {serial!r} answers ({error}): install adb, connect the device,"
                " and name it as `adb devices` does",
                bug=True,
            ) from error


def command(action: Action) -> str:
    """Return the shell command of a basic action. Raises ValueError, in words for the policy."""
    match action:
        case acts.Click(Point(x, y), "left", times):
            return "; ".join([f"input tap {x} {y}"] * times)
        case acts.LongPress(Point(x, y)):
            return f"input swipe {x} {y} {x} {y} 800"
        case acts.Swipe(Point() as start, Point() as end) | acts.Drag(Point() as start, end):
            return f"input swipe {start.x} {start.y} {end.x} {end.y} 400"
        case acts.Type(text):
            return f"input text {shlex.quote(text.replace(' ', '%s'))}"
        case acts.PhoneButton(name) | acts.Hotkey((name,)):
            return f"input keyevent KEYCODE_{CODES.get(name, name).upper()}"
        case acts.OpenApp(name):
            return f"monkey -p {shlex.quote(name)} -c android.intent.category.LAUNCHER 1"
        case acts.Sleep():
            return "sleep 1"
    raise ValueError(f"there is no {type(action).__name__} over adb")
