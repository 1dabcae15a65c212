"""The language of a run's model: found, refused, and given to all parts of the run that read turns."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayloop.core.failures import ConfigError
from rayloop.core.types import ImageSource, Message, Task
from rayloop.engines.shape import ModelSource
from rayloop.envs.grammar.actions import Actions, Click, Hotkey, Mistake, Point
from rayloop.envs.grammar.choice import Model, chosen, native
from rayloop.envs.grammar.family import BARE
from rayloop.envs.grammar.language import Language, action_format, names
from rayloop.envs.grammar.rules import Extent
from rayloop.envs.grammar.screens import Beginning, ScreenSettings
from rayloop.recipes.arpo.reward import ArpoReward
from rayloop.run.config import RunConfig, read
from rayloop.run.preflight import Prepared
from rayloop.sft.stage import Examples, SftConfig
from rayloop.view.filmstrip import _screen_settings
from tests.support.pictures import picture
from tests.support.runs import ROOT, settings

BROWSER = {"use": "rayloop.envs.browser.web:WebPage", "with": {"folder": "."}}
ANSWER = "Action: click(start_box='(1,1)')"
ARPO = {"use": "rayloop.recipes.arpo.reward:ArpoReward", "with": {}}


class Shouted:
    """A custom language: its turns are CLICK x y."""

    stop = ("!",)

    def read(self, text: str, screen: Extent) -> Actions | Mistake:
        _, *numbers = text.removesuffix("!").split()
        x, y = map(float, numbers)
        return Actions("", (Click(Point(x, y)),))

    def write(self, actions: Actions, screen: Extent) -> str:
        return "CLICK 1 2!"


def speaking(config: RunConfig, source: ModelSource) -> RunConfig:
    """The run with the language of this model."""
    return Prepared(config, source).speaking().config


def model(folder: Path, model_type: str, **more: Any) -> ModelSource:
    folder.mkdir(parents=True)
    described = {"model_type": model_type, **more}
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return ModelSource(str(folder))


def run(folder: Path, **changes: Any) -> RunConfig:
    """A run in web pages with ARPO's reward, as its file has it."""
    values = settings(
        folder,
        folder / "model",
        environment__episode__environment=changes.pop("kind", BROWSER),
        reward__source=ARPO,
        **changes,
    )
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return read(file, [])


@pytest.mark.parametrize(
    ("path", "described", "expected"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", {"model_type": "qwen3_vl"}, "qwen3_vl"),
        ("models/mine", {"model_type": "qwen3_vl_moe"}, "qwen3_vl"),
        ("models/mine", {"model_type": "qwen2_5_vl"}, "qwen2_5_vl"),
        ("Qwen/Qwen3.5-9B", {"model_type": "qwen3_5"}, "qwen3_5"),
        ("ByteDance-Seed/UI-TARS-1.5-7B", {"model_type": "qwen2_5_vl"}, "ui_tars"),
        ("models/ui_tars_2b_sft/", {"model_type": "qwen2_vl"}, "ui_tars"),
        (
            "models/mine",
            {"model_type": "qwen2_5_vl", "_name_or_path": "x/UI-TARS-1.5-7B"},
            "ui_tars",
        ),
        ("mPLUG/GUI-Owl-1.5-8B-Instruct", {"model_type": "qwen3_vl"}, "gui_owl"),
        ("mPLUG/GUI-Owl-7B", {"model_type": "qwen2_5_vl"}, "gui_owl"),
        ("OpenGVLab/ScaleCUA-7B", {"model_type": "qwen2_5_vl"}, "internvl"),
        ("OpenGVLab/InternVL3_5-8B", {"model_type": "internvl_chat"}, "internvl"),
        ("xlangai/OpenCUA-7B", {"model_type": "opencua"}, "opencua"),
        ("xlangai/Aguvis-7B-720P", {"model_type": "qwen2_vl"}, "aguvis"),
        ("zai-org/GLM-4.5V", {"model_type": "glm4v_moe"}, "glm_v"),
        ("zai-org/cogagent-9b-20241220", {"model_type": "chatglm"}, "cogagent"),
        # A text model, a name whose weights are others, and a name in the middle of a path.
        ("THUDM/chatglm3-6b", {"model_type": "chatglm"}, ""),
        ("models/GUI-Owl-teacher", {"model_type": "llava"}, ""),
        ("runs/ui-tars/step_10", {"model_type": "qwen2_5_vl"}, "qwen2_5_vl"),
    ],
)
def test_a_model_is_known_by_its_name_and_else_by_its_type(
    path: str, described: dict[str, Any], expected: str
) -> None:
    assert native(Model(path, described))[0] == expected


