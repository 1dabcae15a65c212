"""What every filter keeps to: the shipped ones, with settings at and beside their defaults, and
those of the documentation.

A new filter: a line in ``rayloop/grpo/filters.py``, and this suite finds it; what it refuses, in
``worst`` below.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloop.config.explain import kind_of, models
from rayloop.config.settings import Component, check_components, load
from rayloop.core.failures import ConfigError, FilterBroken
from rayloop.core.groups import Group, TrajectoryState
from rayloop.core.types import EndReason
from rayloop.grpo.advantage import with_advantages
from rayloop.grpo.filters import Filter, FilterSettings, KeepEndReasons, MaxLength, build_filters
from rayloop.grpo.selection import apply_filters
from rayloop.grpo.settings import AdvantageSettings, FilteringSettings
from tests.support.pages import write_snippets
from tests.unit.groups import make_group


def few_turns(group: Group, most: int = 1) -> dict[int, str]:
    return {
        i: "many_turns"
        for i, member in enumerate(group.members)
        if member.kept and member.summary.turns > most
    }


SHIPPED = [model for model in models(FilterSettings) if model is not Component]
DEFAULTS: list[Any] = [model() for model in SHIPPED]
OTHERS = [
    MaxLength(tokens=10),
    KeepEndReasons(keep=()),
    *build_filters([Component(use=f"{__name__}:few_turns")]),
]
FILTERS: list[Filter] = [*DEFAULTS, *OTHERS]


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Groups with advantages; members differ in all that a filter may look at, and some have left
    the group already.
    """
    rewards = draw(st.lists(st.sampled_from([None, 0.0, 0.25, 0.5, 1.0]), max_size=6))
    group = with_advantages(make_group(draw(st.integers(0, 9)), rewards), AdvantageSettings())
    for i, member in enumerate(group.members):
        summary = replace(
            member.summary,
            length=draw(st.sampled_from([9, 10, 11, 200_000])),
            turns=draw(st.integers(1, 3)),
            observation_images=draw(st.integers(0, 1)),
            images_consistent=draw(st.booleans()),
            cut=draw(st.booleans()),
            end_reason=draw(st.sampled_from(list(EndReason))),
        )
        group = group.map({i: replace(member, summary=summary)})
    return group


each = pytest.mark.parametrize("filter", FILTERS, ids=lambda f: type(f).__name__)


@each
@given(groups())
@settings(max_examples=60)
def test_it_only_takes_members_out(filter: Filter, group: Group) -> None:
    """Never invents members, keeps their order, changes nothing but fates, and these to
    ``filtered`` with a reason.
    """
    filtered = apply_filters(group, [filter])
    assert len(filtered.members) == len(group.members)
    for before, after in zip(group.members, filtered.members, strict=True):
        assert replace(after, status=before.status) == before
        if after.status != before.status:
            assert before.kept
            assert after.status is not None
            assert after.status.state is TrajectoryState.FILTERED
            assert after.status.reason
    assert replace(filtered, members=group.members) == group, (
        "mean, std and all else of the group stay"
    )


@each
@given(groups())
@settings(max_examples=60)
def test_it_says_the_same_again(filter: Filter, group: Group) -> None:
    """It depends on the group alone, does not change it, and finds nothing more in what it left."""
    before = repr(group)
    first = filter.refused(group)
    assert dict(filter.refused(group)) == dict(first)
    assert repr(group) == before
    once = apply_filters(group, [filter])
    assert apply_filters(once, [filter]) == once


@each
@given(groups())
@settings(max_examples=30)
def test_it_never_refuses_one_that_has_left(filter: Filter, group: Group) -> None:
    gone = apply_filters(group, [KeepEndReasons(keep=(EndReason.DONE,))])
    assert all(gone.members[i].kept for i in filter.refused(gone))


@given(groups(), st.lists(st.sampled_from(FILTERS), max_size=5))
@settings(max_examples=100)
def test_the_order_decides_the_reason_and_nothing_else(group: Group, chosen: list[Filter]) -> None:
    def left(filters: list[Filter]) -> list[bool]:
        return [member.kept for member in apply_filters(group, filters).members]

    assert left(chosen) == left(chosen[::-1])
    for i, member in enumerate(apply_filters(group, chosen).members):
        if member.status is not None and group.members[i].kept:
            assert member.status.reason == next(
                f.refused(group)[i] for f in chosen if i in f.refused(group)
            )


