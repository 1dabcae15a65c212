"""One rank of the trainer: GRPO updates (arXiv:2402.03300) with PyTorch FSDP2, gloo on CPU and NCCL
on GPU. World size, micro-batches, packing and the order of ranks do not change an update: every
token's weight comes from one denominator over all ranks, and gradients are sums (docs/algorithm.md,
section 6).
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rayloop.core.failures import CheckpointError, ConfigError, Damaged, Diverged, RayloopError
from rayloop.core.files import Checksum
from rayloop.core.model_families import family
from rayloop.core.protocols import TrainItem
from rayloop.core.threads import asked, settle, start
from rayloop.core.types import Trajectory, TrajectoryId, Version, derive
from rayloop.engines.attention import flex_chosen
from rayloop.engines.machine import keep_freed
from rayloop.engines.models import as_saved, checkpoint_names, load_model, model_groups
from rayloop.engines.settings import FsdpSettings, ModelSettings, OptimizerSettings
from rayloop.engines.training import beforehand, state
from rayloop.engines.training.collator import Collator
from rayloop.engines.training.finite import not_finite
from rayloop.engines.training.lora import (
    adapter_names,
    adapters_off,
    base_name,
    choose_trainable,
    is_adapter,
    is_up,
    merged,
    saved_name,
)
from rayloop.engines.training.optimizer import Optimizer
from rayloop.engines.training.scorer import Scorer, Scores, score
from rayloop.engines.training.sharding import (
    add_noise,
    from_first,
    gather,
    join,
    local,
    on_all_ranks,
    shard,
    total,
)
from rayloop.engines.training.updates import Update, count_denominators
from rayloop.engines.training_settings import ADAPTERS, COLLECTIVE_TIMEOUT
from rayloop.grpo.batch import Batch, TrainSample, TurnGaps, by_segment, segmented, turn_gaps
from rayloop.grpo.losses.metrics import LossMetrics
from rayloop.grpo.losses.policy import Denominator, PolicyLoss, token_weights
from rayloop.grpo.losses.settings import LossSettings
from rayloop.transports.manifest import DTYPES

logger = logging.getLogger(__name__)

DIVERGED = "Lower policy.optimizer.lr, and look at actor/grad_norm of the last steps"
"""What to do about weights that are not finite."""
PERTURBATION = 0.5
"""Noise of the weight sync's self-test, relative to each tensor's root mean square: far above
rounding.
"""


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
        self._settings, self._loss_settings, self._policy_loss = settings, loss, PolicyLoss(loss)
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cpu":
            keep_freed()

        torch.manual_seed(seed)  # what new adapters start from
        mesh = join(
            self._device.type, rank, world_size, init_method, COLLECTIVE_TIMEOUT, settings.replicas
        )
        try:
            self._load(model, mesh)
        except BaseException:
            # A default group that stays behind would make the
            # next init_process_group of this process fail.
            if init_method is not None:
                dist.destroy_process_group()
            raise
        self._parameters = dict(self._model.named_parameters())
        trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._optimizer = Optimizer(trainable, optimizer, settings.replicas)
        self._unperturbed: dict[str, Tensor] = {}
        self._gaps: dict[int, Tensor] = {}
        self.gaps: Mapping[TrajectoryId, TurnGaps] = {}
        """Of the trajectories that ``train`` computed last, under the weights before its first
        update.
        """
        self._savers: dist.ProcessGroup | None = None

        # Ranks draw differently from here on: with one seed,
        # dropout would leave out the same places on each.
        torch.manual_seed(derive(seed, "trainer", rank))
        counts = [
            sum(p.numel() for p in chosen.values()) for chosen in (trainable, self._parameters)
        ]
        logger.info("training %d of %d parameters", *counts)

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
        options: Any = {
            "learns_entropy": self._loss_settings.uses_entropy,
            "together": settings.sequence_parallel,
        }
        scorer = on_all_ranks(lambda: Scorer(self._model, settings.logprob_chunk, **options))
        self._scorer = shard(scorer, settings, mesh)

    def move(self, device: str | None = None) -> None:
        """Move parameters, gradients and the optimizer's state to ``device``; None: where they are
        used. With ``cpu_offload`` they stay in main memory.
        """
        if not self._settings.cpu_offload:
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

    def train(self, mini_batches: Sequence[Sequence[TrainItem]]) -> dict[str, float]:
        """One optimizer update per mini-batch, in order; each holds this rank's share, which may be
        empty, and which the ranks of a sequence group have in common. Raises ValueError when the
        ranks pass different numbers of mini-batches, DataFailure for an unusable image on any rank,
        Diverged after too many skipped updates in a row.
        """
        began = time.perf_counter()
        # The largest of the negated numbers is the smallest number: one collective finds both.
        counts = total([len(mini_batches), -len(mini_batches)], self._device, dist.ReduceOp.MAX)
        if counts[0] != -counts[1]:
            raise ValueError(
                f"the ranks got from {-counts[1]:.0f} to {counts[0]:.0f} mini-batches; each needs"
                " as many"
            )

        # They are counted while they are whole: a trajectory of several sequences counts once.
        played = {
            id(item.trajectory)
            for items in mini_batches
            for item in items
            if item.trajectory.sampled_tokens
        }
        mini_batches = on_all_ranks(lambda: segmented(mini_batches))
        samples = on_all_ranks(
            lambda: [[self._collator.sample(item) for item in items] for items in mini_batches]
        )

        # The only update of a step begins at the old
        # weights, so its old log-probs are its current ones.
        if len(mini_batches) > 1:
            samples = self._with_old_logprobs(mini_batches, samples)
        self._gaps.clear()
        updates = [self._update(share) for share in samples]
        self.gaps = turn_gaps(mini_batches, samples, self._gaps)
        return self._report(updates, len(played), time.perf_counter() - began)

    def _with_old_logprobs(
        self, mini_batches: Sequence[Sequence[TrainItem]], samples: Sequence[Sequence[TrainSample]]
    ) -> list[list[TrainSample]]:
        """The samples with the log-probs before the first update; a trajectory of several epochs is
        scored once.
        """
        # ``segmented`` gives a trajectory the same objects
        # in each epoch, so that their ids name them.
        distinct = {
            id(item.trajectory): sample
            for items, share in zip(mini_batches, samples, strict=True)
            for item, sample in zip(items, share, strict=True)
        }
        old = dict(zip(distinct, self._score(list(distinct.values())), strict=True))
        return [
            [
                dataclasses.replace(s, old=old[id(item.trajectory)].logprobs)
                for item, s in zip(items, share, strict=True)
            ]
            for items, share in zip(mini_batches, samples, strict=True)
        ]

    def _update(self, samples: Sequence[TrainSample]) -> Update:
        tokens = sum(len(s.predict) for s in samples)
        denominators = count_denominators(samples, self._settings.sequence_parallel, self._device)
        completed = self._completed(samples)
        given = dict(zip(map(id, completed), map(id, samples), strict=True))
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        metrics, contributing = (
            LossMetrics.zero(self._device),
            beforehand.contributing(completed, self._loss_settings),
        )

        # ``_completed`` may have scored samples, which leaves the model in eval mode.
        self._scorer.train()

        # Losses and differences stay on the device: reading one would wait for each micro-batch.
        plan, differences = self._equal_number(self._collator.plan(contributing)), list[Tensor]()
        for number, batch in enumerate(self._batches(plan), 1):
            self._reduce(number == len(plan))
            part, part_metrics, gaps = self._loss(batch, denominators)
            # The loss is a sum over the ranks, but FSDP averages their gradients; each of a
            # sequence group has the whole loss.
            (part * (self._world_size / self._settings.sequence_parallel)).backward()
            loss, metrics = loss + part.detach(), metrics.merge(part_metrics)
            differences.append(gaps)
        computed, done = sum(len(s.predict) for s in contributing), self._optimizer.step()
        planned = [sample for part in plan for sample in part]
        each = (
            torch.cat(differences).cpu().split([len(sample.predict) for sample in planned])
        )  # the only copy, at the end
        self._gaps.update(
            (given[id(sample)], gaps) for sample, gaps in zip(planned, each, strict=True)
        )
        if (
            self._rank % self._settings.sequence_parallel
        ):  # what the ranks of a sequence group have in common counts once
            return Update(0.0, LossMetrics.zero(self._device), done, 0, 0)

        # This is the one place where an update waits for the value of its loss.
        return Update(float(loss), metrics, done, tokens, computed)

    def _completed(self, samples: Sequence[TrainSample]) -> Sequence[TrainSample]:
        """The samples with what their losses need of tokens of other micro-batches and ranks
        (``beforehand``).
        """
        if not beforehand.is_needed(self._loss_settings):
            return samples
        first = beforehand.to_score(samples, self._loss_settings)
        # Scoring gathers weights on all ranks, so they decide together whether there is any.
        (most,) = total([len(first)], self._device, dist.ReduceOp.MAX)
        return (
            beforehand.completed(
                samples, first, self._score(first, entropy=True), self._loss_settings
            )
            if most
            else samples
        )

    def _batches(self, plan: Sequence[Sequence[TrainSample]]) -> Iterator[Batch]:
        """Yields the packed micro-batches.

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
        """Let replicas sum gradients at the last micro-batch, and all ranks those of adapters,
        which wait whole: they are small.
        """
        if self._settings.lora:
            self._scorer.set_requires_gradient_sync(last)
        else:
            self._scorer.set_requires_all_reduce(last)

    def _discard(self) -> None:
        """Drop the gradients of an update, also those that wait to be summed."""
        # FSDP holds gradients that wait outside of ``grad``, where zero_grad does not find them. A
        # pass with a loss of 0 makes it sum and release them.
        if (self._settings.replicas > 1 or self._settings.lora) and self._scorer.training:
            self._reduce(last=True)
            (0.0 * self._scorer(self._collator.batch([])).logprobs.sum()).backward()
        self._optimizer.discard()

    def _equal_number(self, plan: list[list[TrainSample]]) -> list[list[TrainSample]]:
        """The plan with empty micro-batches added, so that all ranks run as many, and at least one."""
        # FSDP gathers weights in each pass: a rank with
        # fewer passes would leave the others waiting.
        (most,) = total([max(1, len(plan))], self._device, dist.ReduceOp.MAX)
        return plan + [[] for _ in range(int(most) - len(plan))]

    def _loss(
        self, batch: Batch, denominators: Mapping[str, Denominator]
    ) -> tuple[Tensor, LossMetrics, Tensor]:
        """This micro-batch's part of the loss, its metrics, and the |difference| of the engine's
        and the old log-probs [N].
        """
        current, entropy = self._scorer(batch, entropy=True)
        old = current.detach() if batch.old is None else batch.old
        result = self._policy_loss(
            current,
            old,
            batch.behaviour,
            batch.advantage,
            batch.segment,
            reference=batch.reference,
            entropy=entropy,
            on_policy=batch.on_policy,
            lag=batch.lag,
            chosen=batch.chosen,
            elsewhere=batch.elsewhere,
        )

        # A stream without a token on any rank has no denominator, and all ranks leave it out.
        parts = list[Tensor]()
        for stream, denominator in denominators.items():
            values: Tensor | None = getattr(result, stream)
            if values is not None and denominator.tokens:
                lengths = batch.group_tokens, batch.trajectory_tokens
                weights = token_weights(batch.segment, self._loss_settings, denominator, *lengths)
                parts.append((getattr(batch, stream) * weights * values).sum())
        # An empty micro-batch needs a graph, too: its
        # backward pass takes part in the others' collectives.
        return (
            torch.stack(parts or [0.0 * current.sum()]).sum(),
            result.metrics,
            (old - batch.behaviour).abs(),
        )

    def _report(
        self, updates: Sequence[Update], trajectories: int, seconds: float
    ) -> dict[str, float]:
        """Metrics of the step over all ranks, means over its applied updates; a skipped update is
        only counted. ``trajectories``: of this rank's share, in whatever number of sequences and
        epochs. The coefficients are those that these updates had.
        """
        applied = [update for update in updates if update.step.applied]
        metrics = LossMetrics.zero(self._device)
        for update in applied:
            metrics = metrics.merge(update.metrics)

        # The gradient's norm is global, so that all ranks have applied the same updates.
        dist.all_reduce(metrics.sums)
        dist.all_reduce(metrics.maxima, dist.ReduceOp.MAX)
        own = trajectories / self._settings.sequence_parallel
        counts = [sum(u.tokens for u in updates), sum(u.computed for u in updates), own]
        loss, tokens, computed, trained = total(
            [sum(u.loss for u in applied), *counts], self._device
        )
        report = {
            "actor/updates": float(len(applied)),
            "actor/skipped_updates": float(len(updates) - len(applied)),
            "actor/tokens": tokens,
            "actor/computed_tokens": computed,
            "actor/sequences": trained,
            "actor/tokens_per_second": computed / seconds,
        }
        if applied:
            report |= {
                "actor/loss": loss / len(applied),
                "actor/grad_norm": sum(u.step.grad_norm for u in applied) / len(applied),
                "actor/lr": applied[-1].step.lr,
            }

        # All ranks have the same sums here, so their coefficients stay equal without a message.
        found = metrics.finalize() | self._policy_loss.coefficients.adapting()
        self._policy_loss.coefficients.after(found, trained)
        return report | {f"actor/{name}": value for name, value in found.items()}

    def logprobs(
        self,
        trajectories: Sequence[Trajectory],
        *,
        reference: bool = False,
        swap_images: bool = False,
    ) -> list[npt.NDArray[np.float32]]:
        """One array [sampled_tokens] per trajectory of this rank, under the current weights.

        ``reference``: with the adapter off; ConfigError without LoRA. ``swap_images``: with every
        image replaced.
        """
        if reference and self._settings.lora is None:
            raise ConfigError(
                "reference: adapter_off needs policy.engine.lora; use reference: actor for full"
                " fine-tuning"
            )

        def scored(segments: Sequence[Trajectory]) -> list[npt.NDArray[np.float32]]:
            samples = on_all_ranks(
                lambda: [
                    self._collator.sample(TrainItem(s, 0.0), swap_images=swap_images)
                    for s in segments
                ]
            )
            return [scores.logprobs.numpy() for scores in self._score(samples)]

        with adapters_off(self._model) if reference else contextlib.nullcontext():
            return by_segment(trajectories, scored)

    def _score(self, samples: Sequence[TrainSample], *, entropy: bool = False) -> list[Scores]:
        self._scorer.eval()
        plan = self._equal_number(self._collator.plan(samples))
        scores = score(self._scorer, samples, plan, self._batches(plan), entropy=entropy)
        # the root stays gathered after a forward pass, and would miss changed weights
        self._scorer.reshard()
        return scores

    def export(self, version: Version, *, adapters: bool = False) -> dict[str, Tensor]:
        """What ``stream`` yields, as copies on the CPU."""
        made = self.stream(version, adapters=adapters)
        return {
            name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in made
        }

    def stream(self, version: Version, *, adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Gathers the full weights in the compute dtype, one at a time: yields them under their
        checkpoint names on rank 0, nothing elsewhere; all ranks must exhaust it. Adapters are
        merged in float32, or with ``adapters`` sent alone, under the names of peft's files. They
        may share memory with the parameters. ``version`` is only what the weights will be called.
        Raises Diverged on all ranks before the first one when a parameter is not finite.
        """
        if wrong := not_finite(self._parameters, self._device):
            raise Diverged(f"the weights of version {version} are not numbers: {wrong}. {DIVERGED}")
        dtype = DTYPES[self._settings.dtype]
        logger.info("gathering the weights of version %s", version)
        for name, parameter in self._parameters.items():
            if is_adapter(name) is adapters:
                full = self._full(name, parameter.detach(), dtype)
                if self._rank == 0 and adapters:
                    yield saved_name(name, self._names), full
                elif self._rank == 0:
                    yield from as_saved(
                        self.family.experts, self._names[base_name(name)], full
                    ).items()

    def _full(self, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A parameter, with its adapter, if it has one.

        Converted before it moves, unless an adapter is merged into it.
        """
        down, up = (self._parameters.get(adapter) for adapter in adapter_names(base_name(name)))
        if self._settings.lora is None or down is None or up is None:
            # Each value is rounded once in either order, and this one sends half of the bytes.
            return gather(weight.to(dtype))
        return merged(
            gather(weight), gather(down.detach()), gather(up.detach()), self._settings.lora
        ).to(dtype)

    def parameter_groups(self) -> list[str]:
        """The parts of the model that ``perturb`` knows: embedding, head (if untied), language,
        vision, merger.
        """
        return list(model_groups(self._names.values()))

    def perturb(self, group: str) -> None:
        """Add visible noise to one part of the model, or to its ``ADAPTERS``;
        ``restore_parameters`` undoes it bit for bit. Raises ValueError for an unknown group, and
        when the last perturbation has not been undone.
        """
        groups = model_groups(self._names.values())
        if lora := self._settings.lora:
            groups = {**groups, ADAPTERS: [name for name in self._parameters if is_adapter(name)]}
        if group not in groups or self._unperturbed:
            raise ValueError(
                f"cannot perturb {group!r}: choose one of {list(groups)}, and restore_parameters in"
                " between"
            )
        chosen, shards = set(groups[group]), self._world_size // self._settings.replicas
        for name, parameter in self._parameters.items():
            if (name if is_adapter(name) else self._names[base_name(name)]) in chosen:
                # Replicas hold the same shard, and must add the same noise to it.
                generator = torch.Generator().manual_seed(
                    derive(self._seed, "perturb", name, self._rank % shards)
                )
                least = (
                    lora.rank**0.5 / lora.alpha if lora and is_up(name) else 0.0
                )  # a new adapter's is 0
                self._unperturbed[name] = add_noise(
                    parameter, PERTURBATION, generator, self._device, least
                )

    @torch.no_grad()
    def restore_parameters(self) -> None:
        """Undo ``perturb``."""
        for name, before in self._unperturbed.items():
            local(self._parameters[name]).copy_(before)
        self._unperturbed = {}

    def save(self, folder: str) -> dict[str, Checksum]:
        """Write the trained parameters, the optimizer, its position in the schedule and the random
        states, not the frozen parameters. Returns name -> checksum of the files that this rank
        wrote. Raises CheckpointError, also for perturbed weights, and Diverged for a state that is
        not finite.
        """
        return state.save(folder, self._saved(folder), self._rank)

    def begin_save(self, folder: str) -> Future[dict[str, Checksum]]:
        """``save`` beside training: returns when the state is copied.

        The future has the result of ``save``. Only one at a time.
        """
        # The random state is read here, since training draws from it while the files are written.
        own, random = state.copied(self._saved(folder)), state.random_state()
        if self._savers is None:
            # In one group the writing thread's collectives would mix
            # with those of training, in another order on each rank.
            within = timedelta(seconds=COLLECTIVE_TIMEOUT)
            self._savers = dist.new_group(backend="gloo", timeout=within)
        written: Future[dict[str, Checksum]] = asked()
        start(
            lambda: settle(
                written, lambda: state.save(folder, own, self._rank, random, self._savers)
            )
        )
        return written

    def _saved(self, folder: str) -> dict[str, Any]:
        if self._unperturbed:
            raise CheckpointError(
                f"{folder}: the weights are perturbed by the weight sync's self-test; restore them"
                " first"
            )
        own = self._state()
        if wrong := not_finite(own, self._device):
            raise Diverged(f"{folder}: the trainer's state is not saved: {wrong}. {DIVERGED}")
        return own

    def load(self, folder: str, sums: Mapping[str, Checksum] = state.UNKNOWN) -> None:
        """Continue from a ``save`` exactly, also with another number of ranks.

        ``sums``: results of ``save`` of all ranks. Raises Damaged, CheckpointError.
        """
        self.restore_parameters()  # frozen parameters are not loaded
        own = self._state()
        state.load(folder, own, self._rank, sums)
        if wrong := not_finite(own, self._device):
            raise Damaged(
                folder, f"the trainer's state was saved when it was not numbers any more: {wrong}"
            )

        # ``state.load`` fills tensors in place; a number must be taken out of its tensor.
        self._optimizer.updates = int(own["updates"].item())
        if "coefficients" in own:
            self._policy_loss.coefficients.load(own["coefficients"])

    def _state(self) -> dict[str, Any]:
        trained = {name: p.detach() for name, p in self._parameters.items() if p.requires_grad}
        found = {
            "parameters": trained,
            "optimizer": self._optimizer.state(),
            "updates": torch.tensor(self._optimizer.updates),
        }
        return found | (
            {"coefficients": self._policy_loss.coefficients.state()}
            if self._loss_settings.adapts
            else {}
        )
