"""Settings of the policy endpoint. ``policy serve`` fills in those that describe the run."""

from __future__ import annotations

from pydantic import Field

from rayloop.config.model import ModelSettings
from rayloop.config.settings import SettingsModel

MIB = 2**20


class PolicyLimits(SettingsModel):
    """Limits of what the endpoint accepts. Beyond ``held`` it answers 503 with Retry-After, and clients wait."""

    bytes: int = Field(32 * MIB, ge=1024)
    """Bytes of one request's body, with its images. Raise it for long histories of large screenshots."""
    body_seconds: float = Field(10.0, gt=0)
    """Seconds in which one request's body must arrive. Raise it for clients behind slow lines."""
    seconds: float = Field(300.0, gt=0)
    """Seconds for one answer, weight syncs and replaced engines included. Raise it where a weight sync takes long."""
    choices: int = Field(16, ge=1)
    """The most answers that one request may ask for (``n``). Raise it to evaluate with many samples."""
    held: int = Field(256, ge=1)
    """Answers that are being sampled or wait. Lower it to leave more of the engines to the run that trains."""
    queued: int = Field(512, ge=1)
    """Requests that wait in front of the replica (Serve's max_queued_requests). Raise it for many clients at once."""
    history: int = Field(256 * MIB, ge=0)
    """Bytes of tokens and images of remembered conversations, which continue with the very tokens that were sampled.
    Raise it when answers have ``exact: false`` for unchanged conversations."""


class PolicyEndpointSettings(SettingsModel):
    """``args`` of the application: one run, and what its endpoint accepts."""

    run: str
    """The run's name, which is the model's name for clients."""
    namespace: str
    """Ray's namespace of the run's actors, where engines are found by their names."""
    model: ModelSettings
    """The run's model, whose chat template and image rules make the tokens."""
    temperature: float = Field(1.0, gt=0)
    """The temperature of requests that name none: the run's, so that a foreign loop samples the policy that is trained."""
    max_tokens: int = Field(64, gt=0)
    """The limit of sampled tokens for requests that name none: that of a turn of the run."""
    min_tokens: int = Field(0, ge=0)
    """Tokens before which an answer cannot end, for requests that name no number: the run's."""
    tokens: int = Field(8192, gt=1)
    """The most tokens of a conversation with its answer: those of an episode of the run."""
    images: int = Field(32, ge=0)
    """The most images of a conversation: those of an episode of the run."""
    key_file: str | None = None
    """The bearer key that clients must show, in a file that only its owner can read; made when it is missing."""
    insecure: bool = False
    """Whether an endpoint without a key may be served: then everybody who reaches the port may ask it. For loopback only."""
    limits: PolicyLimits = PolicyLimits()