def test_each_shipped_filter_refuses_something() -> None:
    """A filter that never does anything would pass all of the above."""
    worst = {
        "length": 200_000,
        "observation_images": 0,
        "images_consistent": False,
        "cut": True,
        "end_reason": EndReason.OVER_LENGTH,
    }
    cases = [make_group(0, [1.0, 1.0], **worst), make_group(0, [1.0, 0.25, 0.0], **worst)]
    ready = [with_advantages(group, AdvantageSettings()) for group in cases]
    idle = [type(f).__name__ for f in DEFAULTS if not any(f.refused(group) for group in ready)]
    assert not idle, f"{', '.join(idle)}: add to `worst` above what it refuses with its defaults"


def test_each_kind_has_a_name_of_its_own_and_can_be_configured() -> None:
    kinds = [kind_of(model) for model in SHIPPED]
    assert len(set(kinds)) == len(kinds) == len(DEFAULTS)
    read = FilteringSettings.model_validate({"filters": [{"kind": kind} for kind in kinds]})
    assert list(read.filters) == DEFAULTS


# One's own ----------------------------------------------------------------------------------------


def raising(group: Group) -> dict[int, str]:
    raise KeyError("no such column")


def inventing(group: Group) -> dict[int, str]:
    return {len(group.members): "x"}


def silent(group: Group) -> dict[int, Any]:
    return {0: ""}


def nothing(group: Group) -> None: ...


def unrelated(trajectory: Any) -> bool:
    return True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", "the filter .*:raising raised on group 3 .*: KeyError: 'no such column'"),
        (
            "inventing",
            (
                r"the filter .*:inventing refused {2: 'x'} of group 3: .* kept members \(here \[0,"
                r" 1\]\)"
            ),
        ),
        ("silent", "the filter .*:silent refused {0: ''} of group 3"),
        ("nothing", "the filter .*:nothing raised on group 3"),
    ],
)
def test_a_filter_that_is_wrong_ends_the_run_with_its_name(name: str, message: str) -> None:
    (own,) = build_filters([Component(use=f"{__name__}:{name}")])
    with pytest.raises(FilterBroken, match=message):
        apply_filters(make_group(3, [1.0, 0.0]), [own])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            f"{{use: '{__name__}:unrelated'}}",
            r"filters.0: use: .*:unrelated' is a function of \(trajectory\), which cannot be the filter",
        ),
        (
            f"{{use: '{__name__}:few_turns', with: {{least: 1}}}}",
            "filters.0: use: .* does not take the arguments in `with`",
        ),
        ("{use: 'nowhere:f'}", "filters.0: use: 'nowhere:f' cannot be loaded"),
        (f"{{use: '{__name__}:Group'}}", "filters.0: use: .* has no nested Settings class"),
        (
            "{kind: max_lenght}",
            (
                "filters.0.kind: got 'max_lenght', expected one of equal_rewards, .*did you mean"
                " `max_length`"
            ),
        ),
        ("{kind: max_length, token: 3}", "filters.0.token: unknown key; did you mean `tokens`"),
        ("{use: 'a:f', wiht: {}}", "filters.0.wiht: unknown key; did you mean `with`"),
        ("max_length", "filters.0.kind: got '', expected one of equal_rewards, tool_image"),
        ("{tokens: 3}", "filters.0.kind: got '', expected one of equal_rewards, tool_image"),
    ],
)
def test_what_is_no_filter_is_refused_with_its_place(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "filtering.yaml"
    path.write_text(f"ranking: std\nfilters: [{line}]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"(?s)filtering\.yaml:2: {message}"):
        check_components(load(path, [], FilteringSettings))


def test_the_filters_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_snippets("bring_your_own/filter.md", tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    read = load(folder / "filtering.yaml", [], FilteringSettings)
    check_components(read)
    equal, brief, spread = build_filters(read.filters)
    group = with_advantages(make_group(0, [1.0, 0.0, 0.9]), AdvantageSettings())
    long = replace(group.members[1], summary=replace(group.members[1].summary, turns=9))
    assert dict(brief.refused(group.map({1: long}))) == {1: "many_turns"}
    assert dict(spread.refused(group)) == {}
    narrow = with_advantages(make_group(0, [1.0, 0.95]), AdvantageSettings())
    assert dict(spread.refused(narrow)) == {0: "narrow", 1: "narrow"}
    assert dict(equal.refused(narrow)) == {}
