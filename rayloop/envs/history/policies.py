"""The shipped history policies."""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from rayloop.config.settings import Component, Role, SettingsModel
from rayloop.core.failures import ConfigError
from rayloop.core.types import ImageSource, Message
from rayloop.envs.grammar.family import LanguageChoice, LanguageFile
from rayloop.envs.history.past import History, Past, PastAnswer, Shown
from rayloop.envs.settings import EnvironmentKind

FORGOTTEN = "(this image is no longer shown)"
"""Stands where an image was."""
ASSISTANT = "assistant"
HISTORY = Role("history", ("shown",))
WINDOW = "rayloop.envs.history.policies:Window"
SHORT: Mapping[str, Mapping[str, Any]] = {
    "full": {"use": WINDOW},
    "drop_thoughts": {"use": WINDOW, "with": {"answers": "{action}"}},
    "language": {"use": "rayloop.envs.history.policies:ByLanguage"},
}
"""Words for a history in a configuration."""
_FIELDS = re.compile(r"\{(?:number|index|action|summary)\}")


class Window:
    """Shows the newest turns and images; what is older becomes text or is left out.

    | `environment.history` | short for |
    |---|---|
    | `full` | `{use: ...:Window}`, which shows everything |
    | `drop_thoughts` | `{answers: "{action}"}` |
    | `{last_images: 5}` | `{use: ...:Window, with: {last_images: 5}}` |
    | `{last_turns: 4}` | `{use: ...:Window, with: {last_turns: 4}}` |
    | `language` | `{use: ...:ByLanguage}` |

    Settings may be combined: `{last_images: 3, answers: "{action}"}`. Your own is a class with the
    method `shown(past)` of `rayloop.envs.history.past:History`.
    """

    class Settings(SettingsModel):
        """Which parts of the past are shown. The defaults show everything."""

        last_images: int | None = Field(None, ge=1)
        """The environment's newest images that are shown; words stand for older ones.

        The images of the task's row always stay.
        """
        last_turns: int | None = Field(None, ge=1)
        """The newest observations that are shown, with the answers between them.

        Older answers become a list of text behind the first messages.
        """
        answers: str = ""
        """How earlier answers are shown: ``{action}``, ``{summary}``, ``{number}`` (from 1).

        Empty: as they were sampled. ``{action}`` leaves out the thought.
        """
        heading: str = "Previous actions:"
        """The line above the list of older answers."""
        step: str = "Step {number}: {summary}"
        """A line of that list: also ``{index}``, the number from 0."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def shown(self, past: Past) -> Shown:
        """See ``History``."""
        settings = self.settings
        messages = past.everything
        if settings.last_turns is not None:
            messages = self._last_turns(past, settings.last_turns)
        if settings.answers:
            messages = [self._rewritten(message) for message in messages]
        if settings.last_images is not None:
            messages = _last_images(messages, settings.last_images, past.task_images)
        return messages

    def _last_turns(self, past: Past, turns: int) -> Shown:
        # The messages of ``reset`` are the first observation.
        older = len(past.exchanges) + 1 - turns
        if older <= 0:
            return past.everything

        # Older turns are a list of steps behind the task. The observation of the oldest turn that
        # is shown follows the list, in one message, since some templates refuse two in a row.
        steps = [
            _filled(self.settings.step, exchange.answer) for exchange in past.exchanges[:older]
        ]
        heading = filter(None, [self.settings.heading])
        listed = "\n".join(["", *heading, *steps, ""])
        task_images = past.task_images
        first = [_newest(message, 0, task_images, "")[0] for message in past.first]
        actions = Message(first[-1].role, (listed,))
        oldest_shown = past.exchanges[older - 1].messages
        head = _joined([*first, actions, *oldest_shown])
        rest = Past(tuple(head), past.exchanges[older:])
        return rest.everything

    def _rewritten(self, message: Message | PastAnswer) -> Message | PastAnswer:
        if isinstance(message, Message):
            return message
        text = _filled(self.settings.answers, message)
        return message if text == message.text else Message(ASSISTANT, (text,))


class ByLanguage:
    """The settings of ``Window`` with which the makers of the environment's language trained it.

    docs/compatibility.md has them; a language that says nothing shows everything.
    """

    def shown(self, past: Past) -> Shown:
        """See ``History``; ``built`` replaces this object by the language's own policy."""
        raise NotImplementedError("the language of the environment decides")


