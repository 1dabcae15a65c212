"""Loading configurations: origins, layers, overrides, errors that a person can act on, and the way
back to YAML.
"""

from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from rayloop.config.explain import kind_of, models, walk
from rayloop.config.settings import (
    Component,
    SettingsModel,
    check_components,
    dump,
    load,
    local_path,
)
from rayloop.core.failures import ConfigError
from rayloop.grpo.losses.settings import CustomLoss, GspoLoss, ReinforceLoss
from rayloop.run.config import RunConfig
from rayloop.run.lifetime import RecoverySettings
from rayloop.serve_apps.settings import ServeFile
from rayloop.sft.stage import SftConfig
from tests.support.runs import set_key, settings
from tools.pages.config import COMPONENTS, components_page, describe, leaf_keys, page
from tools.pages.settings import field_texts

Write = Callable[..., Path]


class Cat(SettingsModel):
    """Purrs."""

    kind: Literal["cat"] = "cat"
    lives: int = Field(9, ge=1)
    """How many are left."""


class Dog(SettingsModel):
    kind: Literal["dog"] = "dog"
    tricks: tuple[str, ...] = ()


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


class Garden(SettingsModel):
    size: float = Field(1.0, gt=0, lt=100)
    sunny: bool = True


class House(SettingsModel):
    name: str
    pets: tuple[Pet, ...] = (Cat(),)
    favourite: Pet = Dog()
    garden: Garden | None = None
    rooms: dict[str, float] = {}
    stairs: bool = False
    part: Component | None = None

    @model_validator(mode="after")
    def _pets(self) -> House:
        if self.stairs and len(self.pets) > 2:
            raise ValueError("stairs are too narrow for three pets")
        return self


class Torch:
    """A component without anything to set."""


class Lamp:
    """A component with a component inside."""

    class Settings(SettingsModel):
        watts: int = Field(40, gt=0)
        inner: Component | None = None

    def __init__(self, settings: Lamp.Settings) -> None:
        self.settings = settings


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(text: str, name: str = "house.yaml") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return to_file


