"""The reference of a settings class in markdown, made from its fields and docstrings.

``python -m tools.pages.config rayloop.run.config:RunConfig`` prints docs/config.md, ``...
components`` docs/components.md.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayloop.config.explain import item, kind_of, members, models, walk
from rayloop.config.settings import Component, NoSettings
from rayloop.config.yaml_source import KeyPath, dotted
from tools.pages.settings import field_texts

HEADER = """# Configuration

Made by `python -m tools.pages.config {target}`; do not edit. {count} keys.

A file may begin with `extends: other.yaml` (relative to the file): mappings merge key by key, lists
are replaced, and a new `kind` or `use` starts its mapping afresh. `key.sub=value` on the command
line comes last. Paths of files are relative to the current directory, with `~` for the home folder.
Where a component has a default, its `with` can be set without its `use`. Which values to choose:
[choosing_settings.md](choosing_settings.md); what `use` can name: [components.md](components.md),
[own_task.md](own_task.md).

"""


def page(target: str) -> str:
    """docs/config.md for the settings class ``module:Class``."""
    model = pkgutil.resolve_name(target)
    return HEADER.format(target=target, count=len(leaf_keys(model))) + describe(model)


COMPONENTS = {
    ("Readers", "data.reader"): (
        "rayloop.data.dataset:ChatRows",
        "rayloop.recipes.arc_vision.data:GroundingRows",
        "rayloop.recipes.arc_vision.data:ScreenRows",
        "rayloop.recipes.chart_rvr.data:ChartRows",
        "rayloop.recipes.chart_rvr.data:ConversationRows",
        "rayloop.recipes.digits.data:DigitRows",
        "rayloop.recipes.pyvision.data:QuestionRows",
        "rayloop.envs.adapters.nemo_gym:NemoGymRows",
        "rayloop.envs.adapters.reasoning_gym:ReasoningGymRows",
    ),
    ("Rewards", "reward.source"): (
        "rayloop.envs.adapters.reasoning_gym:ReasoningGymScore",
        "rayloop.judge.reward:JudgeReward",
        "rayloop.recipes.arc_vision.reward:ArcVisionReward",
        "rayloop.recipes.arc_vision.reward:IoUReward",
        "rayloop.recipes.arc_vision.click_reward:ClickReward",
        "rayloop.recipes.arpo.reward:ArpoReward",
        "rayloop.recipes.chart_rvr.rewards.reward:ChartReward",
        "rayloop.recipes.chart_rvr.measure:ChartAnswer",
        "rayloop.recipes.digits.data:SortReward",
        "rayloop.recipes.pyvision.deepeyes:DeepEyesReward",
        "rayloop.recipes.pyvision.verifiers:OptionReward",
        "rayloop.recipes.pyvision.reward:PyVisionReward",
        "rayloop.rewards.environment_result:EnvironmentResult",
        "rayloop.rewards.shaped:ShapedReward",
    ),
    ("Histories", "environment.history"): (
        "rayloop.envs.history.policies:Window",
        "rayloop.envs.history.policies:ByLanguage",
    ),
    ("Environments", "environment.episode.environment"): (
        "rayloop.envs.single_turn:SingleTurn",
        "rayloop.envs.tools:ToolCalls",
        "rayloop.envs.agent_env:AgentEnv",
        "rayloop.envs.adapters.gymnasium:Gymnasium",
        "rayloop.envs.adapters.mcp:McpTools",
        "rayloop.envs.adapters.nemo_gym:NemoGym",
        "rayloop.envs.adapters.openenv:OpenEnv",
        "rayloop.envs.adapters.textarena:TextArena",
        "rayloop.envs.image_tools:ImageTools",
        "rayloop.recipes.arc_vision.tools:ArcVisionTools",
        "rayloop.envs.browser.miniwob:MiniWob",
        "rayloop.envs.browser.web:WebPage",
        "rayloop.envs.browser.phone:Phone",
        "rayloop.envs.browser.mobilegym:MobileGym",
        "rayloop.envs.adapters.android:Android",
        "rayloop.envs.interpreter.environment:PythonInterpreter",
        "rayloop.envs.desktop.environment:DesktopTasks",
        "rayloop.envs.osworld.environment:OSWorld",
        "rayloop.envs.scripted:ScriptedTool",
    ),
    ("Tools", "environment.episode.environment.with.tools"): ("rayloop.envs.programs:RunProgram",),
    ("Advantages", "algorithm.advantage"): (
        "rayloop.grpo.advantage:Grpo",
        "rayloop.grpo.advantage_kinds:BatchScaled",
        "rayloop.grpo.advantage_kinds:Gdpo",
        "rayloop.grpo.advantage_kinds:TurnReturns",
        "rayloop.grpo.advantage_kinds:Gigpo",
    ),
    ("Curricula", "data.order"): (
        "rayloop.run.order:BySolveRate",
        "rayloop.recipes.arc_vision.data:LargeFirst",
    ),
    ("Blind priors", "evaluation.blind"): (
        "rayloop.recipes.arc_vision.boxes:BlindBox",
        "rayloop.recipes.chart_rvr.measure:BlindChart",
    ),
    ("Boxes to draw", "report.boxes"): ("rayloop.recipes.arc_vision.boxes:GroundingBoxes",),
    ("Answers of the supervised stage", "answers"): (
        "rayloop.sft.answers:AnswerColumn",
        "rayloop.recipes.arc_vision.data:BoxAnswers",
        "rayloop.recipes.chart_rvr.data:ChartAnswers",
        "rayloop.recipes.digits.data:SortedAnswers",
    ),
    ("Embedders", "reward.source.with.embedder"): (
        "rayloop.recipes.chart_rvr.rewards.embedders:OpenAiEmbedder",
        "rayloop.engines.text_embedder:TextEmbedder",
        "rayloop.recipes.chart_rvr.rewards.embedders:WordEmbedder",
    ),
    ("Ways to find a judge", "reward.source.with.judge.discovery"): (
        "rayloop.judge.discovery:FileDiscovery",
        "rayloop.serve_apps.judge.address:RayDiscovery",
    ),
    ("Loggers", "loggers.*"): ("rayloop.run.records.otel:Episodes",),
}
"""Title, and the key that names such a component -> those that are shipped."""

COMPONENTS_HEADER = """# Components that are shipped