def test_names_and_types_are_of_one_language() -> None:
    defaults = [
        (entry_type, file.family)
        for file in map(action_format, names())
        for entry in file.models
        for entry_type in entry.types
        if entry.default
    ]
    types = [entry_type for entry_type, family in defaults]
    assert len({*defaults}) == len({*types}), defaults


def test_auto_that_finds_nothing_says_what_to_set() -> None:
    with pytest.raises(ConfigError) as refused:
        chosen("auto", Model("models/mine", {"model_type": "llava"}), "environment.language")
    assert str(refused.value).startswith(
        "environment.language is auto, and no language is known of models/mine, a llava. Set"
        " environment.language to ui_tars, which any model may learn, or to one of aguvis,"
    )


@pytest.mark.parametrize(
    ("choice", "path", "model_type"),
    [
        ("qwen2_5_vl", "Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl"),
        ("qwen3_vl", "models/mine", "glm4v"),
        ("qwen2_5_vl", "ByteDance-Seed/UI-TARS-1.5-7B", "qwen2_5_vl"),
        ("qwen3_vl", "mPLUG/GUI-Owl-1.5-8B", "qwen3_vl"),
        ("opencua", "models/mine", "qwen3_vl"),
    ],
)
def test_a_language_of_other_models_is_refused(choice: str, path: str, model_type: str) -> None:
    speaker = Model(path, {"model_type": model_type})
    own = native(speaker)[0]
    with pytest.raises(ConfigError) as refused:
        chosen(choice, speaker, "environment.language")
    assert str(refused.value) == (
        f"environment.language is {choice}, but {path} is a {model_type} that was trained on {own}:"
        f" its own turns would be mistakes. Set environment.language to auto or {own}, or to"
        " ui_tars, which any model may learn"
    )


@pytest.mark.parametrize(
    ("choice", "path", "model_type"),
    [
        ("ui_tars", "models/mine", "glm4v"),  # any model may learn it
        ("webgym", "models/mine", "glm4v"),  # it is an environment's own
        ("qwen3_vl", "models/mine", "llava"),  # it has no language to lose
        ("gui_owl", "models/mine", "qwen2_5_vl"),  # it may be one of them in a folder of any name
        ("gui_owl", "Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl"),  # GUI-Owl builds on it
    ],
)
def test_other_choices_are_taken(choice: str, path: str, model_type: str) -> None:
    assert chosen(choice, Model(path, {"model_type": model_type}), "key") == choice


def test_environment_and_reward_have_the_language_of_the_model(tmp_path: Path) -> None:
    source = model(tmp_path / "model", "qwen3_vl")
    config = speaking(run(tmp_path), source)
    assert config.environment.language == "qwen3_vl"
    kind = config.environment.episode.environment.options()
    assert isinstance(kind, ScreenSettings)
    assert kind.language == "qwen3_vl"
    assert (kind.pointing.coordinates, kind.pointing.factor) == ("relative", 32)
    assert config.reward.source.with_["language"] == "qwen3_vl"
    # The film strips read the stored configuration.
    stored = config.model_dump(mode="json", by_alias=True)
    assert _screen_settings(stored)["language"] == "qwen3_vl"
    assert speaking(config, source) == config


def test_the_stop_words_of_a_language_end_the_turns(tmp_path: Path) -> None:
    source = model(tmp_path / "Aguvis-7B", "qwen2_vl")
    config = run(tmp_path, rollout__sampling__stop=["</s>"])
    assert speaking(config, source).rollout.sampling.stop == ("</s>", "<|diff_marker|>")


