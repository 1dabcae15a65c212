"""The runs of the published screen agents: each can start where its model, pages and GPUs are."""

from __future__ import annotations

import pytest

from rayloop.config.settings import check_components
from rayloop.envs.grammar.choice import Model, chosen, spoken
from rayloop.grpo.idle import Situation, idle
from rayloop.run.config import RunConfig, read
from rayloop.run.demand import demand
from tests.support.runs import ROOT

FOLDER = ROOT / "recipes/screen_agents"
GPUS = {"webgym": 64, "openwebrl": 8, "mobilegym": 4, "clawgui": 2, "safactory": 6}
"""System -> the GPUs that its file asks for."""
LANGUAGES = {
    "webgym": "webgym",
    "openwebrl": "openwebrl",
    "mobilegym": "mobilegym",
    "clawgui": "gui_owl",
    "safactory": "qwen3_vl",
}
MODEL_TYPE = "qwen3_vl"
"""The family that all five train."""


@pytest.fixture(params=GPUS)
def system(request: pytest.FixtureRequest) -> tuple[str, RunConfig]:
    return request.param, read(FOLDER / f"{request.param}.yaml", [])


def test_each_has_a_file_of_published_values_and_no_other_is_there() -> None:
    expected = {f"{prefix}{name}.yaml" for name in GPUS for prefix in ("", "published_")}
    assert {path.name for path in FOLDER.glob("*.yaml")} == expected


def test_its_parts_exist_and_no_setting_is_idle(system: tuple[str, RunConfig]) -> None:
    _, config = system
    check_components(config)
    situation = Situation(longest=None)
    assert idle(config.policy.loss, config.algorithm, config.policy.update, situation) == []


def test_it_asks_for_the_gpus_that_it_names(system: tuple[str, RunConfig]) -> None:
    name, config = system
    assert sum(placement.num_gpus for _, placement in demand(config, trains=True)) == GPUS[name]
    assert config.algorithm.target % config.policy.ranks == 0
    assert config.algorithm.groups_per_step >= config.policy.update.mini_batches


def test_its_language_is_one_that_its_model_may_speak(system: tuple[str, RunConfig]) -> None:
    name, config = system
    model = Model(config.model.path, {"model_type": MODEL_TYPE})
    key = "environment.language"
    assert chosen(config.environment.language, model, key) == LANGUAGES[name]
    check_components(spoken(config, LANGUAGES[name], model, key))


def test_the_first_lines_say_that_nobody_ran_it_here(system: tuple[str, RunConfig]) -> None:
    name, _ = system
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    header = text.partition("\nname:")[0]
    assert "Never run here" in header.replace("\n# ", " ")
    assert "docs/published_values.md" in header


def test_the_page_of_papers_names_each() -> None:
    page = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
    assert [name for name in GPUS if f"recipes/screen_agents/{name}.yaml" not in page] == []