def refused(path: Path, *overrides: str, model: type[SettingsModel] = House) -> list[str]:
    """The problems that loading reports, with the file's folder left out."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, model)
    header, *problems = str(caught.value).replace(f"{path.parent}/", "").splitlines()
    return [problem.strip() for problem in problems] or [header]


def test_values_and_overrides(write: Write) -> None:
    path = write("""
        name: no
        favourite: {kind: cat, lives: 1_000}
        pets: [{kind: dog}, {kind: cat}]
        garden: {size: 1e-6}
        """)
    overrides = [
        "pets.1.lives=3",
        "garden.sunny=false",
        "rooms={attic: 2.5}",
        "rooms.cellar=1",
        "stairs=true",
    ]
    house = load(path, overrides, House)
    assert house == House(
        name="no",
        favourite=Cat(lives=1000),
        pets=(Dog(), Cat(lives=3)),
        garden=Garden(size=1e-6, sunny=False),
        rooms={"attic": 2.5, "cellar": 1.0},
        stairs=True,
    )


def test_every_problem_is_listed_with_its_line(write: Write) -> None:
    path = write("""\
        nam: a
        garden:
          size: 1e6
          suny: true
        pets:
          - kind: cat
            lives: zero
          - {kind: bird}
          - tricks: [sit]
        favourite: {kind: dog, lives: 3}
        """)
    assert refused(path, "stairs=perhaps") == [
        "house.yaml: name: must be set",
        "house.yaml:7: pets.0.lives: got 'zero', expected a whole number",
        "house.yaml:8: pets.1.kind: got 'bird', expected one of cat, dog",
        "house.yaml:9: pets.2: needs a `kind`",
        (
            "house.yaml:10: favourite.lives: unknown key; it is a key of pets.*.lives and"
            " favourite.lives. Keys here: kind, tricks"
        ),
        "house.yaml:3: garden.size: got 1000000.0, expected a number less than 100",
        "house.yaml:4: garden.suny: unknown key; did you mean `sunny`? Keys here: size, sunny",
        "command line: stairs: got 'perhaps', expected true or false",
        (
            "house.yaml:1: nam: unknown key; did you mean `name`? Keys here: name, pets, favourite,"
            " garden, rooms, stairs, part"
        ),
    ]


def test_a_rule_across_keys_is_reported_without_a_line(write: Write) -> None:
    path = write("name: a\nstairs: true\npets: [{kind: cat}, {kind: cat}, {kind: dog}]\n")
    assert refused(path) == ["house.yaml: configuration: stairs are too narrow for three pets"]


def test_unknown_keys_of_the_run_configuration_name_the_nearest(write: Write) -> None:
    path = write("""\
        name: a
        steps: 1
        model: {path: m}
        data: {train: t.jsonl}
        reward: {source: {use: "a:B"}}
        algorithm:
          group_siz: 4
        lr: 1e-5
        policy: {optimizer: {kind: adamw}}
        weight_sync: {transport: {timeout: 3}}
        """)
    kind, group_size, transport, lr = refused(path, model=RunConfig)
    several = "rollout.engine.kind and policy.loss.kind and algorithm.advantage.kind"
    assert kind.startswith(
        f"house.yaml:9: policy.optimizer.kind: unknown key; it is a key of {several}. Keys here:"
        " lr, "
    )
    assert transport.startswith(
        "house.yaml:10: weight_sync.transport.timeout: unknown key; it is a key of reward.timeout. "
    )
    assert group_size.startswith(
        "house.yaml:7: algorithm.group_siz: unknown key; did you mean `group_size`?"
    )
    assert lr.startswith("house.yaml:8: lr: unknown key; it is a key of policy.optimizer.lr.")


def test_extends_merges_mappings_replaces_lists_and_keeps_origins(
    write: Write, tmp_path: Path
) -> None:
    (tmp_path / "presets").mkdir()
    write(
        "name: base\ngarden: {size: 2, sunny: false}\npets: [{kind: cat}]\nfavourite: {kind: cat,"
        " lives: 3}\n"
    )
    write("extends: ../house.yaml\ngarden: {size: -1}\n", "presets/middle.yaml")
    path = write(
        "extends: middle.yaml\nname: top\npets: [{kind: dog}]\nfavourite: {kind: dog}\n",
        "presets/top.yaml",
    )

    house = load(path, ["garden.size=5"], House)
    assert (house.name, house.pets, house.favourite) == ("top", (Dog(),), Dog())
    assert house.garden == Garden(size=5, sunny=False)
    assert refused(path) == ["middle.yaml:2: garden.size: got -1, expected a number greater than 0"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"house.yaml": "extends: house.yaml\n"}, "extends itself"),
        ({"house.yaml": "extends: b.yaml\n", "b.yaml": "extends: house.yaml\n"}, "extends itself"),
        (
            {"house.yaml": "name: a\nextends: c.yaml\n"},
            "house.yaml:2: extends: the file .*c.yaml does not",
        ),
        (
            {"house.yaml": "extends: [b.yaml]\n"},
            "house.yaml:1: extends: .* expected the name of one YAML file",
        ),
        ({"house.yaml": "name: a\n  b: c\n"}, "house.yaml:2: not valid YAML"),
        (
            {"house.yaml": "name: a\nname: b\n"},
            "house.yaml:2: name: set twice, first at .*house.yaml:1",
        ),
        ({"house.yaml": "- a\n"}, "house.yaml:1: expected keys and values"),
        ({"house.yaml": "[a]: b\n"}, "house.yaml:1: .*a key must be a plain text"),
        ({"house.yaml": "name: !python/name:os.system\n"}, "house.yaml:1: not valid YAML"),
        ({}, "house.yaml: cannot be read"),
    ],
)
def test_files_that_cannot_work(
    write: Write, tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        write(text, name)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "house.yaml", [], House)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stairs", "expected key.sub=value"),
        ("=1", "expected key.sub=value"),
        ("garden..size=1", "expected key.sub=value"),
        ("stairs=[", "stairs: .* is not valid YAML"),
        ("pets.7.lives=1", "pets is a list of 1; use an index below that"),
        ("pets.first.lives=1", "pets is a list of 1"),
        ("rooms.0.a=1", "no file sets the list rooms; set it as a whole"),
        ("name.first=b", "name is 'a', which has no keys"),
    ],
)
def test_malformed_overrides(write: Write, override: str, message: str) -> None:
    path = write("name: a\npets: [{kind: cat}]\n")
    with pytest.raises(ConfigError, match=f"^command line: .*{message}"):
        load(path, [override], House)


def test_a_key_that_only_the_command_line_has_is_refused_under_its_name(write: Write) -> None:
    path = write("name: a\n")
    (problem,) = refused(path, "gardn.size=3")
    assert problem.startswith("command line: gardn: unknown key")


def test_an_override_of_the_kind_starts_its_mapping_afresh(write: Write) -> None:
    path = write("name: a\nfavourite: {kind: cat, lives: 3}\n")
    assert load(path, ["favourite.kind=dog", "favourite.tricks=[sit]"], House).favourite == Dog(
        tricks=("sit",)
    )
    assert load(path, ["favourite.kind=cat"], House).favourite == Cat(lives=3)


def test_a_kind_over_a_mapping_without_one_starts_it_afresh(write: Write, tmp_path: Path) -> None:
    """Its keys belong to the default kind; those of the command line stay."""
    reward = (
        "model: {path: m}\ndata: {train: t}\nreward: {source: {use: 'a:b'}}\nsteps: 1\nname: a\n"
    )
    base = write(reward + "policy: {loss: {clip_high: 0.28}}\n")
    chosen = ["policy.loss.kl_coef=0.1", "policy.loss.kind=reinforce"]
    assert load(base, chosen, RunConfig).policy.loss == ReinforceLoss(kl_coef=0.1)
    assert load(base, ["policy.loss.use=mine:loss"], RunConfig).policy.loss == CustomLoss(
        use="mine:loss"
    )
    (tmp_path / "own.yaml").write_text(
        f"extends: {base.name}\npolicy: {{loss: {{kind: gspo}}}}\n", encoding="utf-8"
    )
    assert load(tmp_path / "own.yaml", [], RunConfig).policy.loss == GspoLoss()


def lamp(**options: Any) -> str:
    return f"part: {{use: '{Lamp.__module__}:Lamp', with: {options}}}\n"


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file under its own module name, whatever import mode pytest runs in."""
    monkeypatch.setitem(sys.modules, Lamp.__module__, sys.modules[__name__])


