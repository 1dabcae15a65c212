"""Filters take members out of groups: by ``kind``, or custom ones by ``use``.

Each kind has a line in ``FilterSettings``. No torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, Tag

from rayloop.config.settings import CUSTOM, Component, Role, SettingsModel, by_kind, takes
from rayloop.core.failures import FilterBroken
from rayloop.core.groups import Group, Member
from rayloop.core.types import EndReason


class Filter(Protocol):
    """Takes members out of a group before it competes for a step (docs/algorithm.md, section 4)."""

    def refused(self, group: Group) -> Mapping[int, str]:
        """Position in ``group.members`` -> the reason under which it is counted.

        The metric is ``filtered/<reason>``. Only kept members may be refused; all of these are
        scored and have an advantage. Every filter sees the group as it was before the first one, so
        none depends on the place of another. It must not depend on anything but the group, nor
        change it.
        """


class MemberFilter(SettingsModel):
    """Base of filters that look at one member at a time; the reason is their ``kind``."""

    kind: str

    def keeps(self, member: Member) -> bool:
        """Whether ``member`` may be trained on."""
        raise NotImplementedError

    def refused(self, group: Group) -> Mapping[int, str]:
        """The kept members that ``keeps`` refuses."""
        return {
            i: self.kind
            for i, member in enumerate(group.members)
            if member.kept and not self.keeps(member)
        }


RIGHT_REWARD = 1.0
"""Equal rewards of at least this are counted as all_right; they are refused in any case."""
WRONG_REWARD = 0.0
"""Equal rewards of at most this are counted as all_wrong; they are refused in any case."""


class EqualRewards(SettingsModel):
    """Group filter: a group whose advantages are all 0 is not trained on.

    With most kinds of advantage these are the groups of equal rewards; gdpo, gigpo and turns may
    give such a group other advantages. Counted as all_right, all_wrong or all_equal.
    """

    kind: Literal["equal_rewards"] = "equal_rewards"

    def refused(self, group: Group) -> Mapping[int, str]:
        """All kept members, or none. A lone sample has nothing to be equal to, and stays."""
        reason = reason_of_no_gradient(group.kept)
        if not reason:
            return {}
        return {i: reason for i, member in enumerate(group.members) if member.kept}


def reason_of_no_gradient(members: Sequence[Member]) -> str:
    """all_right, all_wrong or all_equal when all advantages of these members are 0, else "".

    Also "" for fewer than two members, and when one is trained without the policy gradient (its
    weight ``rl`` is 0). Raises ValueError for a member without an advantage.
    """
    credits = [member.credit for member in members if member.credit is not None]
    if len(credits) < len(members):
        raise ValueError("a member has no advantage yet: filters come after advantages")
    # Without the policy gradient, the other losses train whatever the advantages are.
    if len(credits) < 2 or any(credit.teaches or credit.streams.rl == 0 for credit in credits):
        return ""
    return equality([member.reward for member in members]) or "all_equal"


def equality(rewards: Sequence[float]) -> str:
    """all_right, all_wrong or all_equal when no two rewards differ; "" when some do."""
    if len(rewards) < 2 or max(rewards) > min(rewards):
        return ""
    if min(rewards) >= RIGHT_REWARD:
        return "all_right"
    return "all_wrong" if max(rewards) <= WRONG_REWARD else "all_equal"


class ToolImage(MemberFilter):
    """Keep trajectories in which some observation returned an image (PyVision's ``hasimage``)."""

    kind: Literal["tool_image"] = "tool_image"

    def keeps(self, member: Member) -> bool:
        """True with an image in an observation."""
        return member.summary.observation_images > 0


class ImagesConsistent(MemberFilter):
    """Keep trajectories whose image tokens and images agree.

    It is PyVision's ``vtoken_images_num_consis``.
    """

    kind: Literal["images_consistent"] = "images_consistent"

    def keeps(self, member: Member) -> bool:
        """True when both agree."""
        return member.summary.images_consistent


class MaxLength(MemberFilter):
    """Keep trajectories of at most ``tokens`` tokens (PyVision's ``trajlength``)."""

    kind: Literal["max_length"] = "max_length"
    tokens: int = Field(128_000, gt=0)
    """Limit of the whole trajectory, prompt included.

    Lower it when a few long trajectories take the memory.
    """

    def keeps(self, member: Member) -> bool:
        """True up to ``tokens``."""
        return member.summary.length <= self.tokens


class KeepEndReasons(MemberFilter):
    """Keep trajectories that ended for one of these reasons (PyVision's ``end_reason``)."""

    kind: Literal["end_reason"] = "end_reason"
    keep: tuple[EndReason, ...] = (EndReason.DONE, EndReason.MAX_TURNS, EndReason.ACTION_ERROR)
    """Reasons to keep; the others (over_length, ...) are left out."""

    def keeps(self, member: Member) -> bool:
        """True for a reason of ``keep``."""
        return member.summary.end_reason in self.keep


class Overlong(MemberFilter):
    """Keep trajectories none of whose turns was cut at a limit of tokens.

    It is the overlong filtering of DAPO, arXiv:2503.14476.
    """

    kind: Literal["overlong"] = "overlong"

    def keeps(self, member: Member) -> bool:
        """True when no sampled turn was cut."""
        return not member.summary.cut


class PositiveNegativeAdvantage(MemberFilter):
    """Drop right answers (reward > 0) whose advantage is negative."""

    kind: Literal["positive_negative_advantage"] = "positive_negative_advantage"

    def keeps(self, member: Member) -> bool:
        """Raises ValueError for a member without an advantage."""
        if member.advantage is None:
            raise ValueError(
                f"trajectory {member.summary.id} has no advantage yet: filters come after"
                " advantages"
            )
        return not (member.reward > 0 and member.advantage < 0)


class CustomFilter:
    """Builds the filter once, and checks what it returns."""

    def __init__(self, component: Component) -> None:
        self._use = component.use
        custom = component.build()
        self._refused: Callable[[Group], Any] = getattr(custom, "refused", custom)

    def refused(self, group: Group) -> Mapping[int, str]:
        """Returns the filter's answer.

        Raises FilterBroken when it raises, refuses a member that is not kept, or lacks a reason.
        """
        try:
            # A foreign filter may return any mapping, and raise anything.
            refused = dict(self._refused(group))
        except Exception as error:
            raise FilterBroken(
                f"the filter {self._use} raised on group {group.number} (task {group.task.id}):"
                f" {type(error).__name__}: {error}"
            ) from error
        positions = {i for i, member in enumerate(group.members) if member.kept}
        errors: dict[Any, Any] = {}
        for position, reason in refused.items():
            has_reason = isinstance(reason, str) and reason
            if position not in positions or not has_reason:
                errors[position] = reason
        if errors:
            raise FilterBroken(
                f"the filter {self._use} refused {errors!r:.200} of group {group.number}: return a"
                f" mapping from positions of kept members (here {sorted(positions)}) to a reason"
                " each"
            )
        return refused


FILTER = Role(
    "filter",
    ("refused",),
    takes(
        "group",
        "filter",
        "Write refused(group), which returns a mapping from positions in group.members to reasons",
    ),
)


FilterSettings = Annotated[
    Annotated[EqualRewards, Tag("equal_rewards")]
    | Annotated[ToolImage, Tag("tool_image")]
    | Annotated[ImagesConsistent, Tag("images_consistent")]
    | Annotated[MaxLength, Tag("max_length")]
    | Annotated[KeepEndReasons, Tag("end_reason")]
    | Annotated[Overlong, Tag("overlong")]
    | Annotated[PositiveNegativeAdvantage, Tag("positive_negative_advantage")]
    | Annotated[Component, Tag(CUSTOM)],
    by_kind(""),
]


def build_filters(filters: Iterable[FilterSettings]) -> tuple[Filter, ...]:
    """The filters for ``apply_filters``.

    Raises ConfigError, pydantic.ValidationError for a custom filter.
    """
    return tuple(
        CustomFilter(settings) if isinstance(settings, Component) else settings
        for settings in filters
    )