Made by `python -m tools.pages.config components`; do not edit. A component is named with `use`
and set with `with`:

    reward:
      source: {use: "rayloop.judge.reward:JudgeReward", with: {answer: whole}}

One of your own, a class or often a plain function, is named in the same way:
[own_task.md](own_task.md).

"""


def components_page() -> str:
    """docs/components.md: what each shipped component is, and its settings."""
    parts = []
    for (title, key), uses in COMPONENTS.items():
        parts.append(f"## {title} (`{key}`)\n")
        for use in uses:
            cls = pkgutil.resolve_name(use)
            about = inspect.cleandoc(cls.__doc__ or "").replace("``", "`")
            model = Component(use=use).settings_class() or NoSettings
            parts += [f"### `{use}`\n", *([f"{about}\n"] if about else []), settings_of(model)]
    return COMPONENTS_HEADER + "\n".join(parts)


def settings_of(model: type[BaseModel]) -> str:
    """The tables of a component's settings: its own, then those of sections within."""
    if not model.model_fields:
        return "Nothing to set.\n"
    lines: list[str] = []
    for current, paths in _used_at(model).items():
        if paths != [()]:
            kind = f" with `kind: {kind_of(current)}`" if kind_of(current) else ""
            lines += [
                f"Within `with`, {', '.join(f'`{dotted(path)}`' for path in paths)}{kind}:",
                "",
            ]
        lines += [*_table(current), ""]
    return "\n".join(lines)


def describe(model: type[BaseModel]) -> str:
    """One section per settings class below ``model``: keys, types, defaults and meanings, in the
    order of the file.

    A class used at several places is described once, under all of its paths.
    """
    return "\n".join(_section(current, paths) for current, paths in _used_at(model).items())


def leaf_keys(model: type[BaseModel]) -> dict[str, list[str]]:
    """Path of each key that a user can set to a value -> its texts, one for each class that has it.

    A section is none, but where a value can stand in its place, that is a key; so is the choice
    between several kinds (``kind``), whose text is that of the section.
    """
    keys: dict[str, list[str]] = {}
    texts_of_sections: dict[str, str] = {}
    for path, current in walk(model):
        for name, info in current.model_fields.items():
            key = dotted((*path, info.alias or name))
            text = field_texts(current)[name]
            if _tag(current, name):
                text = texts_of_sections[dotted(path).removesuffix(".*")]
            if _takes_value(info.annotation):
                keys.setdefault(key, []).append(text)
            else:
                texts_of_sections[key] = text
    return keys


