"""Spreads a model over the ranks: process group, FSDP2 units, gathering, and noise on shards."""

import pickle
from collections.abc import Callable, Iterable, Sequence
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

LOADING = 4 * 3600.0
"""Seconds that the ranks wait for the first one to load the model; the driver's own deadline is
shorter.
"""


def meeting_place(address: tuple[str, int], timeout: float, *, first: bool) -> Meeting:
    """Where the ranks find each other, at (host, port).

    ``first`` opens it; port 0 is any free port. It stays open, so that no other process takes the
    port before the ranks meet. Raises WorkerStartFailed.
    """
    host, port = address
    try:
        return Meeting(host, port, timeout, first=first)
    except (OSError, RuntimeError) as error:
        what = "opened" if first else "reached"
        raise WorkerStartFailed(
            f"the place {host}:{port} where the policy's ranks meet cannot be {what}: {error}"
        ) from error


def alone() -> dist.Store:
    """For a rank without others: in this process's memory."""
    return dist.HashStore()


def join(
    device_type: str,
    rank: int,
    world_size: int,
    init_method: str | dist.Store | None,
    timeout: float,
    replicas: int = 1,
) -> DeviceMesh:
    """Meet the other ranks (``timeout`` in seconds): gloo on the CPU, NCCL and gloo on CUDA. None:
    they have met. Returns the mesh [ranks] of FSDP, or [replicas, ranks / replicas] of HSDP
    (arXiv:2304.11277). Raises ConfigError when that is no whole number.
    """
    if world_size % replicas:
        raise ConfigError(
            f"policy.engine.replicas: {replicas} does not divide policy.ranks ({world_size})"
        )
    if init_method is not None:
        where: dict[str, Any] = {
            "init_method" if isinstance(init_method, str) else "store": init_method
        }
        dist.init_process_group(
            # torch sends pickled objects, as ``on_all_ranks``
            # does, by the CPU's backend if there is one.
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            **where,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
    if replicas == 1:
        return init_device_mesh(device_type, (world_size,))
    return init_device_mesh(
        device_type, (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard")
    )


def shard(scorer: Scorer, settings: FsdpSettings, mesh: DeviceMesh) -> FSDPModule:
    """Shard in place: one FSDP unit per transformer block of language model and vision tower, of
    embedding and head, unless they are one, and the rest in the root, which stays whole until the
    backward pass has ended. Each unit has the values of the first rank, which go round before it is
    sharded: of the others none ever has more than a unit and its share.

    Parameters stay float32; they are cast to ``settings.dtype`` when gathered, and gradients are
    reduced in float32. What goes into a block is not cast: the vision tower computes its rotary
    embedding in float32, as reference and engine do.
    """
    offload = (
        CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if settings.cpu_offload
        else OffloadPolicy()
    )
    policy = MixedPrecisionPolicy(
        DTYPES[settings.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    embedding, head = scorer.model.get_input_embeddings(), scorer.model.get_output_embeddings()
    # Units must not share a parameter: a tied head is the embedding, and stays in the root with it.
    apart = (
        [embedding, scorer.head] if head is not None and embedding.weight is not head.weight else []
    )
    # Blocks come before the root: fully_shard leaves out what an inner unit has sharded.
    for block in [
        *apart,
        *(m for m in scorer.modules() if isinstance(m, GradientCheckpointingLayer)),
    ]:
        _spread(block, mesh)
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
    _spread(scorer, mesh)
    # The root is the Scorer, not the model: its forward pass is what gathers the rest. The model
    # has the head's weights, too.
    others = {parameter for parameter in scorer.parameters() if isinstance(parameter, DTensor)}
    return fully_shard(
        scorer, mesh=mesh, mp_policy=policy, offload_policy=offload, ignored_params=others
    )


@torch.no_grad()
def _spread(unit: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the unit's unsharded parameters by the first rank's, on the mesh's device; shared
    ones stay shared. Collective.
    """
    if mesh.size() == 1:
        return
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in unit.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            # An inner unit has sharded it, and has the first rank's values.
            if isinstance(parameter, DTensor):
                continue
            if parameter not in made:
                made[parameter] = nn.Parameter(
                    _of_first(parameter, mesh.device_type), requires_grad=parameter.requires_grad
                )
            # All modules that share a parameter get one new one, or tied weights would come apart.
            setattr(module, name, made[parameter])


def _of_first(tensor: Tensor, device: str) -> Tensor:
    """The first rank's values of a tensor that all ranks have, or whose shape they know (on the
    device meta). Collective.
    """
    values = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    dist.broadcast(values, 0)
    return values


def from_first(load: Callable[[bool], M], mesh: DeviceMesh) -> M:
    """What ``load(True)`` gives on the first rank and ``load(False)``, without memory for its
    parameters, on the others; these then have the structure and the buffers of the first.
    Collective; what ``load`` raises on one rank is raised on all.
    """
    model = on_all_ranks(lambda: load(mesh.get_rank() == 0), LOADING)
    _like_first(model, mesh)
    return model


@torch.no_grad()
def _like_first(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let modules share the parameters that they share on the first rank, and copy its buffers.

    The first rank's file decides both: a head that the configuration ties may have its own values
    there. Collective; parameters of the other ranks stay on the device meta. Raises ConfigError
    when their names or shapes differ.
    """
    if mesh.size() == 1:
        return
    owners: dict[nn.Parameter, str] = {}
    mine = {
        n: (owners.setdefault(p, n), tuple(p.shape))
        for n, p in model.named_parameters(remove_duplicate=False)
    }

    # The list of rank 0 replaces the others' list in place.
    sent = [mine]
    dist.broadcast_object_list(sent, 0)
    [first] = sent

    def compare() -> None:
        shapes = [{name: shape for name, (_, shape) in found.items()} for found in (first, mine)]
        if shapes[0] != shapes[1]:
            name = next(
                name for name in {**first, **mine} if shapes[0].get(name) != shapes[1].get(name)
            )
            raise ConfigError(
                f"{type(model).__name__}: its files and its configuration differ in {name}"
            )

    on_all_ranks(compare)
    # transformers ties weights when it loads them, so a model without weights has none tied.
    if dist.get_rank():
        made = {
            owner: nn.Parameter(torch.empty_like(model.get_parameter(owner)))
            for owner, _ in first.values()
        }
        for name, (owner, _) in first.items():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, made[owner])
    for buffer in model.buffers():
        buffer.copy_(_of_first(buffer, mesh.device_type))


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor (sharing its memory), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; may share memory with the shard. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def total(
    values: Iterable[float], device: torch.device, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> list[float]:
    """The values reduced over all ranks, as float64. Collective."""
    reduced = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op)
    return reduced.tolist()


def everywhere(values: Sequence[Tensor]) -> Tensor:
    """The values, float32 on the CPU, of all ranks in one row. Collective."""
    # torch.cat refuses an empty list, and a rank may have no value.
    own = torch.cat([torch.zeros(0), *values])

    # The ranks have different numbers of values; all_gather takes tensors of one shape only.
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return torch.cat(found)


def on_all_ranks(build: Callable[[], T], within: float | None = None) -> T:
    """Returns ``build()``.

    What it raises on one rank is raised on all, which would otherwise wait for that rank. What
    cannot be pickled is raised as Unforeseen. Collective. ``within``: seconds to wait for the
    others; None: as for any collective.
    """
    if dist.get_world_size() == 1:
        return build()
    # The timeout belongs to a group: another wait needs another group.
    waiting = (
        None
        if within is None
        else dist.new_group(backend="gloo", timeout=timedelta(seconds=within))
    )
    failure: Exception | None = None
    try:
        result = build()
    except Exception as error:
        failure = error

    # A rank that succeeded takes part as well, or the one that failed would wait for it.
    failures: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if failure is None else _sent(failure), group=waiting)
    if waiting is not None:
        dist.destroy_process_group(waiting)
    # All ranks raise the error of the lowest one, so that their callers do the same next.
    for found in failures:
        if found is not None:
            # The other rank's exception comes without its traceback; this rank's own has one.
            raise found from failure
    return result


def _sent(error: Exception) -> Exception:
    """The exception as another process gets it: Unforeseen in place of one that cannot be pickled,
    or not be read again.
    """
    try:
        # Read here as well, or the other ranks would find out in the middle of the collective.
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
    """Add noise of ``scale`` times the parameter's root mean square, or ``least``; returns the
    shard as it was. Collective.
    """
    shard = local(parameter)
    before = shard.clone()
    # The root mean square is the whole tensor's: a
    # shard's own would differ with the number of ranks.
    square, count = total([shard.double().square().sum().item(), shard.numel()], device)
    # The CPU's generator draws: a GPU's numbers depend on its kind.
    noise = torch.randn(shard.shape, generator=generator).to(shard)
    shard.add_(noise, alpha=scale * max(least, (square / max(1.0, count)) ** 0.5))
    return before