def test_a_model_points_as_its_version_does(tmp_path: Path) -> None:
    def coordinates(path: str, model_type: str, **given: Any) -> str:
        kind = {**BROWSER, "with": {"folder": ".", **given}}
        config = speaking(run(tmp_path, kind=kind), model(tmp_path / path, model_type))
        options = config.environment.episode.environment.options()
        assert isinstance(options, ScreenSettings)
        return options.pointing.coordinates

    assert coordinates("GUI-Owl-1.5-8B", "qwen3_vl") == "relative"
    assert coordinates("GUI-Owl-7B", "qwen2_5_vl") == "absolute"
    assert coordinates("UI-TARS-1.5-7B", "qwen2_5_vl") == "absolute"
    assert coordinates("UI-TARS-7B-SFT", "qwen2_vl") == "relative"
    assert coordinates("OpenCUA-Qwen2-7B", "opencua") == "fraction"
    given = {"pointing": {"coordinates": "fraction"}}
    assert coordinates("2/GUI-Owl-7B", "qwen2_5_vl", **given) == "fraction"


def test_a_part_with_another_language_is_refused(tmp_path: Path) -> None:
    kind = {**BROWSER, "with": {"folder": ".", "language": "ui_tars"}}
    with pytest.raises(ConfigError) as refused:
        speaking(run(tmp_path, kind=kind), model(tmp_path / "model", "qwen3_vl"))
    assert str(refused.value) == (
        "environment.episode.environment.with.language is ui_tars, and environment.language is"
        " qwen3_vl: all parts of a run have the language of its model. Leave"
        " environment.episode.environment.with.language out, and set environment.language to"
        " ui_tars if the model speaks it"
    )


def test_arpos_own_reader_has_no_other_language(tmp_path: Path) -> None:
    kind = {**BROWSER, "with": {"folder": ".", "variant": "original"}}
    config = speaking(run(tmp_path, kind=kind), model(tmp_path / "model", "qwen3_vl"))
    with pytest.raises(ValueError, match=r"Set environment.language to ui_tars, or variant to cor"):
        config.environment.episode.environment.options()
    with pytest.raises(ValueError, match=r"ARPO's rules, and these belong to ui_tars"):
        ArpoReward.Settings(variant="original", language="qwen3_vl")


def test_a_run_in_which_nothing_reads_turns_needs_no_language(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings(tmp_path, tmp_path / "model")), encoding="utf-8")
    config = read(file, [])
    assert speaking(config, ModelSource(str(tmp_path / "nowhere"))) == config


def test_a_class_of_ones_own_is_a_language(tmp_path: Path) -> None:
    use = {"use": f"{__name__}:Shouted"}
    config = speaking(
        run(tmp_path, environment__language=use), model(tmp_path / "model", "qwen3_vl")
    )
    assert config.rollout.sampling.stop == ("!",)
    kind = config.environment.episode.environment.options()
    assert isinstance(kind, ScreenSettings)
    assert not isinstance(kind.language, str)
    assert kind.language.use == use["use"]


def test_a_file_of_ones_own_is_a_language(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "like: qwen3_vl\nfamily: mine\nstop: [END]\n"
        "prompts: {computer: {user: 'Please: {instruction}', wording: mine}}\n",
        encoding="utf-8",
    )
    language = action_format(str(file))
    assert isinstance(language, Language)
    assert language.rules == action_format("qwen3_vl").rules  # type: ignore[union-attr]
    config = speaking(
        run(tmp_path, environment__language=str(file)), model(tmp_path / "model", "qwen3_vl")
    )
    assert config.rollout.sampling.stop == ("END",)
    [message] = beginning(str(file)).messages(bare(), "Go.")
    assert message == Message("user", ("Please: Go.",))


def bare() -> Task:
    return Task("t", (Message("user", (BARE["task"],)),), bare=True)


def beginning(language: str, screen: str = "computer") -> Beginning:
    return Beginning(ScreenSettings(language=language), screen, (1000, 500))


