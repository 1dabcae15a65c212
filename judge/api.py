"""The bodies of ``POST /v1/judge``: items to judge, and their results.

A result is a verdict, or the reason for its absence.
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

MAX_ITEMS = 256
"""The most items of one request. A server may set a lower limit."""
MAX_IMAGES = 8
"""The most images of one item."""


class JudgeMessage(BaseModel):
    """Base of all bodies: immutable; unknown keys, infinities and NaN are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class JudgeItem(JudgeMessage):
    """One answer to judge. Texts are data: nothing in them is followed as an instruction."""

    question: str = Field(max_length=32_768)
    reference: str = Field(min_length=1, max_length=8_192)
    """The right answer."""
    answer: str = Field(max_length=32_768)
    """The extracted answer, not the reasoning before it."""
    rubric: str = Field("equivalence", pattern=r"^[a-z0-9_]{1,64}$")
    """The name of a file in judge/rubrics."""
    source: str = Field("", max_length=128)
    """The data source, which chooses the rubric's examples."""
    images: tuple[Annotated[str, Field(max_length=1024)], ...] = Field((), max_length=MAX_IMAGES)
    """Image files below the server's ``image_roots``, for rubrics that show them.

    Never fetched from a URL.
    """
    fresh: bool = False
    """Ask the model itself: neither rules nor caches answer (canaries, drift checks)."""


class JudgeRequest(JudgeMessage):
    """A batch of items."""

    items: tuple[JudgeItem, ...] = Field(min_length=1, max_length=MAX_ITEMS)


JudgeBody = JudgeItem | JudgeRequest
"""The body of a request: a batch, or one item by itself."""


class VerdictKind(StrEnum):
    """Whether an answer is right."""

    CORRECT = "correct"
    INCORRECT = "incorrect"


class NoVerdict(StrEnum):
    """Why a verdict is missing. ``invalid``: the judge's reply has no verdict."""

    INVALID = "invalid"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"


BackendLabel = Literal["rule", "vllm", "openai"]
Decider = Literal["rules", "model"]


class JudgeVerdict(JudgeMessage):
    """A verdict.

    ``fingerprint`` names model, prompts, rules and sampling. ``decided_by`` rules: no model was
    asked.
    """

    outcome: Literal["scored"] = "scored"
    verdict: VerdictKind
    score: float = Field(ge=0, le=1)
    """1 or 0 for a yes/no rubric; any score for a scored rubric, correct from 0.5."""
    probability: float | None = Field(None, ge=0, le=1)
    """P(correct), from a backend with log-probs."""
    reason: str = Field("", max_length=1024)
    fingerprint: str = Field(min_length=1, max_length=128)
    cached: bool = False
    backend: BackendLabel
    decided_by: Decider

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.verdict is VerdictKind.CORRECT) != (self.score >= 0.5):
            raise ValueError(f"the verdict {self.verdict} contradicts the score {self.score:g}")
        return self


class JudgeUnscored(JudgeMessage):
    """No verdict, which is never a zero: the caller decides what follows."""

    outcome: Literal["unscored"] = "unscored"
    kind: NoVerdict
    reason: str = Field(max_length=1024)
    fingerprint: str = Field("", max_length=128)
    backend: BackendLabel | None = None


Result = JudgeVerdict | JudgeUnscored
JudgeResult = Annotated[Result, Field(discriminator="outcome")]
RESULT: TypeAdapter[Result] = TypeAdapter(JudgeResult)
"""Validates a single result, so that a bad one does not spoil the others of a response."""


class JudgeResponse(JudgeMessage):
    """The results, in the order of the request's items."""

    results: tuple[JudgeResult, ...]


class JudgeVersion(JudgeMessage):
    """The body of ``GET /version``."""

    version: str
    fingerprint: str
    backend: BackendLabel
    model: str
    rubrics: dict[str, str]
    """The version of each rubric."""
