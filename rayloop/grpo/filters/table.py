"""The filters that a configuration can name: by ``kind``, with one line here each, or your own by ``use``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Tag

from rayloop.config.settings import OWN, Component, by_kind
from rayloop.grpo.filters.base import Filter
from rayloop.grpo.filters.equal_rewards import EqualRewards
from rayloop.grpo.filters.members import ImagesConsistent, KeepEndReasons, MaxLength, PositiveNegativeAdvantage, ToolImage
from rayloop.grpo.filters.own import OwnFilter

FilterSettings = Annotated[
    Annotated[EqualRewards, Tag("equal_rewards")]
    | Annotated[ToolImage, Tag("tool_image")]
    | Annotated[ImagesConsistent, Tag("images_consistent")]
    | Annotated[MaxLength, Tag("max_length")]
    | Annotated[KeepEndReasons, Tag("end_reason")]
    | Annotated[PositiveNegativeAdvantage, Tag("positive_negative_advantage")]
    | Annotated[Component, Tag(OWN)],
    by_kind(""),
]


def build_filters(filters: Iterable[FilterSettings]) -> tuple[Filter, ...]:
    """What ``apply_filters`` takes. Raises ConfigError, pydantic.ValidationError for a filter of your own."""
    return tuple(OwnFilter(named) if isinstance(named, Component) else named for named in filters)
