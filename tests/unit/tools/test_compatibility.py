"""docs/compatibility.md: what it says is tried here, artefact by artefact."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rayloop.envs.grammar.language import action_format
from rayloop.envs.grammar.rules import Extent
from tests.support.runs import ROOT
from tools.pages import readme
from tools.pages.compatible import languages, pictures, rows, templates, tokenizers
from tools.pages.compatible.artefacts import FORMS, PUBLISHED, Published
from tools.pages.compatible.golden_turns import FAMILIES

PAGE = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")


def cells(first: str) -> list[str]:
    """The cells behind the first one of a line of the page."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: one.name)
def test_a_published_template_is_asked_and_continued_as_transformers_renders_it(
    one: Published,
) -> None:
    found = list(templates.tried(one).values())
    assert templates.DIFFERS not in found
    assert (found[0], found[4]) == (
        templates.EQUAL,
        templates.EQUAL,
    ), "prompts, and a user who goes on"
    assert cells(one.name)[2:] == found, "make docs"


def test_every_family_of_text_that_the_readme_names_has_a_published_template() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| load: text \|(.*)\|$", readme, re.MULTILINE)
    tried = {kind for one in PUBLISHED for kind in one.kinds}
    assert {*re.findall(r"`(\w+)`", row)} - tried == {
        "smollm3",
        "glm4",
    }, "run with tiny weights and another template"


def test_each_template_is_in_the_table_and_has_a_source() -> None:
    folder: Path = ROOT / "tests/published"
    assert {file.stem for file in folder.glob("*.jinja")} == {one.name for one in PUBLISHED}
    assert "Apache-2.0" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_tokenizer_has_transformers_tokens_and_keeps_typed_markup_text(
    form: str,
) -> None:
    assert tokenizers.tried(form) == (True, True, True)
    assert cells(form)[1:] == [templates.EQUAL] * 3


def test_each_layout_of_rows_is_read_as_the_page_says() -> None:
    lines = list(rows.section())
    assert [line for line in lines if line not in PAGE] == [], "make docs"
    refused = [line for line in lines if "refused" in line]
    assert len(refused) == 2, "films, and a prompt that is a number"


@pytest.mark.parametrize("name", pictures.PNGS)
def test_each_form_of_picture_is_shown_as_the_page_says(name: str) -> None:
    data, colours = pictures.PNGS[name]
    assert pictures.shown(data) == ["#" + bytes(colour).hex() for colour in colours]
    assert cells(name) == [", ".join(pictures.shown(data))], "make docs"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_language_of_a_gui_model_is_counted_as_the_page_says(family: str) -> None:
    prompts, *counts, history = cells(f"`{family}`")
    assert prompts == languages.prompts(family), "make docs"
    assert [int(cell) for cell in counts] == [*languages.counted(family)], "make docs"
    assert history == languages.history(family), "make docs"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_of_the_table_asks_for_the_task(family: str) -> None:
    screens = languages.prompts(family)
    for screen in screens.split(", ") if screens != "–" else ():
        messages = action_format(family).messages(screen, Extent(1000, 1000), ["Buy milk."], [])
        assert "Buy milk." in str(messages[-1].parts)


def test_the_readme_has_the_table_of_languages() -> None:
    text = readme.PAGE.read_text(encoding="utf-8")
    assert readme.page(text) == text, "make docs"
    without_table = text.replace(readme.BEGIN, "")
    with pytest.raises(ValueError, match=r"README\.md lacks"):
        readme.page(without_table)


def test_a_check_mark_in_the_readme_is_all_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(languages, "FAMILIES", ["qwen3_5"])
    monkeypatch.setattr(languages, "counted", lambda family: (15, 15, 14, 0, 15, 7))
    *_, line = languages.overview()
    assert line == "| `qwen3_5` | ✓ | ✓ | 14/15 | 0/15 | 7/15 | ✓ |"
