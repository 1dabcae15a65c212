"""What a language's file says besides how calls are written: its models, prompts and source."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from rayloop.config.settings import Component, Role, SettingsModel, components
from rayloop.config.yaml_source import KeyPath
from rayloop.core.types import Message

if TYPE_CHECKING:
    # The settings of every run are built on this module, and few runs read rules of calls.
    from rayloop.envs.grammar.rules import Extent

INSTRUCTION = "{instruction}"
"""The text in a prompt that the task's instruction replaces."""
BARE = {"task": INSTRUCTION}
"""The prompt of a row that only says the task, for ``prompts`` to be put around it."""
LANGUAGE = Role("language", ("read", "write"))
"""Marks a setting of a component that has the language of the run's model.

``choice.py`` sets it from ``environment.language``.
"""
LanguageChoice = Component | str
"""The name of a shipped language, the path of a file (*.yaml), or a class with read and write."""
AUTO = "auto"
"""The choice that leaves the language to the model's name and type."""
ANY_MODEL = "ui_tars"
"""The language that any model may learn: it has no tools and few words."""


class Models(SettingsModel):
    """Models that speak a language."""

    types: tuple[str, ...] = ()
    """Values of ``model_type`` in their config.json."""
    names: tuple[str, ...] = ()
    """Parts of their names, in any case and without regard to signs."""
    default: bool = False
    """Whether ``auto`` takes the language for these types where a model's name says nothing."""
    pointing: dict[str, Any] = {}
    """How these models point, where it differs from the file's ``pointing``."""


class ScreenPrompt(SettingsModel):
    """How an episode begins.

    ``{instruction}`` is the task, ``{tools}`` the schemas of ``tools``, a line each; ``{width}``
    and ``{height}`` are the largest coordinates.
    """

    system: str = ""
    """The system message; empty: no system message."""
    user: str = INSTRUCTION
    image_first: bool = False
    """Whether the screen comes before the text."""
    tools: tuple[str, ...] = ()
    """Names of functions in the file's ``tools``."""
    wording: str = Field(min_length=1)
    """Where the makers' words are, and whose words these are."""


class FactSource(SettingsModel):
    """Where the facts of a language were read. Golden turns name the place of each."""

    paper: str = ""
    page: str
    licence: str


class LanguageFile(SettingsModel):
    """A language's file, but for its calls."""

    family: str
    source: FactSource
    models: tuple[Models, ...] = ()
    """Models that speak it; empty: it is an environment's or a service's own, for any model."""
    pointing: dict[str, Any] = {}
    """Coordinates and resize factor of the family's models, for settings that do not say them."""
    scroll: dict[str, Any] = {}
    """``amount`` and ``unit`` of a scroll that does not say them; empty: ``USUAL_NOTCHES``."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn, besides the chat template's token."""
    keys: dict[str, tuple[str, ...]] = {}
    """Key of the grammar -> its names: the first is written, all are read."""
    tools: dict[str, dict[str, Any]] = {}
    """Function -> its description and parameters, as JSON schema."""
    prompts: dict[str, ScreenPrompt] = {}
    """Kind of screen -> prompt: ``computer``, ``phone``, and ``infeasible`` for a computer with
    tasks that cannot be done.
    """
    histories: dict[str, dict[str, Any]] = {}
    """Kind of screen -> what the makers' models saw of their past: settings of ``Window``."""
    open_questions: tuple[str, ...] = ()
    """What public sources do not settle."""

    def history(self, screen: str) -> Mapping[str, Any]:
        """Return the history for a kind of screen, else the computer's; empty: everything."""
        return self.histories.get(screen) or self.histories.get("computer", {})

    def prompt(self, screen: str) -> ScreenPrompt:
        """Return the prompt for a kind of screen, else the computer's.

        Raises ValueError for a language without one.
        """
        prompt = self.prompts.get(screen) or self.prompts.get("computer")
        if prompt is None:
            raise ValueError(
                f"the language {self.family} has no prompt here ({self.source.page} has its"
                " makers'): give the rows a `prompt`, or set environment.language to a file with"
                f" `like: {self.family}` and `prompts`"
            )
        return prompt

    def messages(
        self, screen: str, unit: "Extent", instruction: Sequence[Any], shown: Sequence[Any]
    ) -> tuple[Message, ...]:
        """Return an episode's first messages.

        ``instruction``: texts and images of the task; ``shown``: the first screen. Raises as
        ``prompt``.
        """
        prompt = self.prompt(screen)
        texts = [part for part in instruction if isinstance(part, str)]
        images = [part for part in instruction if not isinstance(part, str)]
        question = self._filled(prompt, prompt.user, unit).replace(INSTRUCTION, "\n".join(texts))
        pictures = (*images, *shown)
        parts = (*pictures, question) if prompt.image_first else (question, *pictures)
        user = Message("user", parts)
        if not prompt.system:
            return (user,)
        return Message("system", (self._filled(prompt, prompt.system, unit),)), user

    def _filled(self, prompt: ScreenPrompt, text: str, unit: "Extent") -> str:
        tools = "\n".join(
            json.dumps({"type": "function", "function": {"name": name, **self.tools[name]}})
            for name in prompt.tools
        )
        for field, value in {"tools": tools, "width": unit.columns, "height": unit.rows}.items():
            shown = value if isinstance(value, str) else f"{value:g}"
            text = text.replace("{" + field + "}", shown)
        return text

    def of_models(self, model_type: str, *names: str) -> Models | None:
        """Return the entry that has the model's type, and of several the one with its name."""
        fitting = [entry for entry in self.models if model_type in entry.types]
        return max(fitting, key=lambda entry: longest_name(entry, names), default=None)


def listeners(settings: BaseModel) -> list[tuple[KeyPath, Component]]:
    """Return the components of settings that take the run's language, with their paths."""
    found = []
    for path, component in components(settings):
        field = settings_of(component).get("language")
        if field is not None and LANGUAGE in field.metadata:
            found.append((path, component))
    return found


def settings_of(component: Component) -> Mapping[str, FieldInfo]:
    """Return the settings of a component by name; empty for a function."""
    model = component.settings_class()
    return model.model_fields if model else {}


def longest_name(entry: Models, names: Sequence[str]) -> int:
    """Return the length of the longest name of the entry that is part of one of ``names``."""
    texts = [_letters(name) for name in names]
    lengths = [
        len(_letters(name)) for name in entry.names if any(_letters(name) in text for text in texts)
    ]
    return max(lengths, default=0)


def _letters(name: str) -> str:
    """Return a name without its signs, in lower case."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def named_keys(keys: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return a model's names of keys, in lower case -> the grammar's."""
    return {written.lower(): key for key, names in keys.items() for written in names}
