"""The base of environments with a screen: settings, prompts of rows, a turn's actions, and the first observation."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.envs.grammar.actions import Action, Mistake
from rayloop.envs.grammar.screens import Pointing
from rayloop.envs.grammar.scanner import read

INSTRUCTION = "{instruction}"
"""In a row's prompt: where what the task asks for goes."""
_TEXT = """You are a GUI agent. You are given a task and your action history, with screenshots. \
You need to perform the next action to complete the task.

## Output Format
```
Thought: ...
Action: ...
```

## Action Space
click(start_box='<|box_start|>(x1,y1)<|box_end|>')
left_double(start_box='<|box_start|>(x1,y1)<|box_end|>')
right_single(start_box='<|box_start|>(x1,y1)<|box_end|>')
drag(start_box='<|box_start|>(x1,y1)<|box_end|>', end_box='<|box_start|>(x3,y3)<|box_end|>')
hotkey(key='ctrl c') # Split keys with a space and use lowercase. Also, do not use more than 3 keys in one hotkey action.
type(content='xxx') # Use escape characters \\', \\", and \\n in content part to ensure we can parse the content in normal \
python string format. If you want to submit your input, use \\n at the end of content.
scroll(start_box='<|box_start|>(x1,y1)<|box_end|>', direction='down or up or right or left')
wait() # Sleep for 5s and take a screenshot to check for any changes.
finished(content='xxx') # Use escape characters \\', \\", and \\n in content part.
{call_user}
## Note
- Use English in `Thought` part.
- Write a small plan and finally summarize your next action (with its target element) in one sentence in `Thought` part.

## User Instruction
{instruction}"""
UI_TARS = _TEXT.replace("{call_user}", "")
"""Source: bytedance/UI-TARS 582f3a7 (Apache-2.0), prompts of UI-TARS 1.5 for computers."""
UI_TARS_OR_FAIL = _TEXT.replace("{call_user}", "call_user() # When the task cannot be done.\n")
"""The same for tasks some of which cannot be done, as in OSWorld."""


class ScreenSettings(SettingsModel):
    """How a policy's turns reach a screen, and how it is shown to the policy."""

    pointing: Pointing = Pointing()
    """How the model's coordinates become pixels; must fit what the model was trained on and ``model.max_pixels``."""
    role: str = "user"
    """The role under which the chat template shows screens: some templates know no ``tool``."""
    max_actions: int = Field(8, ge=1)
    """Actions in one turn; a turn with more is answered with an error. Raise it for models that plan ahead."""


class ScreenEnvironment:
    """What environments with a screen share: reads a turn, checks its number of actions, and shows what follows.

    Derive from it: ``_carry_out``.
    """

    def __init__(self, settings: ScreenSettings) -> None:
        self._screen = settings

    def step(self, text: str) -> StepResult:
        """Carry out a turn. A text that is no turn, or asks for what the screen cannot do, is an error that the policy sees."""
        turn = read(text)
        if isinstance(turn, Mistake):
            return self._refused(str(turn))
        if len(turn.actions) > self._screen.max_actions:
            return self._refused(f"{len(turn.actions)} actions in one turn, {self._screen.max_actions} are allowed")
        try:
            return self._carry_out(turn.actions)
        except ValueError as error:
            return self._refused(str(error))

    def _carry_out(self, actions: Sequence[Action]) -> StepResult:
        """``actions``: as the model wrote them. Raises ValueError, in words for the policy."""
        raise NotImplementedError

    def _shown(self, *parts: str | ImageSource) -> Observation:
        return Observation((Message(self._screen.role, parts),))

    def _refused(self, why: str, *seen: ImageSource) -> StepResult:
        return StepResult(self._shown(f"Error: {why}", *seen), error=why)


def first(task: Task, instruction: str, *seen: str | ImageSource) -> Observation:
    """The row's messages with ``instruction`` in place of ``{instruction}`` in the last one, and what is ``seen`` behind it."""
    *before, last = task.messages
    texts = [part.replace(INSTRUCTION, instruction) if isinstance(part, str) else part for part in last.parts]
    return Observation((*before, Message(last.role, (*texts, *seen))))