@pytest.mark.usefixtures("importable")
def test_components_are_checked_under_their_own_path(write: Write) -> None:
    path = write("name: a\n" + lamp(wats=3, watts=0))
    with pytest.raises(ConfigError) as caught:
        check_components(load(path, [], House))
    _, watts, unknown = str(caught.value).splitlines()
    assert watts.endswith("house.yaml:2: part.with.watts: got 0, expected a number greater than 0")
    assert "house.yaml:2: part.with.wats: unknown key; did you mean `watts`?" in unknown


@pytest.mark.usefixtures("importable")
def test_components_inside_components_are_checked(write: Write) -> None:
    path = write("name: a\n" + lamp(inner={"use": "rayloop.core.types:Nothing"}))
    with pytest.raises(
        ConfigError,
        match=r"house.yaml:2: part.with.inner: use: 'rayloop.core.types:Nothing' cannot",
    ):
        check_components(load(path, [], House))
    check_components(load(path, [f"part.with.inner.use={Lamp.__module__}:Lamp"], House))


@pytest.mark.parametrize(
    "use", ["rayloop.core.types:Task", "rayloop.nothing:Task", "Task", "", ":", "rayloop.core:"]
)
def test_a_component_that_is_none_is_named(write: Write, use: str) -> None:
    path = write(f"name: a\npart:\n  use: '{use}'\n")
    with pytest.raises(ConfigError, match=r"house.yaml:3: part: use: "):
        check_components(load(path, [], House))


def test_dump_loads_to_an_equal_object(write: Write) -> None:
    text = (
        "name: 'on'\npets: []\ngarden: {size: 1e-7}\nrooms: {'1': .5}\npart: {use: 'a:B', with: {x:"
        " [1, null, 'y']}}\n"
    )
    house = load(write(text), [], House)
    expanded = dump(house)
    again = load(write(expanded, "again.yaml"), [], House)
    assert again == house
    assert dump(again) == expanded
    assert "stairs: false" in expanded


