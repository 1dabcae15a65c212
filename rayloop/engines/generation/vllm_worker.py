"""Runs inside vLLM's workers: loads new weights, and ends the worker when the rollout actor ends."""

from __future__ import annotations

import mmap
import os
import pickle
import re
import select
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from rayloop.core.failures import WeightSyncError
from rayloop.core.protocols import Manifest
from rayloop.transports.manifest import DTYPES, name_faults, raw, verify

OWNER = "RAYLOOP_ENGINE_OWNER"
"""Environment variable with the id of the process whose end ends all of vLLM's processes."""
SHARED = re.compile(r"/dev/shm/psm_[^ /]+$", re.MULTILINE)
"""Shared memory of Python's multiprocessing, in /proc/self/maps."""
ALIGNMENT = 64
"""Bytes. Tensors begin at multiples of it within the memory that they travel through."""


class VllmWorker:
    """Methods that vLLM adds to its worker (``worker_extension_cls``); every worker of an engine runs them."""

    model_runner: Any
    _first: frozenset[str] | None = None
    """Parameters that the first weight sync filled, for quantised models: no checkpoint has their scales."""

    def forget_names(self) -> None:
        """Unlink the shared memory of vLLM's processes, which all have open: the kernel frees it when they end."""
        for path in SHARED.findall(Path("/proc/self/maps").read_text(encoding="utf-8")):
            Path(path).unlink(missing_ok=True)

    def take_weights(self, path: str, packed: bytes) -> str:
        """Verify and load the tensors that ``write`` put into the file. Returns the fault, or an empty string. The old weights stay
        when verifying finds a fault."""
        manifest: Manifest = pickle.loads(packed)
        try:
            with open(path, "rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            tensors = dict(_read(memory, manifest))
            verify(manifest, tensors)
            self._load(manifest, tensors)
        except WeightSyncError as error:
            return str(error)
        return ""

    def _load(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Load through vLLM's reload, which refuses unknown names and only logs missing ones."""
        model: Any = self.model_runner.get_model()
        wanted, known = frozenset(name for name, _ in model.named_parameters()), set()
        load = model.load_weights

        def noting(weights: Iterator[tuple[str, Tensor]]) -> set[str]:
            known.update(load(weights))
            return known

        try:
            _complain(manifest, _incomplete(model.packed_modules_mapping, tensors))
            _repack_experts(model)
            model.load_weights = noting
            self.reload_weights(weights_iterator=iter(tensors.items()))  # type: ignore[attr-defined]
        except (KeyError, ValueError) as error:
            _complain(manifest, [str(error)])
        finally:
            vars(model).pop("load_weights", None)
        if self.model_runner.model_config.quantization is not None:
            wanted = self._first = self._first or frozenset(known)
        _complain(manifest, [f"{name} is missing" for name in sorted(wanted - known)])
        _refresh_tied_head(model)


def _complain(manifest: Manifest, faults: Sequence[str]) -> None:
    if faults:
        raise WeightSyncError(f"version {manifest.version} is of another model than the engine's: {', '.join(faults)}")


def _incomplete(packed: Mapping[str, Sequence[str]], names: Iterable[str]) -> list[str]:
    """Returns the missing parts of parameters that vLLM merges (``packed``): it would leave uninitialised memory there."""
    names = set(names)
    wanted = {
        name.replace(f".{part}.", f".{sibling}.")
        for name in names
        for parts in packed.values()
        for part in parts
        if f".{part}." in name
        for sibling in parts
    }
    return [f"{name} is missing" for name in sorted(wanted - names)]


def _repack_experts(model: nn.Module) -> None:
    """Let vLLM pack experts on CPU anew, as at its start: its reload (0.32) copies them unpacked to where packed ones are read."""
    from vllm.platforms import current_platform

    for module in model.modules() if current_platform.is_cpu() else ():
        if hasattr(method := getattr(module, "quant_method", None), "moe_kernel"):
            method.moe_kernel = None  # type: ignore[union-attr]


def _refresh_tied_head(model: nn.Module) -> None:
    """Repack a tied head on CPU, where vLLM multiplies with repacked copies: its reload (0.32) does not update this copy."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and "cpu_linear" in vars(module):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def write(file: int, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors into an open file in the manifest's order. Raises WeightSyncError when the names differ from it."""
    if faults := name_faults(manifest, tensors):
        raise WeightSyncError(f"version {manifest.version}: {'; '.join(faults)}")
    for name, start in _layout(manifest):
        os.pwrite(file, raw(tensors[name]), start)


def _layout(manifest: Manifest) -> Iterator[tuple[str, int]]:
    """Where each tensor begins, in bytes."""
    start = 0
    for name, record in manifest.tensors.items():
        yield name, start
        start += -(-record.nbytes // ALIGNMENT) * ALIGNMENT


def _read(memory: mmap.mmap, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    for name, start in _layout(manifest):
        record = manifest.tensors[name]
        dtype = DTYPES[record.dtype]
        flat = torch.frombuffer(memory, dtype=dtype, count=record.nbytes // dtype.itemsize, offset=start)
        yield name, flat.view(record.shape)


def end_with(owner: int) -> None:
    """Kill this process, and all between it and its ancestor ``owner``, when ``owner`` ends."""
    between = [psutil.Process(), *psutil.Process().parents()]
    pids = [process.pid for process in between]
    if owner not in pids:
        os.kill(os.getpid(), signal.SIGKILL)
    file = os.pidfd_open(owner)

    def watch() -> None:
        select.select([file], [], [])
        for process in reversed(between[: pids.index(owner)]):
            process.kill()  # psutil notices when the number belongs to another process by now

    threading.Thread(target=watch, name="end with the rollout actor", daemon=True).start()


if OWNER in os.environ and int(os.environ[OWNER]) != os.getpid():
    end_with(int(os.environ[OWNER]))
