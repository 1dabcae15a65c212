"""Settings of Arc Vision's reward."""

from typing import Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel


class ArcVisionWeights(SettingsModel):
    """Weights of the three terms in the reward."""

    task: float = 0.6
    """Weight of the overlap with the true box."""
    tool: float = 0.3
    """Weight of calls before an answer that overlaps."""
    gate: float = 0.1
    """Weight of the penalties for calls that are missing, unneeded or too many."""


class ToolShares(SettingsModel):
    """r_tool of an answer after a call, as a share of its IoU, by the kind of the true box."""

    small: float = 0.4
    """For a box whose share of the page is below ``small_area``."""
    edge: float = 0.2
    """For a box near the page's border."""
    other: float = 0.1
    """For all remaining boxes, which are seen without a closer look."""
    most: float = 0.4
    """r_tool after a call is at most this."""


class Decay(SettingsModel):
    """Decay of r_tool over the steps: it is multiplied by ``max(least, 1 - step / steps)``."""

    steps: int = Field(0, ge=0)
    """Steps over which paying for tools fades, for example 1000; 0 pays the same at every step."""
    least: float = Field(0.1, ge=0, le=1)
    """The share of r_tool that is paid however late it is."""


class CompletionPenalty(SettingsModel):
    """The penalty for calls without an answer."""

    penalty: float = Field(0.0, ge=0)
    """Subtracted from an episode that called tools and gave no box, for example 0.2; 0 for none."""
    after: int = Field(50, ge=0)
    """It costs nothing up to this step, so that a young policy may explore its tools."""


class Penalties(SettingsModel):
    """Penalties subtracted from r_gate; several add up."""

    missed: float = Field(0.3, ge=0)
    """A small box, no call, and IoU below ``missed_iou``."""
    missed_iou: float = Field(0.5, ge=0, le=1)
    """Below this overlap the answer counts as not having looked closely enough."""
    unneeded: float = Field(0.25, ge=0)
    """More than one call although the box is neither small nor at the edge."""
    wrong: float = Field(0.05, ge=0)
    """A small box, and a call that waits but none that looks closer."""
    excessive: float = Field(0.4, ge=0)
    """More than ``max_tools`` calls, however good the answer is."""


class ArcVisionSettings(SettingsModel):
    """Settings of ``ArcVisionReward``; the defaults are what Arc Vision trained with."""

    variant: Literal["corrected", "original", "library"] = "corrected"
    """corrected: the original's mistakes fixed (README.md).

    To reproduce published numbers: ``original`` reads and pays as Arc Vision's training
    function does, ``library`` as the second function of its repository, which has neither
    ``tool_only`` nor the penalties ``wrong`` and ``excessive``, but takes ``excessive`` from
    r_tool for each call beyond ``max_tools``.
    """
    weights: ArcVisionWeights = ArcVisionWeights()
    row_weights: bool = True
    """Whether a row's ``reward_weights`` replace ``weights``.

    The originals never read them. Off: ``weights`` hold for all rows.
    """
    pixels: Literal["image", "shown", "thousandths"] = "image"
    """Unit of numbers above 1.

    They are pixels of the image file, pixels of the copy that the model was shown (Qwen2.5-VL
    writes these), or thousandths of its sides (Qwen3-VL). The originals guess a screen.
    """
    patch: int = Field(14, ge=1)
    """Pixels of a patch's side, for the size of the copy that the model was shown.

    14 for Qwen2.5-VL, 16 for Qwen3-VL.
    """
    small_area: float = Field(0.05, ge=0, le=1)
    """A true box that covers less of the image than this is small.

    Looking closer at a small box is worth a call.
    """
    edge_margin: float = Field(0.1, ge=0, lt=0.5)
    """A true box that reaches this close to the image's border is at the edge."""
    shares: ToolShares = ToolShares()
    restraint: float = 0.1
    """r_tool without a call, for a box that is not small and is found.

    It is found when the IoU is above ``restraint_iou``.
    """
    restraint_iou: float = Field(0.7, ge=0, le=1)
    """Above this overlap an answer without a call is paid ``restraint``.

    Small boxes are excepted.
    """
    penalties: Penalties = Penalties()
    max_tools: int = Field(2, ge=0)
    """More calls than this cost ``penalties.excessive``, once."""
    tool_only: float | None = None
    """The whole reward of calls without an answer to a small box or one at the edge.

    For other boxes it is 0. None: 0, and in the originals 0.1, which trains a policy to ask and
    never to answer. Set it to ablate that.
    """
    decay: Decay = Decay()
    completion: CompletionPenalty = CompletionPenalty()
    call_tags: tuple[str, ...] = Field(("use_tool", "tool_call"), min_length=1)
    """Tags that count as a call.

    The original's prompt has the first, environments here carry out the second.
    """
    waiting: str = "wait"
    """A call whose text contains this word waits."""
    closer: tuple[str, ...] | None = None
    """A call whose text contains one of these words looks closer.

    None: zoom and crop; the originals know zoom alone.
    """
