"""Filters that look at one trajectory at a time: its summary, its reward and its advantage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayloop.core.groups import Member
from rayloop.core.types import EndReason
from rayloop.grpo.filters.base import MemberFilter


class ToolImage(MemberFilter):
    """Keep trajectories in which some observation returned an image (PyVision's ``hasimage``)."""

    kind: Literal["tool_image"] = "tool_image"

    def keeps(self, member: Member) -> bool:
        """True with an image in an observation."""
        return member.summary.observation_images > 0


class ImagesConsistent(MemberFilter):
    """Keep trajectories whose image tokens and images agree (PyVision's ``vtoken_images_num_consis``)."""

    kind: Literal["images_consistent"] = "images_consistent"

    def keeps(self, member: Member) -> bool:
        """True when both agree."""
        return member.summary.images_consistent


class MaxLength(MemberFilter):
    """Keep trajectories of at most ``tokens`` tokens (PyVision's ``trajlength``)."""

    kind: Literal["max_length"] = "max_length"
    tokens: int = Field(128_000, gt=0)
    """Of the whole trajectory, prompt included. Lower it when a few long trajectories take the memory."""

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


class PositiveNegativeAdvantage(MemberFilter):
    """Drop right answers (reward > 0) whose advantage is negative."""

    kind: Literal["positive_negative_advantage"] = "positive_negative_advantage"

    def keeps(self, member: Member) -> bool:
        """Raises ValueError for a member without an advantage."""
        if member.advantage is None:
            raise ValueError(f"trajectory {member.summary.id} has no advantage yet: filters come after advantages")
        return not (member.reward > 0 and member.advantage < 0)