@pytest.mark.usefixtures("importable")
def test_dump_can_expand_components(write: Write) -> None:
    house = load(write("name: a\n" + lamp()), [], House)
    again = load(write(dump(house, expand_components=True), "again.yaml"), [], House)
    assert again.part is not None
    assert again.part.with_ == {"watts": 40, "inner": None}


def test_paths_are_relative_to_the_current_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_path("a/b.jsonl") == tmp_path / "a" / "b.jsonl"
    assert local_path("~/x") == Path.home() / "x"


RUN = """
    name: run
    steps: 1
    model: {path: ~/model}
    data: {train: "~/rows.jsonl"}
    reward: {source: {use: "rayloop.recipes.digits.data:SortReward"}}
"""


def test_the_home_folder_is_expanded_in_every_path_of_a_run(write: Write) -> None:
    resume = "checkpoint.resume=~/runs/a/checkpoints/step_000001"
    run = load(write(RUN), ["output=~/runs", "data.eval=~/eval.jsonl", resume], RunConfig)
    paths = (run.output, run.model.path, run.data.train, run.data.eval, run.checkpoint.resume)
    below = ("runs", "model", "rows.jsonl", "eval.jsonl", "runs/a/checkpoints/step_000001")
    assert paths == tuple(str(Path.home() / name) for name in below)
    kept = load(write(RUN), ["output=../runs", "model.path=owner/name"], RunConfig)
    assert (kept.output, kept.model.path) == ("../runs", "owner/name")


@pytest.mark.parametrize("value", ["$SCRATCH/runs", "/a/${SCRATCH}"])
@pytest.mark.parametrize("key", ["output", "model.path", "data.train", "data.eval"])
def test_an_environment_variable_in_a_path_is_refused(write: Write, key: str, value: str) -> None:
    (problem,) = refused(write(RUN), f"{key}={value}", model=RunConfig)
    assert (
        problem
        == f"command line: {key}: got {value!r}, but environment variables are not expanded here;"
        " write the path itself"
    )


def test_a_default_component_can_be_set_in_part(write: Write) -> None:
    run = load(
        write(RUN),
        ["data.reader.with.prompt=question", "environment.episode.environment.with={}"],
        RunConfig,
    )
    assert run.data.reader == Component(
        use="rayloop.data.dataset:ChatRows", with_={"prompt": "question"}
    )
    check_components(run)
    other = load(
        write(RUN), ['data.reader={use: "rayloop.recipes.digits.data:DigitRows"}'], RunConfig
    )
    assert other.data.reader == Component(use="rayloop.recipes.digits.data:DigitRows")
    written = 'reward:\n      source: {use: "rayloop.recipes.digits.data:SortReward"}\n'
    written += "    data: {train: a, reader: {with: {trut: b}}}"
    text = RUN.replace('data: {train: "~/rows.jsonl"}', "").replace(
        RUN.splitlines()[-1].strip(), written
    )
    with pytest.raises(ConfigError, match=r"data\.reader\.with\.trut: unknown key"):
        check_components(load(write(text), [], RunConfig))
    (problem,) = refused(write("name: a\npart: {with: {watts: 1}}"))
    assert problem.endswith("part.use: must be set"), "there is no default to add to"


def test_the_name_of_a_run_is_explained(write: Write) -> None:
    (problem,) = refused(write(RUN), "name=my run", model=RunConfig)
    expected = "expected letters, digits, '.', '_' and '-', beginning with a letter or digit"
    assert problem == f"command line: name: got 'my run', {expected}"


def test_a_component_that_is_only_named_is_shown_as_one(write: Write) -> None:
    (problem,) = refused(write(RUN), "reward.source=sums:closeness", model=RunConfig)
    assert (
        problem
        == """command line: reward.source: got 'sums:closeness', expected {use: "sums:closeness"}"""
    )


