"""One rank of the trainer: GRPO updates (arXiv:2402.03300) with PyTorch FSDP2.

The backend is gloo on CPU and NCCL on GPU. World size, micro-batches, packing and the order of
ranks do not change an update: every token's weight comes from one denominator over all ranks, and
gradients are sums (docs/algorithm.md, section 6).
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rayloop.core.failures import CheckpointError, ConfigError, Diverged, RayloopError
from rayloop.core.files import Checksum
from rayloop.core.model_families import family
from rayloop.core.protocols import TrainItem
from rayloop.core.types import Trajectory, TrajectoryId, Version, derive
from rayloop.engines.attention import flex_chosen
from rayloop.engines.machine import keep_freed
from rayloop.engines.models import as_saved, checkpoint_names, load_model, model_groups
from rayloop.engines.settings import FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.engines.training import beforehand, recording
from rayloop.engines.training.checkpointing import DIVERGED_ADVICE, TrainerCheckpoints, not_finite
from rayloop.engines.training.collator import Collator
from rayloop.engines.training.lora import (
    adapters_off,
    base_name,
    choose_trainable,
    gather_merged,
    is_adapter,
    saved_name,
)
from rayloop.engines.training.optimizer import Optimizer
from rayloop.engines.training.perturbation import perturb
from rayloop.engines.training.recording import TokenRecorder, TokenValues
from rayloop.engines.training.scorer import Scorer, score
from rayloop.engines.training.sharding import (
    from_first,
    join,
    leaving_on_failure,
    local,
    on_all_ranks,
    shard,
)
from rayloop.engines.training.sight import SightCheck
from rayloop.engines.training.state import UNKNOWN
from rayloop.engines.training.updates import (
    Update,
    check_counts,
    count_denominators,
    equal_passes,
    summarize,
)
from rayloop.engines.training_settings import COLLECTIVE_TIMEOUT_S
from rayloop.engines.updates import Scores, contributing, micro_batch_loss
from rayloop.grpo.batch import Batch, TrainSample, TurnGaps, by_segment, segmented, turn_gaps
from rayloop.grpo.losses.metrics import LossMetrics
from rayloop.grpo.losses.policy import Denominator, PolicyLoss
from rayloop.grpo.losses.settings import LossSettings
from rayloop.grpo.sight import TurnChanges
from rayloop.transports.manifest import DTYPES

logger = logging.getLogger(__name__)


class FsdpEngine:
    """One rank of the trainer.

    All methods but ``parameter_groups`` are collective: all ranks call them, each with its own
    share. ``init_method``: torch.distributed's, or the ranks' store; None: the default process
    group exists already.
    """

    def __init__(
        self,
        model: ModelSettings,
        settings: FsdpSettings,
        optimizer: OptimizerSettings,
        loss: LossSettings,
        *,
        rank: int,
        world_size: int,
        init_method: str | dist.Store | None,
        seed: int,
    ) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._settings = settings
        self._loss_settings = loss
        self._policy_loss = PolicyLoss(loss)
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cpu":
            keep_freed()

        torch.manual_seed(seed)  # new adapters draw their weights
        mesh = join(
            self._device.type,
            rank,
            world_size,
            init_method,
            COLLECTIVE_TIMEOUT_S,
            settings.replicas,
        )
        with leaving_on_failure(joined=init_method is not None):
            self._load(model, mesh)
        self._parameters = dict(self._model.named_parameters())
        trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._optimizer = Optimizer(trainable, optimizer, settings.replicas)
        self._unperturbed: dict[str, Tensor] = {}
        self._gaps: dict[int, Tensor] = {}
        self.gaps: Mapping[TrajectoryId, TurnGaps] = {}
        """Log-prob differences of the last ``train``, under the weights before its first update."""
        self.recorder = TokenRecorder()
        coefficients = self._policy_loss.coefficients if loss.adapts else None
        self._checkpoints = TrainerCheckpoints(
            trainable, self._optimizer, coefficients, rank, self._device
        )

        self._sight = SightCheck(self._collator, self._score, seed, self._device)
        self.sight: Mapping[TrajectoryId, TurnChanges] = {}
        """Changes of some turns of the last ``train``, by the weights before its first update."""

        # With the same seed, dropout would leave out the same places on each rank.
        torch.manual_seed(derive(seed, "trainer", rank))
        trainable_count = sum(p.numel() for p in trainable.values())
        parameter_count = sum(p.numel() for p in self._parameters.values())
        logger.info("training %d of %d parameters", trainable_count, parameter_count)

    def _load(self, model: ModelSettings, mesh: DeviceMesh) -> None:
        """Load the model: only the first rank has all of it in memory, the others get their shards.

        Collective.
        """
        settings = self._settings
        if flex_chosen() and self._device.type == "cpu":
            raise ConfigError(
                "RAYLOOP_ATTENTION: flex has no backward pass on a CPU. Unset the variable"
            )
        # float32: an AdamW step of 1e-6 is below the rounding
        # of most bfloat16 weights, and would be lost.
        self._model = from_first(
            lambda weights: load_model(model, dtype=torch.float32, weights=weights), mesh
        )
        self._names = checkpoint_names(self._model)
        self.family = family(self._model.config.model_type)
        self._collator = Collator(self._model, model, settings, self._device)
        # fully_shard replaces the parameters that it
        # finds, so adapters and frozen parts come first.
        choose_trainable(
            self._model,
            settings,
            self._names,
            recomputes=settings.recomputes(self._device.type == "cuda"),
        )

        def make_scorer() -> Scorer:
            return Scorer(
                self._model,
                settings.logprob_chunk,
                learns_entropy=self._loss_settings.uses_entropy,
                together=settings.sequence_parallel,
            )

        self._scorer = shard(on_all_ranks(make_scorer), settings, mesh)

    def move(self, device: str | None = None) -> None:
        """Move parameters, gradients and the optimizer's state to ``device``.

        None: to the device that computes. With ``cpu_offload`` they stay in main memory.
        """
        if self._settings.cpu_offload:
            return
        self._scorer.to(device or self._device)
        self._optimizer.move(device or self._device)
        if self._device.type == "cuda":
            # PyTorch keeps freed blocks for itself; an
            # engine that shares the GPU needs them back.
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Leave the process group."""
        self._collator.close()
        dist.destroy_process_group()

    def train(
        self, mini_batches: Sequence[Sequence[TrainItem]], sight: float = 0.0
    ) -> dict[str, float]:
        """Run one optimizer update per mini-batch, in order, and return the step's metrics.

        Each mini-batch holds this rank's share, which may be empty, and which the ranks of a
        sequence group have in common. ``sight``: share of its tokens that are scored again. Raises
        ValueError when the ranks pass different numbers of mini-batches, DataFailure for an
        unusable image on any rank, Diverged after too many skipped updates in a row.
        """
        start_time = time.perf_counter()
        check_counts(len(mini_batches), self._device)
        # Counted before segmenting: a trajectory of several segments counts once.
        trajectories = {
            id(item.trajectory)
            for items in mini_batches
            for item in items
            if item.trajectory.sampled_tokens
        }
        mini_batches = on_all_ranks(lambda: segmented(mini_batches))

        samples = on_all_ranks(lambda: [self._make_samples(items) for items in mini_batches])
        samples = beforehand.with_constants(
            mini_batches, samples, self._loss_settings, self._score, self._collator, self._seed
        )
        step = self._optimizer.updates // max(1, len(mini_batches))
        self.sight = self._sight.changes(mini_batches, samples, sight, step)
        self._gaps.clear()
        self.recorder.begin(self._policy_loss.coefficients)
        updates = [self._update(share) for share in samples]
        self.gaps = turn_gaps(mini_batches, samples, self._gaps)
        return self._report(updates, len(trajectories), time.perf_counter() - start_time)

    def _make_samples(
        self, items: Sequence[TrainItem], *, swap_images: bool = False
    ) -> list[TrainSample]:
        return [self._collator.sample(item, swap_images=swap_images) for item in items]

    def _update(self, samples: Sequence[TrainSample]) -> Update:
        """Run one optimizer update on this rank's share of a mini-batch."""
        denominators = count_denominators(samples, self._settings.sequence_parallel, self._device)
        # Scoring leaves the model in eval mode, so that it comes before ``train``.
        score = self.recorder.keeping(self._score)
        completed = beforehand.completed(samples, self._loss_settings, score, self._device)
        computed = contributing(completed, self._loss_settings)
        self._scorer.train()
        plan = equal_passes(self._collator.plan(computed), self._device)
        loss, metrics, values = self._accumulate(plan, denominators)
        step = self._optimizer.step()
        self.recorder.add(samples, completed, plan, values)

        # The values are copied from the device once, after all micro-batches.
        gaps = recording.by_sample(values["gap"].cpu(), plan)
        for sample, original in zip(completed, samples, strict=True):
            if id(sample) in gaps:
                self._gaps[id(original)] = gaps[id(sample)]
        # The share that the ranks of a sequence group have in common counts once.
        if self._rank % self._settings.sequence_parallel:
            return Update(0.0, LossMetrics.zero(self._device), step, 0, 0)

        tokens = sum(len(sample.predict) for sample in samples)
        computed_tokens = sum(len(sample.predict) for sample in computed)
        # This is the one place where an update waits for the value of its loss.
        return Update(float(loss), metrics, step, tokens, computed_tokens)

    def _accumulate(
        self, plan: Sequence[Sequence[TrainSample]], denominators: Mapping[str, Denominator]
    ) -> tuple[Tensor, LossMetrics, TokenValues]:
        """Add up the gradients of all micro-batches.

        Returns the loss, the metrics, and the values of ``_loss`` in the plan's order. All stay on
        the device: reading one would wait for each micro-batch.
        """
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        metrics = LossMetrics.zero(self._device)
        parts = list[TokenValues]()
        # The loss is a sum over the ranks, but FSDP averages their
        # gradients; each of a sequence group has the whole loss.
        gradient_scale = self._world_size / self._settings.sequence_parallel
        for number, batch in enumerate(self._batches(plan), 1):
            self._reduce(number == len(plan))
            batch_loss, batch_metrics, values = self._loss(batch, denominators)
            (batch_loss * gradient_scale).backward()
            loss = loss + batch_loss.detach()
            metrics = metrics.merge(batch_metrics)
            parts.append(values)
        return loss, metrics, recording.joined(parts)

    def _batches(self, plan: Sequence[Sequence[TrainSample]]) -> Iterator[Batch]:
        """Yield the packed micro-batches.

        Raises on all ranks the error of an image on one rank; the update is then discarded.
        """
        batches = self._collator.ahead(plan)
        # ``next`` is never called past the end: a generator must not raise StopIteration.
        for _ in plan:
            try:
                batch = on_all_ranks(lambda: next(batches))
            except (RayloopError, ValueError):
                self._discard()
                raise
            yield batch

    def _reduce(self, last: bool) -> None:
        """Let replicas sum gradients at the last micro-batch only.

        With LoRA all ranks do: the gradients of adapters are small, and wait whole.
        """
        if self._settings.lora:
            self._scorer.set_requires_gradient_sync(last)
        else:
            self._scorer.set_requires_all_reduce(last)

    def _discard(self) -> None:
        """Drop the gradients of an update, including gradients that wait to be summed."""
        # FSDP holds gradients that wait outside of ``grad``, where zero_grad does not find them. A
        # pass with a loss of 0 makes it sum and release them.
        delays_sums = self._settings.replicas > 1 or self._settings.lora is not None
        if delays_sums and self._scorer.training:
            self._reduce(last=True)
            empty_batch = self._collator.batch([])
            (0.0 * self._scorer(empty_batch).logprobs.sum()).backward()
        self._optimizer.discard()

    def _loss(
        self, batch: Batch, denominators: Mapping[str, Denominator]
    ) -> tuple[Tensor, LossMetrics, TokenValues]:
        """Return this micro-batch's part of the loss, its metrics, and values of its tokens.

        ``gap``: |difference| of the engine's and the old log-probs [N].
        """
        logprobs, entropy = self._scorer(batch, entropy=True)
        result = micro_batch_loss(
            batch, logprobs, entropy, self._policy_loss, self._loss_settings, denominators
        )
        loss = result.total
        if loss is None:
            # An empty micro-batch needs a graph, too: its
            # backward pass takes part in the others' collectives.
            loss = 0.0 * logprobs.sum()
        values = {"gap": (result.old_logprobs - batch.rollout_logprobs).abs()}
        if self.recorder.on:
            values |= recording.token_values(batch, logprobs, entropy, result, loss)
        return loss, result.per_token.metrics, values

    def _report(
        self, updates: Sequence[Update], trajectories: int, seconds: float
    ) -> dict[str, float]:
        """Return the metrics of the step over all ranks, and adapt the loss's coefficients.

        ``trajectories`` counts this rank's share, in whatever number of segments and epochs. The
        coefficients in the metrics are the ones that these updates had.
        """
        report, metrics, trained = summarize(
            updates, trajectories, seconds, self._settings.sequence_parallel, self._device
        )
        coefficients = self._policy_loss.coefficients
        # All ranks have the same sums here, so their coefficients stay equal without a message.
        loss_metrics = metrics.finalize() | coefficients.adapting()
        coefficients.after(loss_metrics, trained)
        return report | {f"actor/{name}": value for name, value in loss_metrics.items()}

    def logprobs(
        self,
        trajectories: Sequence[Trajectory],
        *,
        reference: bool = False,
        swap_images: bool = False,
    ) -> list[npt.NDArray[np.float32]]:
        """Return one array [sampled_tokens] per trajectory of this rank, under the current weights.

        ``reference``: with the adapter off; ConfigError without LoRA. ``swap_images``: with every
        image replaced.
        """
        if reference and self._settings.lora is None:
            raise ConfigError(
                "reference: adapter_off needs policy.engine.lora; use reference: actor for full"
                " fine-tuning"
            )

        def score_segments(segments: Sequence[Trajectory]) -> list[npt.NDArray[np.float32]]:
            items = [TrainItem(segment, 0.0) for segment in segments]
            samples = on_all_ranks(lambda: self._make_samples(items, swap_images=swap_images))
            return [scores.logprobs.numpy() for scores in self._score(samples)]

        with adapters_off(self._model) if reference else contextlib.nullcontext():
            return by_segment(trajectories, score_segments)

    def _score(self, samples: Sequence[TrainSample], *, entropy: bool = False) -> list[Scores]:
        self._scorer.eval()
        plan = equal_passes(self._collator.plan(samples), self._device)
        scores = score(self._scorer, samples, plan, self._batches(plan), entropy=entropy)
        # The root stays gathered after a forward pass, and would miss changed weights.
        self._scorer.reshard()
        return scores

    def export(self, version: Version, *, adapters: bool = False) -> dict[str, Tensor]:
        """Return the tensors that ``stream`` yields, as copies on the CPU."""
        return {
            name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in self.stream(version, adapters=adapters)
        }

    def stream(self, version: Version, *, adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Gather the full weights in the compute dtype, one at a time.

        Yields them under their checkpoint names on rank 0, nothing elsewhere; all ranks must
        exhaust it. Adapters are merged in float32, or with ``adapters`` sent alone, under the names
        of peft's files. The tensors may share memory with the parameters. ``version`` is only the
        name that the weights will have. Raises Diverged on all ranks before the first tensor when a
        parameter is not finite.
        """
        defect = not_finite(self._parameters, self._device)
        if defect:
            raise Diverged(
                f"the weights of version {version} are not numbers: {defect}. {DIVERGED_ADVICE}"
            )
        dtype = DTYPES[self._settings.dtype]
        logger.info("gathering the weights of version %s", version)
        for name in self._parameters:
            if is_adapter(name) is not adapters:
                continue
            full = gather_merged(self._parameters, name, self._settings.lora, dtype)
            if self._rank != 0:
                continue
            if adapters:
                yield saved_name(name, self._names), full
            else:
                checkpoint_name = self._names[base_name(name)]
                yield from as_saved(self.family.experts, checkpoint_name, full).items()

    def parameter_groups(self) -> list[str]:
        """Return the parts of the model that ``perturb`` knows.

        They are embedding, head (if untied), language, vision, merger.
        """
        return list(model_groups(self._names.values()))

    def perturb(self, group: str) -> None:
        """Add visible noise to one part of the model, or to its ``ADAPTERS``.

        ``restore_parameters`` undoes it bit for bit. Raises ValueError for an unknown group, and
        when the last perturbation has not been undone.
        """
        shards = self._world_size // self._settings.replicas
        self._unperturbed = perturb(
            group,
            self._parameters,
            self._names,
            self._settings.lora,
            # Replicas hold the same shard, and must add the same noise to it.
            shard_seed=(self._seed, self._rank % shards),
            device=self._device,
            perturbed=bool(self._unperturbed),
        )

    @torch.no_grad()
    def restore_parameters(self) -> None:
        """Undo ``perturb``."""
        for name, original in self._unperturbed.items():
            local(self._parameters[name]).copy_(original)
        self._unperturbed = {}

    def save(self, folder: str) -> dict[str, Checksum]:
        """Write everything that ``load`` needs to continue.

        That is the trained parameters, the optimizer, its position in the schedule and the random
        states, not the frozen parameters. Returns name -> checksum of the files that this rank
        wrote. Raises CheckpointError, also for perturbed weights, and Diverged for a state that is
        not finite.
        """
        self._refuse_perturbed(folder)
        return self._checkpoints.save(folder)

    def begin_save(self, folder: str) -> Future[dict[str, Checksum]]:
        """Start a ``save`` that runs while training continues; return when the state is copied.

        The future has the result of ``save``. Only one may run at a time.
        """
        self._refuse_perturbed(folder)
        return self._checkpoints.begin_save(folder)

    def _refuse_perturbed(self, folder: str) -> None:
        if self._unperturbed:
            raise CheckpointError(
                f"{folder}: the weights are perturbed by the weight sync's self-test; restore them"
                " first"
            )

    def load(self, folder: str, sums: Mapping[str, Checksum] = UNKNOWN) -> None:
        """Continue from a ``save`` exactly, also with another number of ranks.

        ``sums``: results of ``save`` of all ranks. Raises Damaged, CheckpointError.
        """
        self.restore_parameters()  # frozen parameters are not loaded
        self._checkpoints.load(folder, sums)
