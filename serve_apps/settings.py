"""Settings of the applications.

They are imported before Ray. The judge's file has Ray Serve's own format, so that ``serve deploy``
accepts it; ``policy serve`` fills in the description of the run.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rayloop.config.model import ModelSettings
from rayloop.config.settings import SettingsModel, local_path
from rayloop.engines.settings import VllmEngineSettings
from rayloop.judge.api import MAX_ITEMS

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MIB = 2**20
CONFIGS = Path(__file__).parent / "judge" / "configs"


def _absolute(text: str) -> str:
    return str(local_path(text)) if text else text


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
"""A path that becomes absolute when it is read.

Replicas and clients run in other folders.
"""


class HttpOptions(SettingsModel):
    """Host and port."""

    host: str = "127.0.0.1"
    """The interface to listen on.

    0.0.0.0 makes it reachable from other machines, which needs ``key_file``.
    """
    port: int = Field(8000, ge=0, le=65535)
    """Change it when the port is taken. 0: a free one (the ``serve`` commands only)."""


class RuleBackendSettings(SettingsModel):
    """Deterministic rules alone, for machines without a model. Every verdict names this backend."""

    kind: Literal["rule"] = "rule"


class OpenAIBackendSettings(SettingsModel):
    """Any server that speaks OpenAI's API: ``vllm serve``, Ray Serve LLM, SGLang, a hosted one."""

    kind: Literal["openai"] = "openai"
    url: str = Field(pattern=r"^https?://.+")
    """Up to and including ``/v1``. It must be reachable from the replicas' nodes."""
    model: str
    """The model's name on that server.

    It is vLLM's ``--served-model-name``, or the name in its /v1/models.
    """
    key_file: AbsolutePath = ""
    """That server's bearer key, in a file that only its owner can read. "" for none."""
    concurrency: int = Field(64, ge=1)
    """Requests at once, per replica. Raise it until that server's queue is never empty."""
    connect: float = Field(5.0, gt=0)
    """Seconds for the connection alone. Raise it for a server that is far away."""
    timeout: float = Field(90.0, gt=0)
    """Seconds for one reply. Raise it for a slow model; below ``limits.seconds``."""
    max_tokens: int = Field(512, ge=16)
    """The limit for a verdict with its reason; raise it when replies are cut off.

    200 characters of Thai or of emoji do not fit into 256 tokens.
    """
    logprobs: bool = True
    """Ask for the verdict's probability. Turn it off for a server that refuses it."""


class VllmBackendSettings(SettingsModel):
    """A vLLM engine in each replica."""

    kind: Literal["vllm"] = "vllm"
    model: str
    """A folder in Hugging Face layout, or a model of the Hub.

    All nodes with replicas must be able to read it.
    """
    gpus: int = Field(1, ge=0)
    """GPUs of one replica, which its engine is spread over; 0 on CPUs."""
    engine: VllmEngineSettings = VllmEngineSettings(extra={"max_model_len": 8192})
    """As for rollouts. A rubric with its examples has 2,000 to 3,000 tokens."""
    revision: str | None = None
    """Branch, tag or commit of a model of the Hub, for weights, tokenizer and chat template.

    Set a commit, so that every replica loads the same model whenever it starts.
    """
    timeout: float = Field(90.0, gt=0)
    """Seconds for one reply. Raise it for a slow model; below ``limits.seconds``."""
    max_tokens: int = Field(512, ge=16)
    """The limit for a verdict with its reason; raise it when replies are cut off.

    200 characters of Thai or of emoji do not fit into 256 tokens.
    """


BackendSettings = Annotated[
    RuleBackendSettings | OpenAIBackendSettings | VllmBackendSettings, Field(discriminator="kind")
]


