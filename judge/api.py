"""What goes over the wire of ``POST /v1/judge``: items to judge, and a verdict or a reason why there is none for each."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

MAX_ITEMS = 256
"""The most items that a request may hold by its schema. A server may set a lower limit."""
MAX_IMAGES = 8
"""Of one item."""


class Wire(BaseModel):
    """Base of the messages: immutable; unknown keys, infinities and NaN are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class JudgeItem(Wire):
    """One answer to judge. Texts are data: nothing in them is followed as an instruction."""

    question: str = Field(max_length=32_768)
    reference: str = Field(min_length=1, max_length=8_192)
    """The right answer."""
    answer: str = Field(max_length=32_768)
    """The extracted answer, not the reasoning before it."""
    rubric: str = Field("equivalence", pattern=r"^[a-z0-9_]{1,64}$")
    """The name of a file in judge/rubrics."""
    source: str = Field("", max_length=128)
    """The data source: chooses the rubric's examples."""
    images: tuple[Annotated[str, Field(max_length=1024)], ...] = Field((), max_length=MAX_IMAGES)
    """Image files below the server's configured roots, for rubrics that look at them. Never fetched from a URL."""
    fresh: bool = False
    """Ask the model itself: neither rules nor caches answer (canaries, drift checks)."""


class JudgeRequest(Wire):
    items: tuple[JudgeItem, ...] = Field(min_length=1, max_length=MAX_ITEMS)


JudgeBody = JudgeItem | JudgeRequest
"""The body of a request: a batch, or one item by itself."""


def items_of(body: JudgeBody) -> tuple[JudgeItem, ...]:
    return body.items if isinstance(body, JudgeRequest) else (body,)


class VerdictKind(StrEnum):
    CORRECT = "correct"
    INCORRECT = "incorrect"


class NoVerdict(StrEnum):
    """Why there is no verdict. ``invalid``: the judge answered something that is none."""

    INVALID = "invalid"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"


BackendLabel = Literal["rule", "vllm", "openai"]
Decider = Literal["rules", "model"]


class JudgeVerdict(Wire):
    """``fingerprint`` names model, prompts, rules and sampling. ``decided_by`` rules: no model was asked."""

    outcome: Literal["scored"] = "scored"
    verdict: VerdictKind
    score: float = Field(ge=0, le=1)
    """1 and 0 for a yes/no rubric; a scored rubric uses the range, and is correct from 0.5."""
    probability: float | None = Field(None, ge=0, le=1)
    """Of ``correct``, when the backend can tell."""
    reason: str = Field("", max_length=1024)
    fingerprint: str = Field(min_length=1, max_length=128)
    cached: bool = False
    backend: BackendLabel
    decided_by: Decider

    @model_validator(mode="after")
    def _agrees(self) -> JudgeVerdict:
        if (self.verdict is VerdictKind.CORRECT) != (self.score >= 0.5):
            raise ValueError(f"the verdict {self.verdict} contradicts the score {self.score:g}")
        return self


class JudgeUnscored(Wire):
    """Never a zero: the caller's policy decides what follows."""

    outcome: Literal["unscored"] = "unscored"
    kind: NoVerdict
    reason: str = Field(max_length=1024)
    fingerprint: str = Field("", max_length=128)
    backend: BackendLabel | None = None


Result = JudgeVerdict | JudgeUnscored
JudgeResult = Annotated[Result, Field(discriminator="outcome")]
RESULT: TypeAdapter[Result] = TypeAdapter(JudgeResult)
"""Validates one result of a response by itself, so that a bad one does not spoil the others."""


class JudgeResponse(Wire):
    """``results`` are in the order of the request's items."""

    results: tuple[JudgeResult, ...]


class JudgeVersion(Wire):
    """The body of ``GET /version``."""

    version: str
    fingerprint: str
    backend: BackendLabel
    model: str
    rubrics: dict[str, str]
    """The version of each rubric."""