def _filled(template: str, answer: PastAnswer) -> str:
    values = {
        "{number}": str(answer.number + 1),
        "{index}": str(answer.number),
        "{action}": answer.action,
        "{summary}": answer.summary,
    }
    # In one pass, since the policy may write such a word in braces, too.
    return _FIELDS.sub(lambda match: values[match[0]], template)


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, neighbours of one role as one: some templates refuse two in a row."""
    joined: list[Message] = []
    for message in messages:
        previous = joined[-1] if joined else None
        if previous is None or (previous.role, previous.fields) != (message.role, message.fields):
            joined.append(message)
            continue
        joined[-1] = dataclasses.replace(previous, parts=(*previous.parts, *message.parts))
    return joined


def _last_images(messages: Shown, count: int, always: Collection[ImageSource]) -> Shown:
    """Return the messages with words for all but the last ``count`` images."""
    left = count
    newest_first: list[Message | PastAnswer] = []
    for message in reversed(messages):
        if isinstance(message, Message) and message.images:
            message, left = _newest(message, left, always, FORGOTTEN)
        newest_first.append(message)
    return newest_first[::-1]


def _newest(
    message: Message, count: int, always: Collection[ImageSource], words: str
) -> tuple[Message, int]:
    """Return the message with ``words`` for all but its last ``count`` images, and what is left.

    The images in ``always`` stay, and are not counted.
    """
    parts: list[str | ImageSource] = []
    for part in reversed(message.parts):
        if isinstance(part, str) or part in always:
            parts.append(part)
        elif count > 0:
            count -= 1
            parts.append(part)
        elif words:
            parts.append(words)
    return dataclasses.replace(message, parts=tuple(reversed(parts))), count


def component(value: Any) -> Any:
    """Return a configuration's ``history`` as a component.

    ``full``, ``drop_thoughts``, ``language``, and ``{last_images: n}`` and the like, are short for
    ``{use: ..., with: ...}``.
    """
    if isinstance(value, str):
        if value not in SHORT:
            raise ValueError(f"{value!r} is not one of {', '.join(SHORT)}, {{last_images: n}}")
        return SHORT[value]
    if not isinstance(value, Mapping):
        return value
    # A mapping without `use` has got that of the default.
    options = dict(value)
    use = options.pop("use", WINDOW)
    # A component is accepted with the name of its field, too, as it is dumped.
    given = {**options.pop("with", {}), **options.pop("with_", {})}
    return {"use": use, "with": {**given, **options}}


def shows_everything(history: Component) -> bool:
    """Whether an episode has one context, as with ``full``."""
    return history == Component.model_validate(SHORT["full"])


class EpisodeHistory(NamedTuple):
    """A policy, and the action language in which earlier answers are read; "": none."""

    policy: History
    language: LanguageChoice = ""


FULL = EpisodeHistory(Window(Window.Settings()))


def built(history: Component, environment: EnvironmentKind) -> EpisodeHistory:
    """Return the policy for episodes of an environment. Raises ConfigError as ``of_language``."""
    options = environment.options()
    language: LanguageChoice = getattr(options, "language", "")
    # A page is a phone's where its settings say so, an app on Android by its class.
    screen = getattr(environment.resolve(), "SCREEN", "computer")
    if getattr(options, "device", "") == "phone":
        screen = "phone"
    return EpisodeHistory(of_language(history, language, screen, environment.name), language)


def of_language(history: Component, language: LanguageChoice, screen: str, name: str) -> History:
    """Return the policy for a kind of screen.

    Raises ConfigError where the language decides, and ``name`` has none with a file.
    """
    policy: History = history.build()
    if not isinstance(policy, ByLanguage):
        return policy
    # Only a history that follows the language reads its file.
    from rayloop.envs.grammar.language import spoken_format

    file = spoken_format(language) if language else None
    if not isinstance(file, LanguageFile):
        raise ConfigError(
            f"history is language, and {name} has no language with a file: set full, or another one"
            " of docs/environments.md"
        )
    return Window(Window.Settings.model_validate(file.history(screen)))