def test_a_row_that_only_says_the_task_gets_the_languages_prompt() -> None:
    system, user = beginning("qwen3_vl").messages(bare(), "Click {tools}.", "SCREEN")
    assert system.role == "system"
    assert '"name": "computer_use"' in system.parts[0]
    assert "1000x1000" in system.parts[0]
    # What a task says is not filled in, and this language shows the screen first.
    assert user == Message("user", ("SCREEN", "Task: Click {tools}."))
    system, user = beginning("qwen3_vl", "phone").messages(bare(), "Call.", "SCREEN")
    assert '"name": "mobile_use"' in system.parts[0]
    assert user.parts[1] == "SCREEN"
    resized, _ = beginning("qwen2_5_vl").messages(bare(), "Go.")
    assert "1008x504" in resized.parts[0]


def test_a_row_with_a_prompt_keeps_it() -> None:
    task = Task("t", (Message("user", ("Do this: {instruction}",)),))
    assert beginning("qwen3_vl").messages(task, "Go.", "SCREEN") == (
        Message("user", ("Do this: Go.", "SCREEN")),
    )


def test_a_language_without_a_prompt_says_where_it_is() -> None:
    with pytest.raises(Exception, match=r"the language openai_computer has no prompt here .*like:"):
        beginning("openai_computer").messages(bare(), "Go.")


@pytest.mark.parametrize("name", [name for name in names() if name != "ui_tars"])
def test_prompts_name_what_the_language_reads(name: str) -> None:
    """Each function and action of a schema has a rule, and each prompt says the task."""
    file = action_format(name)
    assert isinstance(file, Language)
    for prompt in file.prompts.values():
        assert "{instruction}" in prompt.user
        for tool in prompt.tools:
            properties = file.tools[tool]["parameters"]["properties"]
            groups = [rules for rules in file.rules if rules.function == tool]
            calls = {rule.call for rules in groups for rule in rules.calls}
            if groups:
                assert {*properties["action"]["enum"]} <= calls
                known = {*(a for g in groups for r in g.calls for a in (*r.arguments, *r.when))}
                assert {*properties} - {"action"} <= known
            else:
                rules_of_tool = [r for g in file.rules for r in g.calls if r.call == tool]
                known = {a for r in rules_of_tool for a in (*r.arguments, *r.when, *file.ignored)}
                assert {*properties} <= known, tool


@pytest.mark.parametrize(
    ("name", "key", "text"),
    [
        ("openai_computer", "enter", '"ENTER"'),
        ("anthropic_computer", "pagedown", '"Page_Down"'),
        ("opencua", "meta", "'win'"),
    ],
)
def test_keys_have_the_languages_names(name: str, key: str, text: str) -> None:
    unit = Extent(1000, 1000)
    written = action_format(name).write(Actions("", (Hotkey((key,)),)), unit)
    assert text in written
    found = action_format(name).read(written, unit)
    assert isinstance(found, Actions)
    assert found.actions == (Hotkey((key,)),)


def test_keys_of_one_text_are_joined() -> None:
    unit = Extent(1000, 1000)
    turn = Actions("", (Hotkey(("ctrl", "c")),))
    assert '"text": "ctrl+c"' in action_format("anthropic_computer").write(turn, unit)
    assert "key(keys='ctrl+c')" in action_format("glm_v").write(turn, unit)


def test_the_supervised_stage_asks_in_the_language_of_its_model(tmp_path: Path) -> None:
    def stage(language: str) -> SftConfig:
        return SftConfig.model_validate(
            {
                "output": str(tmp_path / "out"),
                "steps": 1,
                "model": {"path": str(ROOT / "recipes/arpo/tiny")},
                "data": {"train": str(tmp_path / "rows.jsonl")},
                "language": language,
            }
        )

    shown = ImageSource(data=picture(200, 100))
    task = Task("t", (Message("user", ("Click it.", shown)),), ANSWER, bare=True)
    examples = Examples(stage("ui_tars").speaking())
    prompt, answer = examples.item(task, random.Random(0)).trajectory.turns
    text = examples.renderer.decode(prompt.token_ids)
    assert "You are a GUI agent." in text
    assert "## User Instruction\nClick it." in text
    assert len(prompt.images) == 1
    assert examples.renderer.decode(answer.token_ids).startswith(ANSWER)
    with pytest.raises(ConfigError, match=r"^language is qwen3_vl, but .* trained on qwen2_5_vl"):
        stage("qwen3_vl").speaking()