def test_a_module_in_another_directory_is_named(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = write("name: a\npart: {use: 'far_grader:score'}")
    for beside in (False, True):
        if beside:
            (tmp_path / "far_grader.py").write_text("def score(): ...", encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            check_components(load(path, [], House))
        assert f"looked for in the current directory, {tmp_path / 'elsewhere'}, and" in str(
            caught.value
        )
        assert (
            f"far_grader is next to the configuration: run the command in {tmp_path}"
            in str(caught.value)
        ) == beside


def test_the_folder_of_a_module_is_written_without_detours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("far", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "far/house.yaml").write_text(
        "name: a\npart: {use: 'grader_far_away:score'}", encoding="utf-8"
    )
    (tmp_path / "far/grader_far_away.py").write_text("def score(): ...", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match=f"run the command in {tmp_path}/far$"):
        check_components(load(Path("../here/../far/house.yaml"), [], House))


@pytest.mark.parametrize("by_path", [False, True])
def test_a_module_that_a_component_imports_and_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_path: bool
) -> None:
    (tmp_path / "lacking_grader.py").write_text("import no_such_helper", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = str(tmp_path / "lacking_grader.py") if by_path else "lacking_grader"
    with pytest.raises(
        ConfigError,
        match=r"lacking_grader.* imports no_such_helper, which is neither installed nor",
    ) as caught:
        Component(use=f"{module}:score").resolve()
    assert (
        "a file given by its path finds none in the file's folder" in str(caught.value)
    ) == by_path


def test_a_folder_that_another_package_hides_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml/mine.py").write_text("def score(): ...", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=f"{tmp_path}/yaml is hidden by the package yaml in .*/yaml; rename yours"
    ):
        Component(use="yaml.mine:score").resolve()


@pytest.mark.parametrize("name", ["recipes", "judge", "benchmarks", "tests"])
def test_a_project_may_name_its_folders_like_ours(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.py").write_text("def score(): return 7", encoding="utf-8")
    program = (
        "from rayloop.config.settings import Component;"
        f" print(Component(use='{name}.mine:score').resolve()())"
    )
    (tmp_path / "site").mkdir()
    (tmp_path / "site/rayloop").symlink_to(
        Path(__file__).parents[3] / "rayloop"
    )  # as installed: nothing lies beside it
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "7\n", done.stderr


def test_the_reference_describes_every_key() -> None:
    page = describe(House)
    assert "## `pets.*` with `kind: cat`" not in page, "a class used at two places has one section"
    assert "## `pets.*`, `favourite` with `kind: cat`\n\nPurrs.\n" in page
    assert "| `lives` | integer, >= 1 | `9` | How many are left. |" in page
    assert "| `size` | number, > 0, < 100 | `1.0` |  |" in page
    assert "| `name` | text | **required** |  |" in page
    assert "| `garden` | section or null | `null` |  |" in page


def test_a_key_is_each_path_that_can_be_set_to_a_value() -> None:
    assert leaf_keys(House) == {
        "name": [""],
        "pets.*.kind": ["", ""],
        "pets.*.lives": ["How many are left."],
        "pets.*.tricks": [""],
        "favourite.kind": ["", ""],
        "favourite.lives": ["How many are left."],
        "favourite.tricks": [""],
        "garden.size": [""],
        "garden.sunny": [""],
        "rooms": [""],
        "stairs": [""],
        "part.use": leaf_keys(Component)["use"],
        "part.with": leaf_keys(Component)["with"],
    }


def test_a_value_in_place_of_a_section_is_a_key_too() -> None:
    class Street(SettingsModel):
        lamp: Literal["none"] | Garden = "none"
        """Light."""

    assert leaf_keys(Street) == {"lamp": ["Light."], "lamp.size": [""], "lamp.sunny": [""]}


PAGES = [("config.md", "rayloop.run.config:RunConfig"), ("sft.md", "rayloop.sft.stage:SftConfig")]


@pytest.mark.parametrize(("name", "model"), PAGES)
def test_the_pages_of_the_configurations_are_current(name: str, model: str) -> None:
    docs = Path(__file__).parents[3] / "docs" / name
    assert docs.read_text(encoding="utf-8") == page(model), "run: make docs"


SHIPPED = [
    Component(use=use).settings_class() or BaseModel for uses in COMPONENTS.values() for use in uses
]


def meanings(*roots: type[BaseModel]) -> dict[str, str]:
    """``Class.key`` -> its meaning, of every key that is a value; sections and the kinds of one
    speak for themselves.
    """
    return {
        f"{model.__name__}.{name}": field_texts(model)[name]
        for root in roots
        for _, model in walk(root)
        for name, info in model.model_fields.items()
        if not models(info.annotation) and not (name == "kind" and kind_of(model))
    }


def says_little(key: str, meaning: str, least: int) -> bool:
    """Whether it is hardly more than the key's own name: so few other words cannot say what it does
    and when to change it.
    """
    name = set(re.findall(r"[a-z]+", key.lower()))
    return (
        len([word for word in re.findall(r"[a-z0-9]+", meaning.lower()) if word not in name])
        < least
    )


def test_every_key_says_what_it_is_for_and_when_to_change_it() -> None:
    """Whether a sentence is good advice no test can decide; that there is room for both, it can."""
    found = meanings(RunConfig, SftConfig, ServeFile)
    assert len(found) > 150
    short = [key for key, meaning in found.items() if says_little(key, meaning, least=8)]
    assert not short, (
        f"{short}: a docstring of at least 8 words beside the key's own name: what it is, when to"
        " change it"
    )


def test_every_setting_of_a_shipped_component_says_what_it_is_for() -> None:
    assert [
        key for key, meaning in meanings(*SHIPPED).items() if says_little(key, meaning, least=4)
    ] == []


def test_a_meaning_that_is_only_the_name_again_is_found() -> None:
    assert says_little("Cat.max_lives", "The maximum of lives, max lives.", 4)
    assert says_little("Cat.lives", "", 4)
    assert not says_little("Cat.lives", "How many are left; raise it for kittens that climb.", 8)


def test_the_examples_of_the_page_on_settings_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/choosing_settings.md").read_text(encoding="utf-8")
    found = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(found) == 3
    for text in found:
        RunConfig.model_validate(
            settings(tmp_path, tmp_path) | {"algorithm": {}, "policy": {}} | yaml.safe_load(text)
        )


def test_the_page_of_the_components_is_current_and_leaves_none_out() -> None:
    root = Path(__file__).parents[3]
    text = (root / "docs/components.md").read_text(encoding="utf-8")
    assert text == components_page(), "run: make docs"
    shipped = [
        f"{'.'.join(('rayloop', *path.relative_to(root).with_suffix('').parts)).replace('rayloop.rayloop', 'rayloop')}:{node.name}"
        for package in ("rayloop", "recipes", "judge", "actors")
        for path in (root / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(inner, ast.ClassDef) and inner.name == "Settings" for inner in node.body)
    ]
    assert len(shipped) > 10
    assert [name for name in shipped if f"### `{name}`" not in text] == []
    assert "`tagged_box`" in text
    assert "<answer>" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "weight_sync.transport": {"kind": "nccl"},
                "policy.placement": {"num_gpus": 1},
                "rollout.placement": {"num_gpus": 0.5},
            },
            (
                "nccl sends between GPUs that are not shared, and policy.placement.num_gpus is 1"
                " and rollout"
            ),
        ),
        (
            {
                "weight_sync.transport": {"kind": "collective"},
                "rollout.engine": {"kind": "vllm", "extra": {"enable_sleep_mode": True}},
                "policy.placement": {"num_gpus": 0.5},
                "rollout.placement": {"num_gpus": 0.5},
            },
            "engines that share GPUs in turns are asleep while the policy sends; use object_store",
        ),
    ],
)
def test_transports_that_the_placement_does_not_allow_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = settings(tmp_path, tmp_path)
    for key, value in changes.items():
        set_key(config, key, value)
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(config)


