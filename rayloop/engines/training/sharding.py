"""Spreads a model over the ranks: process group, FSDP2 units, gathering, and noise on shards."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rayloop.core.failures import ConfigError, Unforeseen, WorkerStartFailed
from rayloop.engines.settings import FsdpSettings
from rayloop.engines.training.scorer import Scorer
from rayloop.transports.manifest import DTYPES
from rayloop.transports.meeting import Meeting

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

LOADING_TIMEOUT_S = 4 * 3600.0
"""Time that the ranks wait for the first one to load the model.

The driver's own deadline is shorter.
"""


def meeting_place(address: tuple[str, int], timeout: float, *, first: bool) -> Meeting:
    """Return the place where the ranks find each other, at (host, port).

    ``first`` opens it; port 0 is any free port. It stays open, so that no other process takes the
    port before the ranks meet. Raises WorkerStartFailed.
    """
    host, port = address
    try:
        return Meeting(host, port, timeout, first=first)
    except (OSError, RuntimeError) as error:
        action = "opened" if first else "reached"
        raise WorkerStartFailed(
            f"the place {host}:{port} where the policy's ranks meet cannot be {action}: {error}"
        ) from error


def alone() -> dist.Store:
    """Return a store in this process's memory, for a rank without others."""
    return dist.HashStore()


@contextmanager
def leaving_on_failure(*, joined: bool) -> Iterator[None]:
    """Leave the default process group when the block fails, if this process ``joined`` it.

    A group that stays behind would make the next ``init_process_group`` of this process fail.
    """
    try:
        yield
    except BaseException:
        if joined:
            dist.destroy_process_group()
        raise


