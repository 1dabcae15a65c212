"""Settings of the updates: the optimizer, and adapters in place of the model. Light: no torch."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr

from rayloop.config.model import ComputesOnCpu
from rayloop.config.settings import SettingsModel

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(SettingsModel):
    """Learning rate, its schedule and AdamW.

    A step has ``update.epochs`` * ``update.mini_batches`` optimizer updates.
    """

    kind: ClassVar[Literal["adamw", "sgd"]] = "adamw"
    """sgd keeps no state: for comparing gradients, in a class derived from this one."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate.

    The default suits full training of models with billions of parameters; small models and LoRA
    need more (docs/choosing_settings.md).
    """
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay of the gradient's mean and of its square.

    A second one of 0.95 forgets faster: for short runs.
    """
    eps: ClassVar[float] = 1e-8
    """AdamW's term against a division by 0, PyTorch's default."""
    weight_decay: float = Field(0.0, ge=0)
    """Pulls weights to 0; with LoRA, the adapter. Seldom needed in short runs."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of the run over which the learning rate grows linearly to lr, with each update.

    Set some when the first updates are large.
    """
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after the warm-up.

    linear and cosine fall to 0 over the run (linear: the default of
    transformers and TRL); wsd (warm-up, stable, decay): constant, then linear to 0 over the last
    0.3. Keep constant while you do not know how long a run will be.
    """
    grad_clip: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm.

    Why a key: when single steps (``actor/grad_norm``) throw the policy off, and to repeat a paper:
    Chart-RVR's supervised stage has 0.3.
    """

    _updates: int | None = PrivateAttr(None)

    @property
    def total_updates(self) -> int | None:
        """Length of the schedule in optimizer updates, warm-up included.

        None: the schedule stays constant.
        """
        return self._updates

    def over(self, steps: int, updates: int = 1) -> Self:
        """Return the same settings with a schedule that ends after ``steps`` steps.

        A step has ``updates`` updates; the ``warmup_steps`` of the result are updates.
        """
        copy = self.model_copy(update={"warmup_steps": self.warmup_steps * updates})
        copy._updates = steps * updates
        return copy


TILED_ABOVE_TOKENS = 32_768
"""Tokens (or patches) of a row above which a layer computes its MLP tile by tile.

It does so again in the backward pass: for 64,000 tokens of a 7B model one MLP would keep 14 GiB.
"""
TILE_TOKENS = 8192
"""Tokens of a tile."""
COLLECTIVE_TIMEOUT_S = 1800.0
"""Seconds after which a collective fails instead of hanging: torch's own limit for gloo.

It is enough for ranks that load a large model from a slow disk. Ray notices at once when a rank
dies, and ``policy.step_timeout`` bounds everything else.
"""
MICRO_BATCH_TOKENS = 16_384
"""Tokens of a micro-batch where the settings name none."""
LOGPROB_CHUNK_POSITIONS = 2048
"""Positions whose logits exist at the same time.

With 152,000 tokens they take 6 to 10 GB at the peak; more positions did not speed up a CPU.
"""
ADAPTERS = "adapters"
"""The parameter group of a model's adapters."""


class LoraSettings(SettingsModel):
    """Train low-rank adapters instead of the model (peft)."""

    rank: int = Field(8, gt=0)
    """Size of the adapters. More can express more, and costs memory (docs/choosing_settings.md)."""
    alpha: float = Field(16.0, gt=0)
    """The adapters' output is scaled by alpha / rank.

    Scale both together, or the effective learning rate changes.
    """
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the adapters' inputs that an update leaves out, to repeat a published run.

    Log-probs are computed without. The updated policy is then not quite the sampled one, which the
    log-prob mismatch of the loss shows; ``alarms.logprobs`` compares fresh episodes instead.
    """
    targets: ClassVar[tuple[str, ...]] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Names of the linear layers that get an adapter.

    These are all of a layer, by the names in all models that can be trained here.
    """


class FsdpSettings(ComputesOnCpu):
    """Training with PyTorch FSDP2: gloo on CPU, NCCL on GPU, the same code."""

    micro_batch_tokens: int | None = Field(None, gt=0)
    """Tokens per forward and backward, of trajectories packed into one row without padding.

    None: 16,384; on a CPU a lower power of two, down to 1,024, when their activations would take
    more than a quarter of the memory of the machine where the run is started. Lower it when memory
    runs out; a longer trajectory is alone in one, so 1 packs nothing, to compare with.
    """
    gradient_checkpointing: bool | None = None
    """Compute activations again in the backward pass: less memory, more time.

    None: on a GPU, whose memory is what runs out first (7B at 16,384 tokens keeps some 100 GB
    otherwise). Set false there for small models, true on a CPU that runs out.
    """
    cpu_offload: bool = False
    """Keep weights and optimizer states in CPU memory: when they do not fit the GPUs; slow."""
    sequence_parallel: int = Field(1, ge=1)
    """Ranks of a node that share each row (Ulysses, arXiv:2309.14509).

    Set it for trajectories whose activations exceed a GPU. It divides policy.ranks and the model's
    key-value heads; a row has ``micro_batch_tokens`` for each of them.
    """
    replicas: int = Field(1, ge=1)
    """Copies of the sharded weights (HSDP), of policy.ranks / replicas ranks in a row each.

    Only sums of gradients then cross the network, once an update; a rank needs more memory. Why a
    key: on several nodes with a slow network, set it to their number where the cards of one hold a
    copy.
    """
    train_vision: bool | None = None
    """Train the vision tower too; with LoRA: adapt its layers.

    None: in full training, not with LoRA. false leaves it as it is: less memory, and it cannot
    forget; true when the images are unlike what the model knows.
    """
    lora: LoraSettings | None = None

    @property
    def trains_vision(self) -> bool:
        """Whether the vision tower is trained, or adapted."""
        return self.lora is None if self.train_vision is None else self.train_vision

    @property
    def drops_out(self) -> bool:
        """Whether an update computes with dropout."""
        return self.lora is not None and self.lora.dropout > 0

    @property
    def logprob_chunk(self) -> int:
        """Positions whose logits exist at the same time: a tensor [T, vocabulary] is never held.

        Less for tiny micro-batches.
        """
        return min(LOGPROB_CHUNK_POSITIONS, 4 * self.micro_batch)

    @property
    def micro_batch(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_tokens or MICRO_BATCH_TOKENS

    def recomputes(self, on_gpu: bool) -> bool:
        """Whether activations are computed again in the backward pass."""
        return on_gpu if self.gradient_checkpointing is None else self.gradient_checkpointing
