"""Settings of the episode loop, and of the sampling of its turns. Light: no torch."""

from typing import Annotated, Literal

from pydantic import Field

from rayloop.config.settings import Component, Role, SettingsModel
from rayloop.core.token_mask import MAX_TOP_K
from rayloop.core.types import Sampling


class EnvironmentRole(Role):
    """The role of an environment, which has the methods of ``Environment``.

    An agent-driven one has the methods of ``AgentDrivenEnvironment``.
    """

    def check(self, component: Component) -> None:
        """As ``Role.check``."""
        agent_driven = getattr(component.resolve(), "agent_driven", False) is True
        methods = ("reset", "run_agent", "close") if agent_driven else self.methods
        Role(self.name, methods).check(component)


ENVIRONMENT = EnvironmentRole("environment", ("reset", "step", "evaluate", "close"))


class EnvironmentKind(Component):
    """An environment, and where its instances live.

    It is written ``{use: module:Class, with: {...}, isolation: thread}``.
    """

    isolation: Literal["thread", "process"] = "thread"
    """Where each instance runs: ``thread`` or ``process``.

    In its own ``process`` a hang or crash costs only its episode; ``thread`` costs little, but a
    hang costs the actor. Shipped browsers, interpreters and desktops have processes already. Why a
    key: a game in native code that crashes now and then needs ``process``.
    """

    @property
    def name(self) -> str:
        """Return the name of its class."""
        return self.use.rpartition(":")[2]

    @property
    def immediate(self) -> bool:
        """Return whether it is called without a thread.

        The class itself, not one that it derives from, must say so, and must not have a process.
        """
        if self.isolation != "thread":
            return False
        component = self.resolve()
        return isinstance(component, type) and vars(component).get("immediate") is True

    @property
    def agent_driven(self) -> bool:
        """Whether it is a ``rayloop.core.protocols.AgentDrivenEnvironment``."""
        return getattr(self.resolve(), "agent_driven", False) is True


class EpisodeSettings(SettingsModel):
    """How one episode is played, whatever its environment."""

    environment: Annotated[EnvironmentKind, ENVIRONMENT] = EnvironmentKind(
        use="rayloop.envs.single_turn:SingleTurn"
    )
    """The environment of every task: ``{use: module:Class, with: {...}}``.

    With ``environment.kinds``, it is the environment of tasks that name none.
    """
    max_turns: int = Field(1, ge=1)
    """Sampled turns per episode; reaching it ends the episode as max_turns."""
    max_prompt_tokens: int = Field(4096, gt=0)
    """A longer rendered prompt is excluded with its size, never truncated."""
    max_tokens: int = Field(8192, gt=0)
    """Tokens of a context, prompt and observations included.

    Beyond it the episode ends as over_length. With ``environment.history: full`` the context is
    the whole episode.
    """
    max_response_tokens: int | None = Field(None, gt=0)
    """Tokens of all turns and observations together, without the prompt.

    Beyond it the episode ends as over_length. None: what ``max_tokens`` leaves. For published runs
    that have such a limit.
    """
    max_images: int = Field(32, ge=0)
    """Images in the policy's context.

    An observation beyond it ends the episode as max_images; ``environment.history`` can leave out
    older images before that.
    """
    on_error: Literal["continue", "end"] = "continue"
    """What follows an action that the environment could not use.

    The policy sees the error (DeepEyes), or the episode ends as action_error (PyVision).
    """
    step_timeout: float = Field(60.0, gt=0)
    """Seconds for making the environment, and again for each ``reset``, ``step`` and ``evaluate``.

    Raise it for an environment that starts slowly, such as a desktop. Keep it above the
    environment's ``tool_timeout``, which then passes first.
    """


class SamplingSettings(SettingsModel):
    """How the policy samples a turn."""

    temperature: float = Field(1.0, gt=0, le=2)
    """The policy's temperature, in sampling and training (2 is vLLM's limit).

    Lower it only when answers fall apart.
    """
    max_tokens: int = Field(64, gt=0)
    """Sampled tokens per turn. Raise it when answers are cut (``response_length/clip_ratio``)."""
    min_tokens: int = Field(0, ge=0)
    """A turn cannot end before this many tokens.

    It changes the policy that is trained. Why a key: to measure speed, all answers get the same
    length with it, and a model that has learned to answer nothing gets out of that.
    """
    stop: tuple[str, ...] = ()
    """A turn ends when its text contains one of these, and keeps it.

    For tool calls that end with a tag.
    """

    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the fewest likeliest tokens that together have this share of the probability.

    Training uses the same tokens (arXiv:2512.02556). Below 1, ``top_k`` is 128 unless set. Why a
    key: in answers of thousands of tokens one absurd token, such as a foreign letter, spoils the
    rest; 0.95 avoids most.
    """
    top_k: int | None = Field(None, ge=2, le=MAX_TOP_K)
    """Sample from this many likeliest tokens; training uses the same tokens.

    None: from all, with ``top_p`` below 1 from 128. Why a key: a model whose card recommends 20, as
    Qwen3's does, is trained as it will be served.
    """

    def sampling(self, *, greedy: bool = False) -> Sampling:
        """Return the settings for an engine; ``greedy``: at temperature 0."""
        temperature = 0.0 if greedy else self.temperature
        return Sampling(
            temperature,
            self.max_tokens,
            self.min_tokens,
            self.stop,
            top_p=self.top_p,
            top_k=self.top_k,
        )
