"""What the roles of a run reserve, and where the reference's log-probs come from."""

from pydantic import Field

from rayloop.config.model import ModelSettings
from rayloop.config.settings import LocalPath, SettingsModel


class Placement(SettingsModel):
    """What one actor of a role reserves in the Ray cluster."""

    num_cpus: float = Field(1.0, ge=0)
    """Cores that Ray counts as taken, and torch's threads where ``threads`` is null.

    Lower it where a machine has few.
    """
    num_gpus: float = Field(0.0, ge=0)
    """GPUs that are this actor's own.

    A fraction shares one GPU with other roles. Set it for engines and trainer on GPUs.
    """
    resources: dict[str, float] = {}
    """Custom Ray resources, for example to pin environments to nodes that have a browser, or ranks
    to one node.
    """


class RoleSettings(SettingsModel):
    """What the roles have in common whose actors answer calls that may be made again elsewhere."""

    actors: int = Field(1, ge=1)
    """Processes of this role, many calls at once each; an engine or a reference holds the whole
    model. Raise it when steps wait for them, when environments compute much or hang often, and to
    generate on more GPUs or nodes.
    """
    placement: Placement = Placement()


class ReferenceSettings(RoleSettings):
    """The actors that hold the reference, for ``policy.loss.kl_coef`` > 0.

    There are none with LoRA and without ``path``: the reference is then the policy without its
    adapter.
    """

    path: LocalPath | None = None
    """Null: the start model.

    A folder or Hub name of another model with the same tokenizer and images: a teacher, for
    ``algorithm.advantage.kind: distill`` (on-policy distillation). Or ``http://host:port/v1``: a
    server of vLLM that holds it, for texts sampled at temperature 1.
    """
    refresh_every: int | None = Field(None, ge=1)
    """Steps after which the start model's copies take over the policy's weights, where the KL holds
    back long runs; null: never.
    """

    @property
    def server(self) -> str | None:
        """``path`` where it is a server."""
        return self.path if self.path and self.path.startswith(("http://", "https://")) else None

    def model(self, start: ModelSettings) -> ModelSettings:
        """The model of ``path`` that sees images as ``start`` does.

        ``start`` itself without a path, and for a server.
        """
        if not self.path or self.server:
            return start
        return start.model_copy(update={"path": self.path, "revision": None})
