"""The model that is trained: prompt, engine and trainer must agree on it. No torch."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator

from rayloop.config.settings import LocalPath, SettingsModel
from rayloop.core.model_files import resolve

Dtype = Literal["float32", "bfloat16"]
Threads = Annotated[int, Field(ge=1)] | None
CONVERSATION_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of a chat template that a conversation has."""


class Computes(SettingsModel):
    """Settings of an engine that computes the policy."""

    dtype: Dtype = "float32"
    """The type of the computation: bfloat16 on GPUs, float32 on CPU.

    The same in ``policy.engine`` and ``rollout.engine``, since rounding separates their log-probs.
    The trainer's weights and optimizer states stay float32, where a learning rate of 1e-6 counts.
    """


class ComputesOnCpu(Computes):
    """Settings of an engine that computes the policy with torch in its own process."""

    threads: Threads = None
    """Torch threads on CPU.

    None: the machine's cores divided by the processes that compute at the same time; with
    ``rollout.deterministic`` the actor's ``num_cpus``. Set it on several machines, or when other
    programs compute there: decoding is then faster with 1.
    """


class ModelSettings(SettingsModel):
    """The policy model: a folder in Hugging Face layout.

    It has config, safetensors, tokenizer and image processor.
    """

    path: LocalPath
    """A local folder, or a Hub name where the cluster can reach the Hub.

    A run keeps the model that it began with.
    """
    revision: str | None = None
    """The commit, tag or branch of a model of the Hub; unset: main.

    A run records the commit, and continues with it. Why a key: to repeat a run after its model was
    changed on the Hub, name the commit that its folder records.
    """
    min_pixels: int = Field(784, gt=0)
    """Images below this many pixels are enlarged in the prompt, the engine and the trainer.

    Raise it when small images are misread.
    """
    max_pixels: int = Field(1_003_520, gt=0)
    """Images above this many pixels are shrunk (784 are one token in Qwen2.5-VL).

    Lower it for memory, raise it for small details.
    """
    position_tint: float = Field(0.0, ge=0, lt=1)
    """How strongly pixels are coloured by their position: red to the right, blue downwards.

    0 does not change images. A tiny model trained from scratch needs it to learn a patch's position
    on the page; pretrained models do not.
    """

    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as ``{enable_thinking: false}``.

    ``strftime_now`` is the time that a template with the date in it shows (``2026-01-31``); a run
    keeps the time of its beginning. Why a key: Qwen3 spends its tokens on thoughts without that
    variable, and other families have other ones.
    """

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free(cls, variables: dict[str, Any]) -> dict[str, Any]:
        reserved = sorted(CONVERSATION_VARIABLES & variables.keys())
        if reserved:
            raise ValueError(f"{reserved[0]} is given by the run itself")
        time = variables.get("strftime_now")
        if time is not None:
            datetime.fromisoformat(str(time))
        return variables

    def here(self, *, weights: bool = True) -> Self:
        """The same settings with the folder on this machine as ``path``.

        Missing files of a Hub's model are downloaded. Raises ConfigError.
        """
        folder = resolve(self.path, self.revision, weights=weights).folder
        return self.model_copy(update={"path": str(folder), "revision": None})