@pytest.mark.parametrize(
    ("engine", "gpus", "workers"),
    [
        ({"kind": "transformers"}, 0, 0),
        ({"kind": "vllm"}, 0, 1),
        ({"kind": "vllm"}, 4, 4),
        ({"kind": "vllm", "extra": {"pipeline_parallel_size": 2}}, 4, 4),
        ({"kind": "vllm", "extra": {"tensor_parallel_size": 2}}, 0, 2),
        ({"kind": "sglang", "extra": {"tp_size": 2}}, 2, 2),
        ({"kind": "sglang", "extra": {"tp_size": 2, "pp_size": 2}}, 4, 0),
    ],
)
def test_every_process_of_an_engine_is_a_member_of_a_broadcast(
    engine: dict[str, Any], gpus: int, workers: int, tmp_path: Path
) -> None:
    config = settings(
        tmp_path,
        tmp_path,
        rollout__engine=engine,
        weight_sync={"transport": {"kind": "collective"}},
    )
    config["rollout"]["placement"] = {"num_gpus": gpus}
    found = pickle.loads(pickle.dumps(RunConfig.model_validate(config).transport))
    assert (found.workers, found.timeout) == (
        workers,
        found.share * RunConfig.model_validate(config).sync_timeout,
    )


@pytest.mark.parametrize(
    ("rollout", "recovery", "seconds"),
    [
        ({"engine": {"kind": "vllm"}, "placement": {"num_gpus": 1}}, {}, 1200),
        ({"engine": {"kind": "sglang"}, "placement": {"num_gpus": 1}}, {"replacements": 3}, 1200),
        ({"engine": {"kind": "vllm"}, "placement": {"num_gpus": 1}}, {"start_timeout": 400}, 400),
        ({"engine": {"kind": "vllm"}}, {}, 300),
        ({"placement": {"num_gpus": 1}}, {}, 300),
    ],
)
def test_an_engine_that_compiles_has_the_time_for_it(
    rollout: dict[str, Any], recovery: dict[str, Any], seconds: float, tmp_path: Path
) -> None:
    config = settings(tmp_path, tmp_path) | {"rollout": rollout, "recovery": recovery}
    made = RunConfig.model_validate(config)
    assert made.recovery.start_timeout == seconds
    assert made.recovery.replacements == recovery.get(
        "replacements", RecoverySettings().replacements
    )


