"""Checkpoints of a trainer: what one holds, and how it is written while training continues."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rayloop.core.failures import Damaged, Diverged
from rayloop.core.files import Checksum
from rayloop.core.threads import asked, settle, start
from rayloop.engines.training import state
from rayloop.engines.training.optimizer import Optimizer
from rayloop.engines.training.sharding import local
from rayloop.engines.training_settings import COLLECTIVE_TIMEOUT_S
from rayloop.grpo.losses.kl import Coefficients
from rayloop.transports.manifest import has_nan

DIVERGED_ADVICE = "Lower policy.optimizer.lr, and look at actor/grad_norm of the last steps"
"""What to do about weights that are not finite."""


class TrainerCheckpoints:
    """Saves and loads the ``trainable`` parameters, the optimizer and the random states of a rank.

    ``coefficients``: the loss's, None if they do not adapt. All methods are collective.
    """

    def __init__(
        self,
        trainable: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        coefficients: Coefficients | None,
        rank: int,
        device: torch.device,
    ) -> None:
        self._trainable = trainable
        self._optimizer = optimizer
        self._coefficients = coefficients
        self._rank = rank
        self._device = device
        self._group: dist.ProcessGroup | None = None

    def save(self, folder: str) -> dict[str, Checksum]:
        """Write the state; return the checksums of this rank's files by name.

        Raises CheckpointError, Diverged for a state that is not finite.
        """
        return state.save(folder, self._finite_tensors(folder), self._rank)

    def begin_save(self, folder: str) -> Future[dict[str, Checksum]]:
        """Copy the state, and start a thread that writes it; the future has the result of ``save``.

        Only one may run at a time. Raises Diverged.
        """
        snapshot = state.copied(self._finite_tensors(folder))
        # The random state is read here, since training draws from it while the files are written.
        random_state = state.random_state()
        if self._group is None:
            # In one group the collectives of the writing thread and of training would mix, in
            # another order on each rank.
            timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

        def write() -> dict[str, Checksum]:
            return state.save(folder, snapshot, self._rank, random_state, self._group)

        result: Future[dict[str, Checksum]] = asked()
        start(lambda: settle(result, write))
        return result

    def load(self, folder: str, sums: Mapping[str, Checksum]) -> None:
        """Overwrite the state by a saved one.

        ``sums``: results of ``save`` of all ranks. Raises Damaged, CheckpointError.
        """
        tensors = self._tensors()
        state.load(folder, tensors, self._rank, sums)
        defect = not_finite(tensors, self._device)
        if defect:
            raise Damaged(
                folder, f"the trainer's state was saved when it was not numbers any more: {defect}"
            )

        # ``state.load`` fills tensors in place; a number must be taken out of its tensor.
        self._optimizer.updates = int(tensors["updates"].item())
        if self._coefficients is not None:
            self._coefficients.load(tensors["coefficients"])

    def _finite_tensors(self, folder: str) -> dict[str, Any]:
        tensors = self._tensors()
        defect = not_finite(tensors, self._device)
        if defect:
            raise Diverged(
                f"{folder}: the trainer's state is not saved: {defect}. {DIVERGED_ADVICE}"
            )
        return tensors

    def _tensors(self) -> dict[str, Any]:
        tensors: dict[str, Any] = {
            "parameters": {name: p.detach() for name, p in self._trainable.items()},
            "optimizer": self._optimizer.state(),
            "updates": torch.tensor(self._optimizer.updates),
        }
        if self._coefficients is not None:
            tensors["coefficients"] = self._coefficients.state()
        return tensors


@torch.no_grad()
def not_finite(state: Mapping[str, Any], device: torch.device) -> str:
    """Return which tensors, of mappings of mappings, hold NaN or an infinity on any rank.

    Empty for none. Collective: all ranks have the same names.
    """
    tensors = dict(_flat(state))
    # One flag for each tensor travels in one collective, and the host waits for the device once.
    flags = torch.stack([has_nan(local(tensor)).to(device) for tensor in tensors.values()])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    defects = [name for name, flag in zip(tensors, flags.tolist(), strict=True) if flag]
    if not defects:
        return ""
    return f"NaN or an infinity in {len(defects)} of {len(tensors)} tensors, first {defects[0]}"


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