class LimitSettings(SettingsModel):
    """Limits of one replica.

    Beyond ``held`` and ``ongoing`` it answers 503 with Retry-After, and clients wait.
    """

    items: int = Field(64, ge=1, le=MAX_ITEMS)
    """Items of one request.

    Lower it when single requests take too long; clients then ask more often.
    """
    bytes: int = Field(4 * MIB, ge=1024)
    """Bytes of one request's body. Raise it for long questions and answers."""
    image: int = Field(20 * MIB, ge=1024)
    """Bytes of one image file. Raise it for large screenshots that are not compressed."""
    images: int = Field(64 * MIB, ge=1024)
    """Bytes of all image files of one request.

    Raise it for large batches with images; a replica holds them in memory.
    """
    seconds: float = Field(120.0, gt=0)
    """Seconds for one request's answer; a client's own budget should be longer.

    Raise it for slow models.
    """
    body_seconds: float = Field(5.0, gt=0)
    """Seconds in which one request's body must arrive.

    Raise it for clients behind slow lines; such a body holds a place.
    """
    held: int = Field(512, ge=1)
    """Items that are being judged or wait.

    Raise it when clients are turned away (503) while the backend is idle.
    """
    ongoing: int = Field(128, ge=2)
    """Requests of all kinds at once (Serve's max_ongoing_requests).

    It is more than ``held`` lets through, so that /healthz answers.
    """
    queued: int = Field(256, ge=1)
    """Requests that wait in front of all replicas (Serve's max_queued_requests).

    Raise it for many clients at once.
    """
    chat_tokens: int = Field(4096, ge=1)
    """The most that POST /v1/chat/completions generates.

    Raise it for long answers of that route.
    """


class ReplicaSettings(SettingsModel):
    """The number of processes that judge. ``min`` < ``max``: Serve adds and removes replicas."""

    min: int = Field(1, ge=1)
    """Replicas that always run. Raise it so that one may die without an interruption."""
    max: int = Field(1, ge=1)
    """Replicas at the highest load; each asks for its own GPUs."""
    target: float = Field(8.0, gt=0)
    """Ongoing requests per replica that Serve aims at. Lower it to add replicas sooner."""
    cpus: float = Field(1.0, ge=0)
    """Logical CPUs of a replica.

    Raise it for an engine in the replica, lower it on small machines.
    """
    resources: dict[str, float] = {}
    """Further resources of a replica, as Ray's nodes offer them (``judge: 1`` in deploy/).

    They keep it off nodes that runs use.
    """

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self


class CanarySettings(SettingsModel):
    """The canary: items whose verdict is known.

    /readyz fails while the judge does not judge them right.
    """

    every: float = Field(60.0, gt=0)
    """Seconds between two canaries. Raise it when the canary's questions cost too much."""
    within: float = Field(30.0, gt=0)
    """Seconds that all of its items may take together. Raise it for slow models."""
    right: bool = True
    """Whether the verdicts must be right.

    Off only for models whose verdicts are noise (tests of the path).
    """


class CacheSettings(SettingsModel):
    """The cache of verdicts."""

    size: int = Field(100_000, ge=0)
    """Verdicts in the memory of each replica.

    Raise it when questions repeat over more than that; 0 for none.
    """
    path: AbsolutePath | None = None
    """An SQLite file on the replica's own disk, for verdicts that outlive it.

    Set it when replicas are restarted often.
    """


class JudgeSettings(SettingsModel):
    """``args`` of the application. The defaults judge by rules alone."""

    backend: BackendSettings = RuleBackendSettings()
    key_file: AbsolutePath | None = None
    """A file with the bearer key that clients must show; made when it is missing.

    Only its owner can read it, and all nodes see it. Relative to the folder in which the
    application is deployed.
    """
    insecure: bool = False
    """Whether a judge without a key may be served, for loopback only.

    Everybody who reaches the port may then ask it.
    """
    rubrics: AbsolutePath | None = None
    """A folder of rubrics in place of judge/rubrics, for other definitions of a right answer."""
    image_roots: tuple[AbsolutePath, ...] = ()
    """Folders that may contain an item's images, in any subfolder.

    Empty: no images. A rubric with ``sees_images`` shows them to the model.
    """
    limits: LimitSettings = LimitSettings()
    replicas: ReplicaSettings = ReplicaSettings()
    canary: CanarySettings = CanarySettings()
    cache: CacheSettings = CacheSettings()