def join(
    device_type: str,
    rank: int,
    world_size: int,
    init_method: str | dist.Store | None,
    timeout: float,
    replicas: int = 1,
) -> DeviceMesh:
    """Meet the other ranks: by gloo on the CPU, NCCL and gloo on CUDA.

    ``timeout``: in seconds. ``init_method``: None when they have met. Returns the mesh [ranks] of
    FSDP, or [replicas, ranks / replicas] of HSDP (arXiv:2304.11277). Raises ConfigError when
    ``replicas`` does not divide ``world_size``.
    """
    if world_size % replicas:
        raise ConfigError(
            f"policy.engine.replicas: {replicas} does not divide policy.ranks ({world_size})"
        )
    if init_method is not None:
        by_address = isinstance(init_method, str)
        meeting: dict[str, Any] = {"init_method" if by_address else "store": init_method}
        dist.init_process_group(
            # torch sends pickled objects, as ``on_all_ranks``
            # does, by the CPU's backend if there is one.
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            **meeting,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
    if replicas == 1:
        return init_device_mesh(device_type, (world_size,))
    shape = (replicas, world_size // replicas)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def shard(scorer: Scorer, settings: FsdpSettings, mesh: DeviceMesh) -> FSDPModule:
    """Shard the scorer in place.

    There is one FSDP unit per transformer block of language model and vision tower, one each for
    embedding and head, unless they are tied, and the rest is in the root, which stays whole until
    the backward pass has ended. Each unit has the values of the first rank, which are broadcast
    before it is sharded: no other rank ever has more than a unit and its share.

    Parameters stay float32; they are cast to ``settings.dtype`` when gathered, and gradients are
    reduced in float32. The inputs of a block are not cast: the vision tower computes its rotary
    embedding in float32, as reference and engine do.
    """
    offload = OffloadPolicy()
    if settings.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    policy = MixedPrecisionPolicy(
        DTYPES[settings.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # Blocks come before the root: fully_shard leaves out the parameters of inner units.
    for unit in [*_untied_ends(scorer), *_blocks(scorer)]:
        _spread(unit, mesh)
        fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload)
    _spread(scorer, mesh)
    # The root is the Scorer, not the model: its forward pass gathers the rest. The model
    # has the head's weights, too.
    sharded = {parameter for parameter in scorer.parameters() if isinstance(parameter, DTensor)}
    return fully_shard(
        scorer, mesh=mesh, mp_policy=policy, offload_policy=offload, ignored_params=sharded
    )


def _untied_ends(scorer: Scorer) -> list[nn.Module]:
    """Return embedding and head, if they are two tensors.

    Units must not share a parameter: a tied head is the embedding, and stays in the root with it.
    """
    embedding = scorer.model.get_input_embeddings()
    head = scorer.model.get_output_embeddings()
    if head is None or embedding.weight is head.weight:
        return []
    return [embedding, scorer.head]


def _blocks(scorer: Scorer) -> list[nn.Module]:
    return [m for m in scorer.modules() if isinstance(m, GradientCheckpointingLayer)]


@torch.no_grad()
def _spread(unit: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the unit's unsharded parameters by the first rank's, on the mesh's device.

    Shared parameters stay shared. Collective.
    """
    if mesh.size() == 1:
        return
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module in unit.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            # An inner unit has sharded it, and has the first rank's values.
            if isinstance(parameter, DTensor):
                continue
            if parameter not in replacements:
                values = _of_first(parameter, mesh.device_type)
                replacements[parameter] = nn.Parameter(
                    values, requires_grad=parameter.requires_grad
                )
            # All modules that share a parameter get one new one, or tied weights would come apart.
            setattr(module, name, replacements[parameter])


def _of_first(tensor: Tensor, device: str) -> Tensor:
    """Return the first rank's values of a tensor that all ranks have. Collective.

    The others may know its shape only (on the device meta).
    """
    values = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    dist.broadcast(values, 0)
    return values


def from_first(load: Callable[[bool], M], mesh: DeviceMesh) -> M:
    """Return the model of ``load(True)`` on the first rank and of ``load(False)`` on the others.

    The latter has no memory for its parameters; it gets the structure and the buffers of the first
    rank's. Collective; an error of ``load`` on one rank is raised on all.
    """
    model = on_all_ranks(lambda: load(mesh.get_rank() == 0), LOADING_TIMEOUT_S)
    _like_first(model, mesh)
    return model


@dataclass(frozen=True)
class _Place:
    """A parameter's first name, if it has several, and its shape."""

    owner: str
    shape: tuple[int, ...]


@torch.no_grad()
def _like_first(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let modules share the parameters that they share on the first rank, and copy its buffers.

    The first rank's file decides both: a head that the configuration ties may have its own values
    there. Collective; parameters of the other ranks stay on the device meta. Raises ConfigError
    when their names or shapes differ.
    """
    if mesh.size() == 1:
        return
    places = _places(model)
    # The list of rank 0 replaces the others' list in place.
    broadcast = [places]
    dist.broadcast_object_list(broadcast, 0)
    [first_places] = broadcast

    def compare() -> None:
        for name in {**first_places, **places}:
            if _shape_at(first_places, name) != _shape_at(places, name):
                raise ConfigError(
                    f"{type(model).__name__}: its files and its configuration differ in {name}"
                )

    on_all_ranks(compare)
    # transformers ties weights when it loads them, so a model without weights has none tied.
    if dist.get_rank():
        owners = {place.owner for place in first_places.values()}
        shared = {
            owner: nn.Parameter(torch.empty_like(model.get_parameter(owner))) for owner in owners
        }
        for name, place in first_places.items():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, shared[place.owner])
    for buffer in model.buffers():
        buffer.copy_(_of_first(buffer, mesh.device_type))


def _places(model: nn.Module) -> dict[str, _Place]:
    owners: dict[nn.Parameter, str] = {}
    places: dict[str, _Place] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(parameter, name)
        places[name] = _Place(owner, tuple(parameter.shape))
    return places


def _shape_at(places: Mapping[str, _Place], name: str) -> tuple[int, ...] | None:
    return places[name].shape if name in places else None


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor (sharing its memory), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank; it may share memory with the shard. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def total(
    values: Iterable[float], device: torch.device, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> list[float]:
    """Return the values reduced over all ranks, as float64. Collective."""
    reduced = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op)
    return reduced.tolist()


def everywhere(values: Sequence[Tensor]) -> Tensor:
    """Return the values, float32 on the CPU, of all ranks in one row. Collective."""
    # torch.cat refuses an empty list, and a rank may have no value.
    rank_values = torch.cat([torch.zeros(0), *values])

    # The ranks have different numbers of values; all_gather takes tensors of one shape only.
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rank_values)
    return torch.cat(gathered)


def on_all_ranks(build: Callable[[], T], within: float | None = None) -> T:
    """Return ``build()``.

    An error on one rank is raised on all, which would otherwise wait for that rank. An error that
    cannot be pickled is raised as Unforeseen. Collective. ``within``: seconds to wait for the
    others; None: as for any collective.
    """
    if dist.get_world_size() == 1:
        return build()
    # The timeout belongs to a group: another wait needs another group.
    waiting: dist.ProcessGroup | None = None
    if within is not None:
        waiting = dist.new_group(backend="gloo", timeout=timedelta(seconds=within))
    failure: Exception | None = None
    try:
        result = build()
    except Exception as error:
        failure = error

    # A rank that succeeded takes part as well, or the one that failed would wait for it.
    failures: list[Exception | None] = [None] * dist.get_world_size()
    message = None if failure is None else _picklable(failure)
    dist.all_gather_object(failures, message, group=waiting)
    if waiting is not None:
        dist.destroy_process_group(waiting)
    # All ranks raise the error of the lowest one, so that their callers do the same next.
    for rank_failure in failures:
        if rank_failure is not None:
            # The other rank's exception comes without its traceback; this rank's own has one.
            raise rank_failure from failure
    return result


def _picklable(error: Exception) -> Exception:
    """Return the exception as another process gets it.

    That is Unforeseen for one that cannot be pickled, or cannot be unpickled.
    """
    try:
        # Unpickled here as well, or the other ranks would fail in the middle of the collective.
        return cast(Exception, pickle.loads(pickle.dumps(error)))
    except Exception:
        return Unforeseen(f"{type(error).__name__}: {error}")


@torch.no_grad()
def add_noise(
    parameter: nn.Parameter,
    scale: float,
    generator: torch.Generator,
    device: torch.device,
    least: float = 0.0,
) -> Tensor:
    """Add noise of ``scale`` times the parameter's root mean square, or ``least``.

    Returns the shard as it was. Collective.
    """
    shard = local(parameter)
    original = shard.clone()
    # The root mean square is the whole tensor's: a
    # shard's own would differ with the number of ranks.
    square, count = total([shard.double().square().sum().item(), shard.numel()], device)
    # The CPU's generator draws: a GPU's numbers depend on its kind.
    noise = torch.randn(shard.shape, generator=generator).to(shard)
    shard.add_(noise, alpha=scale * max(least, (square / max(1.0, count)) ** 0.5))
    return original
