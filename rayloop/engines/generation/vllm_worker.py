"""Runs inside vLLM's workers: loads new weights, and ends a worker with the rollout actor."""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import pickle
import re
import select
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rayloop.core.failures import BroadcastFailed, WeightSyncError
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.transports.collective import BroadcastReceiver
from rayloop.transports.manifest import DTYPES, name_faults, raw, verify

OWNER = "RAYLOOP_ENGINE_OWNER"
"""Environment variable with the id of the process whose end ends all of vLLM's processes."""
SHARED = re.compile(r"/dev/shm/psm_[^ /]+$", re.MULTILINE)
"""Shared memory of Python's multiprocessing, in /proc/self/maps."""
ALIGNMENT_BYTES = 64
"""Bytes. Tensors begin at multiples of it within the memory that they travel through."""


class VllmWorker:
    """Methods that vLLM adds to its worker (``worker_extension_cls``).

    Every worker of an engine runs them.
    """

    model_runner: Any
    _first: frozenset[str] | None = None
    """Names that the first weight sync filled.

    They count for quantised models, whose scales are in no checkpoint, and for adapters.
    """
    _receiver: BroadcastReceiver | None = None

    def forget_names(self) -> None:
        """Unlink the shared memory of vLLM's processes.

        All have it open, and the kernel frees it when they end.
        """
        for path in SHARED.findall(Path("/proc/self/maps").read_text(encoding="utf-8")):
            Path(path).unlink(missing_ok=True)

    def take_weights(self, path: str, packed: bytes, rank: int = 0, alpha: float = 0.0) -> bytes:
        """Verify and load the tensors that ``written`` put into the file.

        With a ``rank`` they belong to adapters. Returns the pickled fault, or nothing. The old
        weights stay when verifying finds a fault.
        """
        manifest: Manifest = pickle.loads(packed)

        def tensors() -> Iterator[tuple[str, Tensor]]:
            with open(path, "rb") as file:
                # torch wants memory that can be written; a
                # private mapping shares pages until one is.
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            views = dict(_read(memory, manifest))
            verify(manifest, views)
            yield from views.items()

        return self._take(manifest.version, tensors(), rank, alpha)

    def take_broadcast(
        self, version: bytes, broadcast: bytes, rank: int = 0, alpha: float = 0.0
    ) -> bytes:
        """Verify and load the tensors of a broadcast, as ``take_weights``.

        They are loaded in the memory in which they arrive, one bucket after the other.
        """
        settings, meeting = pickle.loads(broadcast)
        self._receiver = self._receiver or BroadcastReceiver(settings)
        new_version: Version = pickle.loads(version)
        weights = self._receiver.stream(new_version, meeting)
        return self._take(new_version, weights, rank, alpha)

    def _take(
        self, version: Version, weights: Iterator[tuple[str, Tensor]], rank: int, alpha: float
    ) -> bytes:
        try:
            if rank:
                self._adapt(version, dict(weights), rank, alpha)
            else:
                self._load(version, weights)
        except (WeightSyncError, BroadcastFailed) as error:
            return pickle.dumps(error)
        return b""

    def _adapt(self, version: Version, tensors: dict[str, Tensor], rank: int, alpha: float) -> None:
        """Replace the last adapters by these, from a folder as peft saves it.

        vLLM reads no others.
        """
        expected = self._first or frozenset(tensors)
        _complain(version, _missing(expected, tensors))
        layers = sorted({name.rsplit(".", 3)[1] for name in tensors})
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": layers}
        with tempfile.TemporaryDirectory() as folder:
            config_file = Path(folder) / "adapter_config.json"
            config_file.write_text(json.dumps(config), encoding="utf-8")
            save_file(tensors, Path(folder) / "adapter_model.safetensors")
            try:
                self.add_lora(adapter(folder))  # type: ignore[attr-defined]
            except (ValueError, RuntimeError) as error:
                _complain(version, [str(error)])
        self._first = expected

    def _load(self, version: Version, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load through vLLM's reload, which refuses unknown names and only logs missing ones.

        It is brought to its end in any case: the parts of a layer that an interrupted one has
        collected would count as parts of the next weights.
        """
        model: Any = self.model_runner.get_model()
        parameters = frozenset(name for name, _ in model.named_parameters())
        loaded: set[str] = set()
        names: list[str] = []
        failures: list[Exception] = []
        load = model.load_weights
        reload_weights = self.reload_weights  # type: ignore[attr-defined]

        def recording(weights: Iterator[tuple[str, Tensor]]) -> set[str]:
            loaded.update(load(weights))
            return loaded

        def without_failure() -> Iterator[tuple[str, Tensor]]:
            try:
                for name, tensor in weights:
                    names.append(name)
                    yield name, tensor
            except (WeightSyncError, BroadcastFailed) as error:
                failures.append(error)

        _repack_experts(model)
        model.load_weights = recording
        try:
            reload_weights(weights_iterator=without_failure())
        except Exception as error:
            # The rest is received as well: the other members of a broadcast continue.
            deque(without_failure(), maxlen=0)
            reload_weights(weights_iterator=iter(()))
            if not isinstance(error, KeyError | ValueError):
                raise
            _complain(version, [str(error)])
        finally:
            vars(model).pop("load_weights", None)
        if failures:
            raise failures[0]
        _complain(version, _incomplete(model.packed_modules_mapping, names))
        expected = parameters
        if self.model_runner.model_config.quantization is not None:
            expected = self._first = self._first or frozenset(loaded)
        _complain(version, _missing(expected, loaded))
        _refresh_tied_head(model)


def adapter(folder: str = "") -> Any:
    """Return vLLM's request for the policy's adapters.

    It loads them from a folder, or computes with them.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, folder or "synced", load_inplace=bool(folder))