class ApplicationSettings(SettingsModel):
    """The judge as one application of Ray Serve."""

    name: str = "judge"
    """The application's name in Serve's status; clients do not see it.

    Change it when another judge runs on the same cluster.
    """
    import_path: Literal["rayloop.serve_apps.judge.app:app"] = "rayloop.serve_apps.judge.app:app"
    """Where Ray Serve finds the application. It is always this one."""
    route_prefix: Literal["/"] = "/"
    """The judge's routes are absolute, so it is always the root."""
    args: JudgeSettings = JudgeSettings()


class ServeFile(SettingsModel):
    """A file like serve_apps/judge/configs/judge_cpu.yaml.

    It has the part of Ray Serve's format that a judge needs.
    """

    proxy_location: Literal["EveryNode", "HeadOnly"] = "EveryNode"
    """The nodes that answer.

    EveryNode: the nodes with replicas, and the head. HeadOnly: for clients that know only the head.
    """
    http_options: HttpOptions = HttpOptions()
    applications: tuple[ApplicationSettings, ...] = Field(
        (ApplicationSettings(),), min_length=1, max_length=1
    )
    """The judge is the one application that Ray Serve starts from such a file."""


class ConsolePlace(SettingsModel):
    """``args`` of the application: the console of one run."""

    folder: AbsolutePath
    """The run's folder, at a path that the replica's node sees."""
    key_file: str | None = None
    """A file with the token that a browser must show; made when it is missing.

    Only its owner can read it.
    """
    insecure: bool = False
    """Whether a console without a token may be served. For loopback only."""


class PolicyLimits(SettingsModel):
    """Limits of the requests that the endpoint accepts.

    Beyond ``held`` it answers 503 with Retry-After, and clients wait.
    """

    bytes: int = Field(32 * MIB, ge=1024)
    """Bytes of one request's body, with its images.

    Raise it for long histories of large screenshots.
    """
    body_seconds: float = Field(10.0, gt=0)
    """Seconds in which one request's body must arrive. Raise it for clients behind slow lines."""
    seconds: float = Field(300.0, gt=0)
    """Seconds for one answer, weight syncs and replaced engines included.

    Raise it where a weight sync takes long.
    """
    choices: int = Field(16, ge=1)
    """The most answers that one request may ask for (``n``).

    Raise it to evaluate with many samples.
    """
    held: int = Field(256, ge=1)
    """Answers that are being sampled or wait.

    Lower it to leave more of the engines to the run that trains.
    """
    queued: int = Field(512, ge=1)
    """Requests that wait in front of the replica (Serve's max_queued_requests).

    Raise it for many clients at once.
    """
    history: int = Field(256 * MIB, ge=0)
    """Bytes of tokens and images of remembered conversations.

    They continue with the very tokens that were sampled. Raise it when answers have ``exact:
    false`` for unchanged conversations.
    """


class PolicyEndpointSettings(SettingsModel):
    """``args`` of the application: one run, and the requests that its endpoint accepts."""

    run: str
    """The run's name, which is the model's name for clients."""
    namespace: str
    """Ray's namespace of the run's actors, where engines are found by their names."""
    model: ModelSettings
    """The run's model, whose chat template and image rules make the tokens."""
    temperature: float = Field(1.0, gt=0)
    """The temperature of requests that name none.

    It is the run's, so that a foreign loop samples the policy that is trained.
    """
    max_tokens: int = Field(64, gt=0)
    """The limit of sampled tokens for requests that name none: the run's limit for a turn."""
    min_tokens: int = Field(0, ge=0)
    """Tokens before which an answer cannot end, for requests that name no number: the run's."""
    tokens: int = Field(8192, gt=1)
    """The most tokens of a conversation with its answer: the run's limit for an episode."""
    images: int = Field(32, ge=0)
    """The most images of a conversation: the run's limit for an episode."""
    key_file: str | None = None
    """A file with the bearer key that clients must show; made when it is missing.

    Only its owner can read it.
    """
    insecure: bool = False
    """Whether an endpoint without a key may be served, for loopback only.

    Everybody who reaches the port may then ask it.
    """
    limits: PolicyLimits = PolicyLimits()
