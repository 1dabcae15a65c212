"""Chat templates of strangers: those that would take the memory, or never end, are refused in a
sentence.
"""

from __future__ import annotations

import shutil
import time
import tracemalloc
from pathlib import Path

import jinja2
import pytest

from rayloop.chat import bounded
from rayloop.chat.rendering import Renderer
from rayloop.chat.template import ChatTemplate, load_chat_template
from rayloop.config.model import ModelSettings
from rayloop.core.failures import ConfigError

CHAT = [{"role": "user", "content": "hello"}]
TWICE = (
    "{% set ns = namespace(a=[1], b=[1]) %}"
    "{% for x in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
LARGE = [
    "{{ 'x' * 3000000000 }}",
    "{{ 3000000000 * 'x' }}",
    "{% set x = [0] * 3000000000 %}",
    "{{ ('x' * 1000000) * 3000 }}",
    (
        "{% set ns = namespace(s='xx') %}{% for a in range(40) %}{% set ns.s = ns.s + ns.s %}{%"
        " endfor %}"
    ),
    (
        "{% set ns = namespace(s='xx') %}{% for a in range(40) %}{% set ns.s = ns.s ~ ns.s %}{%"
        " endfor %}"
    ),
    (
        "{% set ns = namespace(s='xx') %}{% for a in range(40) %}{% set ns.s %}{{ ns.s }}{{ ns.s"
        " }}{% endset %}{% endfor %}"
    ),
    (
        "{% set ns = namespace(s=[1]) %}{% for a in range(40) %}{% set ns.s = ns.s + ns.s %}{%"
        " endfor %}"
    ),
    "{% set s = 'x' * 1000000 %}{% for a in range(3000) %}{{ s }}{% endfor %}",
    "{% set s = 'x' * 1000000 %}{{ s.replace('x', s) }}",
    "{% set s = 'x' * 1000000 %}{{ s|replace('x', s) }}",
    "{% set s = 'x' * 1000000 %}{{ range(3000)|join(s) }}",
    "{% set s = 'x' * 1000000 %}{{ range(3000)|map('string')|join(s) }}",
    "{% set s = 'x' * 1000000 %}{{ s.join(range(3000)|map('string')) }}",
    "{{ 'x'.ljust(3000000000) }}",
    "{{ 'x'.zfill(3000000000) }}",
    "{{ '\t'.expandtabs(3000000000) }}",
    "{{ 'x'|center(3000000000) }}",
    "{{ ('a\n' * 1000)|indent(3000000) }}",
    "{{ '%3000000000d' % 1 }}",
    "{{ '%*d' % (3000000000, 1) }}",
    "{{ '%3000000000d'|format(1) }}",
    "{{ '{:3000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 3000000000) }}",
    "{{ [1]|batch(3000000000, 0)|list }}",
    "{{ {'a': 1}|tojson(indent=3000000000) }}",
    "{% set x = 10 ** (10 ** 10) %}",
    "{% set ns = namespace(x=3) %}{% for a in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    (
        "{% macro m() %}{{ 'x' * 1000000 }}{% endmacro %}{% for a in range(3000) %}{% set s = m()"
        " %}{% endfor %}"
    ),
]
ENDLESS = [
    (
        "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{%"
        " endfor %}{% endfor %}"
    ),
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 9 }}{% endfor %}",
]


@pytest.mark.parametrize("source", LARGE)
def test_a_template_cannot_take_the_memory(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MAX_RENDERED_ELEMENTS", 1 << 22)
    tracemalloc.start()
    try:
        with pytest.raises(jinja2.TemplateError, match="makes more than"):
            ChatTemplate(source, {})(CHAT, generation=True)
        assert tracemalloc.get_traced_memory()[1] < 9 * bounded.MAX_RENDERED_ELEMENTS, (
            "eight bytes an element"
        )
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("end", ["{{ ns.a }}", "{{ ns.a|tojson }}", "{{ ns.a == ns.b }}"])
@pytest.mark.parametrize("form", ["[ns.a, ns.a]", "(ns.a, ns.a)", "{1: ns.a, 2: ns.a}"])
def test_collections_that_hold_each_other_twice_are_counted(
    form: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "MAX_RENDERED_ELEMENTS", 1 << 16)
    with pytest.raises(jinja2.TemplateError, match="makes more than"):
        ChatTemplate(TWICE.replace("[ns.a, ns.a]", form) + end, {})(CHAT, generation=True)


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_cannot_go_on_for_ever(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "RENDER_TIMEOUT_S", 0.2)
    began = time.monotonic()
    with pytest.raises(jinja2.TemplateError, match=r"takes more than 0\.2 s"):
        ChatTemplate(source, {})(CHAT, generation=True)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "tag", ["include 'a'", "import 'a' as a", "from 'a' import b", "extends 'a'"]
)
def test_a_template_is_one_file(tag: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(
        f"{{% if false %}}{{% {tag} %}}{{% endif %}}", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="is one file, and cannot read others"):
        load_chat_template(tmp_path)


@pytest.mark.parametrize(
    "source",
    ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ 1 // 0 }}", "{{ 'x' * 3000000000 }}"],
)
def test_a_model_folder_with_such_a_template_is_refused(source: str, tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[3] / "recipes/chart_rvr/tiny", tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(source, encoding="utf-8")
    with pytest.raises(ConfigError, match="chat template"):
        Renderer(ModelSettings(path=str(tmp_path / "model")))


def test_each_rendering_counts_from_the_start_and_says_what_jinja_says() -> None:
    source = (
        "{% for m in messages %}{{ '%05d' % loop.index ~ m.content|replace('l', 'L')|indent(4) ~"
        " [1, 2]|join('-') }}{{ 1700000000|tojson }} {{ '{:>6}'.format(m.role) }} {{ 2 ** 10 + 7 %"
        " 4 }}{% set a, b = (1, [2]) %}{{ {'a': a}['a'] in [1, 3] }}{{ nothing|default(1700000000)"
        " }}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    for _ in range(3):
        assert (
            template(CHAT, generation=True) == "00001heLLo1-21700000000   user 1027True1700000000"
        )
    long = [{"role": "user", "content": "y" * (bounded.MAX_RENDERED_ELEMENTS // 8)}]
    for _ in range(3):
        assert (
            len(ChatTemplate("{{ messages[0].content + '' }}", {})(long, generation=True))
            == bounded.MAX_RENDERED_ELEMENTS // 8
        )