def _complain(version: Version, faults: Sequence[str]) -> None:
    if faults:
        raise WeightSyncError(
            f"version {version} is of another model than the engine's: {', '.join(faults)}"
        )


def _missing(expected: Iterable[str], names: Container[str]) -> list[str]:
    return [f"{name} is missing" for name in sorted(expected) if name not in names]


def _incomplete(packed: Mapping[str, Sequence[str]], names: Iterable[str]) -> list[str]:
    """Return the missing parts of parameters that vLLM merges (``packed``).

    It would leave uninitialised memory there.
    """
    complete = set(names)
    siblings: set[str] = set()
    for parts in packed.values():
        for part in parts:
            members = [name for name in complete if f".{part}." in name]
            for sibling in parts:
                siblings.update(name.replace(f".{part}.", f".{sibling}.") for name in members)
    return _missing(siblings, complete)


def _repack_experts(model: nn.Module) -> None:
    """Let vLLM pack experts on CPU again, as at its start.

    Its reload (0.32) copies them unpacked to the place where packed ones are read.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _refresh_tied_head(model: nn.Module) -> None:
    """Repack a tied head on CPU, where vLLM multiplies with repacked copies.

    Its reload (0.32) does not update this copy.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and "cpu_linear" in vars(module):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def written(meeting: str, manifest: Manifest, tensors: Mapping[str, Tensor]) -> int:
    """Open a file in memory with the tensors in the manifest's order; return its descriptor.

    It is the file of another engine that says in the file ``meeting`` that it has it, else a new
    one. The kernel frees it when all have closed it. Raises WeightSyncError when the names differ.
    """
    faults = name_faults(manifest, tensors)
    if faults:
        raise WeightSyncError(f"version {manifest.version}: {'; '.join(faults)}")
    title = f"weights-{hashlib.sha256(repr(manifest).encode()).hexdigest()}"
    with open(meeting, "a+", encoding="utf-8") as notice:
        # One engine of the node writes, and the others wait and find its file.
        fcntl.flock(notice, fcntl.LOCK_EX)
        notice.seek(0)
        with suppress(OSError):
            file = os.open(notice.read(), os.O_RDONLY)
            if os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{title} "):
                return file
            os.close(file)  # the number belongs to another file by now
        file = os.memfd_create(title)
        try:
            _write(file, manifest, tensors)
        except BaseException:
            os.close(file)
            raise
        notice.truncate(0)
        notice.write(f"/proc/{os.getpid()}/fd/{file}")
    return file


def _write(file: int, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    # A buffered file takes more than 2 GiB at once, which one call of the kernel does not.
    with open(file, "wb", closefd=False) as buffer:
        for name, start in _layout(manifest):
            buffer.seek(start)
            buffer.write(raw(tensors[name]))


def _layout(manifest: Manifest) -> Iterator[tuple[str, int]]:
    """Yield each tensor's name and the byte at which it begins."""
    start = 0
    for name, record in manifest.tensors.items():
        yield name, start
        start += -(-record.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _read(memory: mmap.mmap, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    for name, start in _layout(manifest):
        record = manifest.tensors[name]
        dtype = DTYPES[record.dtype]
        count = record.nbytes // dtype.itemsize
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
        yield name, flat.view(record.shape)


def end_with(owner: int) -> None:
    """Kill this process, and all between it and its ancestor ``owner``, when ``owner`` ends."""
    lineage = [psutil.Process(), *psutil.Process().parents()]
    pids = [process.pid for process in lineage]
    if owner not in pids:
        # The owner ended before this process could watch it.
        os.kill(os.getpid(), signal.SIGKILL)
    # A pidfd stays with its process; a number could be given to another one.
    file = os.pidfd_open(owner)

    def watch() -> None:
        select.select([file], [], [])
        # This process comes last, or it could not end the others.
        # psutil notices when a number belongs to another process by now.
        for process in reversed(lineage[: pids.index(owner)]):
            process.kill()

    threading.Thread(target=watch, name="end with the rollout actor", daemon=True).start()


if OWNER in os.environ and int(os.environ[OWNER]) != os.getpid():
    end_with(int(os.environ[OWNER]))