HTTP = {"kind": "openai_http", "base_url": "http://a/v1", "model": "b"}


@pytest.mark.parametrize("engine", [{"kind": "sglang"}, HTTP, {**HTTP, "interface": "tokens"}])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout.sampling.top_p": 0.8}, r"rollout\.sampling\.top_p is 0\.8: engine\.kind"),
        ({"rollout.sampling.top_k": 20}, r"rollout\.sampling\.top_k is 20: engine\.kind"),
        (
            {"evaluation": {"samples": 2, "over": {"rollout.sampling.top_p": 0.9}}},
            r"rollout\.sampling\.top_p is 0\.9 in evaluations \(evaluation\.over\): engine\.kind",
        ),
    ],
)
def test_an_engine_that_does_not_return_the_kept_tokens_is_refused(
    engine: dict[str, Any], changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    config = settings(tmp_path, tmp_path, rollout__engine=engine)
    RunConfig.model_validate(config)
    for key, value in changes.items():
        set_key(config, key, value)
    with pytest.raises(
        ValidationError,
        match=says + rf": {engine['kind']} does not return .* Use transformers or vllm",
    ):
        RunConfig.model_validate(config)
    config["rollout"]["engine"] = {"kind": "vllm"}
    RunConfig.model_validate(config)


@pytest.mark.parametrize(
    ("key", "value"), [("top_p", 0.0), ("top_p", 1.1), ("top_k", 0), ("top_k", 129)]
)
def test_what_keeps_no_token_or_too_many_is_refused(key: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=rf"rollout\.sampling\.{key}"):
        RunConfig.model_validate(
            settings(tmp_path, tmp_path, **{f"rollout__sampling__{key}": value})
        )


def test_a_temperature_that_vllm_refuses_is_refused_before(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="less than or equal to 2"):
        RunConfig.model_validate(
            settings(tmp_path, tmp_path, rollout__sampling={"temperature": 2.5})
        )


def test_a_class_without_arguments_needs_no_settings() -> None:
    assert isinstance(Component(use=f"{__name__}:Torch").build(), Torch)
    with pytest.raises(ValidationError, match="watts"):
        Component(use=f"{__name__}:Torch", **{"with": {"watts": 3}}).build()
