"""Settings of the judge's application, and the file that holds them: Ray Serve's own format, so that ``serve deploy`` takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from judge.api import MAX_ITEMS
from rayloop.config.settings import SettingsModel
from rayloop.engines.settings import VllmEngineSettings

CONFIGS = Path(__file__).parent / "configs"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class RuleBackendSettings(SettingsModel):
    """Deterministic rules alone, for machines without a model. Every answer says so."""

    kind: Literal["rule"] = "rule"


class OpenAIBackendSettings(SettingsModel):
    """Any server that speaks OpenAI's API: ``vllm serve``, Ray Serve LLM, SGLang, a hosted one."""

    kind: Literal["openai"] = "openai"
    url: str = Field(pattern=r"^https?://.+")
    """Up to and including ``/v1``."""
    model: str
    """As that server calls it."""
    key_file: str = ""
    """That server's bearer key, in a file that only its owner can read. "" for none."""
    concurrency: int = Field(64, ge=1)
    """Requests at once, per replica."""
    connect: float = Field(5.0, gt=0)
    timeout: float = Field(90.0, gt=0)
    """Seconds for one reply."""
    max_tokens: int = Field(512, ge=16)
    """Of a verdict with its reason: 200 characters of Thai or of emoji do not fit into 256. Raise it when replies are cut off."""
    logprobs: bool = True
    """Ask for the verdict's probability. Turn it off for a server that refuses it."""


class VllmBackendSettings(SettingsModel):
    """A vLLM engine of our own in each replica."""

    kind: Literal["vllm"] = "vllm"
    model: str
    """A folder in Hugging Face layout, or a model of the Hub."""
    gpus: bool = True
    """Ask Ray for ``engine.tensor_parallel`` GPUs per replica; off on CPUs."""
    engine: VllmEngineSettings = VllmEngineSettings(max_model_len=8192)
    """As for rollouts. A rubric with its examples has 2,000 to 3,000 tokens."""
    revision: str | None = None
    """Branch, tag or commit of a model of the Hub: of weights, tokenizer and chat template alike. Set a commit in production, so
    that every replica loads the same model whenever it starts."""
    timeout: float = Field(90.0, gt=0)
    """Seconds for one reply."""
    max_tokens: int = Field(512, ge=16)
    """Of a verdict with its reason: 200 characters of Thai or of emoji do not fit into 256. Raise it when replies are cut off."""


BackendSettings = Annotated[
    RuleBackendSettings | OpenAIBackendSettings | VllmBackendSettings, Field(discriminator="kind")
]


class LimitSettings(SettingsModel):
    """What one replica accepts. Beyond ``held`` and ``ongoing`` it answers 503 with Retry-After, and clients wait."""

    items: int = Field(64, ge=1, le=MAX_ITEMS)
    """Of one request."""
    bytes: int = Field(4 * 2**20, ge=1024)
    """Of one request's body."""
    image: int = Field(20 * 2**20, ge=1024)
    """Bytes of one image file."""
    images: int = Field(64 * 2**20, ge=1024)
    """Bytes of all image files of one request. Raise it for large batches with images; a replica holds them in memory."""
    seconds: float = Field(120.0, gt=0)
    """For one request's answer; a client's own budget should be longer."""
    body_seconds: float = Field(5.0, gt=0)
    """For one request's body to come. Raise it for clients behind slow lines: a body that is on its way holds a place."""
    held: int = Field(512, ge=1)
    """Items that are being judged or wait."""
    ongoing: int = Field(128, ge=2)
    """Requests of all kinds at once (Serve's max_ongoing_requests): more than ``held`` lets through, so that /healthz answers."""
    queued: int = Field(256, ge=1)
    """Requests that wait in front of all replicas (Serve's max_queued_requests)."""
    chat_tokens: int = Field(4096, ge=1)
    """The most that POST /v1/chat/completions generates."""


class ReplicaSettings(SettingsModel):
    """How many processes judge. ``min`` < ``max``: Serve adds and removes replicas."""

    min: int = Field(1, ge=1)
    max: int = Field(1, ge=1)
    target: float = Field(8.0, gt=0)
    """Ongoing requests per replica that Serve aims at."""
    cpus: float = Field(1.0, ge=0)
    """Logical CPUs of a replica."""
    resources: dict[str, float] = {}
    """Further resources of a replica, as Ray's nodes offer them (``judge: 1`` in deploy/): keeps it off nodes that runs use."""

    @model_validator(mode="after")
    def _ordered(self) -> ReplicaSettings:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self


class CanarySettings(SettingsModel):
    """Known verdicts that the judge must repeat; /readyz fails while it does not."""

    every: float = Field(60.0, gt=0)
    """Seconds between two times."""
    within: float = Field(30.0, gt=0)
    """Seconds that they may take altogether."""
    right: bool = True
    """Whether they must be right; off only for models whose verdicts are noise (tests of the path)."""


class CacheSettings(SettingsModel):
    size: int = Field(100_000, ge=0)
    """Verdicts in the memory of each replica."""
    path: str | None = None
    """An SQLite file on the replica's own disk, for verdicts that outlive it."""


class JudgeSettings(SettingsModel):
    """``args`` of the application. Without any it judges by rules."""

    backend: BackendSettings = RuleBackendSettings()
    key_file: str | None = None
    """The bearer key that clients must show, in a file that only its owner can read and that all nodes see; made when it is
    missing. Relative to the folder in which the application is deployed."""
    insecure: bool = False
    """Whether a judge without a key may be served: then everybody who reaches the port may ask it. For loopback only."""
    rubrics: str | None = None
    """A folder of rubrics in place of judge/rubrics."""
    image_roots: tuple[str, ...] = ()
    """Folders below which an item's images must lie. Empty: no images. A rubric with ``sees_images`` shows them to the model."""
    limits: LimitSettings = LimitSettings()
    replicas: ReplicaSettings = ReplicaSettings()
    canary: CanarySettings = CanarySettings()
    cache: CacheSettings = CacheSettings()


class HttpOptions(SettingsModel):
    host: str = "127.0.0.1"
    """0.0.0.0 to be reached from other machines."""
    port: int = Field(8000, ge=0, le=65535)
    """0: a free one (``judge serve`` only)."""


class ApplicationSettings(SettingsModel):
    name: str = "judge"
    import_path: Literal["serve_apps.judge.app:app"] = "serve_apps.judge.app:app"
    route_prefix: Literal["/"] = "/"
    args: JudgeSettings = JudgeSettings()


class ServeFile(SettingsModel):
    """A file like serve_apps/judge/configs/judge_cpu.yaml: the part of Ray Serve's format that a judge needs."""

    proxy_location: Literal["EveryNode", "HeadOnly"] = "EveryNode"
    """Nodes that answer: those with replicas, and the head."""
    http_options: HttpOptions = HttpOptions()
    applications: tuple[ApplicationSettings, ...] = Field((ApplicationSettings(),), min_length=1, max_length=1)