def _takes_value(annotation: Any) -> bool:
    """Whether a value can be set here: not only a section, and no list or mapping of sections."""
    return any(not models(member) and not models(item(member)) for member in members(annotation))


def _tag(model: type[BaseModel], name: str) -> bool:
    return name == "kind" and kind_of(model) is not None


def _used_at(model: type[BaseModel]) -> dict[type[BaseModel], list[KeyPath]]:
    used: dict[type[BaseModel], list[KeyPath]] = {}
    for path, current in walk(model):
        paths = used.setdefault(current, [])
        # A key of all kinds of a section has the same path in each.
        if path not in paths:
            paths.append(path)
    return used


def _section(model: type[BaseModel], paths: list[KeyPath]) -> str:
    names = ", ".join(f"`{dotted(path)}`" if path else "Top level" for path in paths)
    kind = kind_of(model)
    lines = [f"## {names}" + (f" with `kind: {kind}`" if kind else ""), ""]
    if model.__doc__:
        lines += [_linked(inspect.cleandoc(model.__doc__).replace("``", "`")), ""]
    return "\n".join([*lines, *_table(model), ""])


def _table(model: type[BaseModel]) -> list[str]:
    if all(_tag(model, name) for name in model.model_fields):
        return ["Nothing further to set."]
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, info in model.model_fields.items():
        if _tag(model, name):
            continue  # it stands in the heading
        meaning = _linked(" ".join(field_texts(model)[name].split()).replace("``", "`"))
        cells = (f"`{info.alias or name}`", _type(info), _default(info), meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _linked(text: str) -> str:
    """Sections are those of the page on the algorithm."""
    return re.sub(r"(?<!\[)\b([Ss]ection \d+)", r"[\1](algorithm.md)", text)


def _type(info: FieldInfo) -> str:
    limits = [limit for part in info.metadata if (limit := _limit(part))]
    optional = type(None) in get_args(info.annotation)
    return ", ".join(
        [" or ".join(_alternatives(info.annotation)) + (" or null" if optional else ""), *limits]
    )


def _limit(constraint: Any) -> str:
    match constraint:
        case annotated_types.Gt(gt=bound):
            return f"> {bound}"
        case annotated_types.Ge(ge=bound):
            return f">= {bound}"
        case annotated_types.Lt(lt=bound):
            return f"< {bound}"
        case annotated_types.Le(le=bound):
            return f"<= {bound}"
    return ""


def _alternatives(annotation: Any) -> list[str]:
    found = []
    for member in members(annotation):
        if get_origin(member) is Literal:
            found += [f"`{value}`" for value in get_args(member)]
        elif get_origin(member) is tuple and get_args(member)[-1] is not Ellipsis:
            found.append(f"{len(get_args(member))} {_plain(get_args(member)[0])}s")
        elif get_origin(member) in (tuple, list):
            found.append("list of " + " or ".join(_alternatives(item(member))))
        elif get_origin(member) is dict:
            found.append("mapping")
        else:
            found.append(_plain(member))
    return list(dict.fromkeys(found))


def _plain(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        kind = kind_of(annotation)
        return (
            f"kind `{kind}`"
            if kind
            else "component"
            if "use" in annotation.model_fields
            else "section"
        )
    name = str(annotation.__name__)
    return {"str": "text", "bool": "true or false", "int": "integer", "float": "number"}.get(
        name, name
    )


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    value = info.get_default(call_default_factory=True)
    return "" if models(info.annotation) and value is not None else f"`{_written(value)}`"


def _written(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case BaseModel():
            kind = kind_of(type(value))
            return f"{{kind: {kind}}}" if kind else "{...}"
        case tuple() | list():
            return "[" + ", ".join(map(_written, value)) + "]"
        case str():
            return value.replace("\n", "\\n") or '""'
    return str(value)


if __name__ == "__main__":
    print(components_page() if sys.argv[1] == "components" else page(sys.argv[1]), end="")
