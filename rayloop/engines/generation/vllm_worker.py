"""Runs inside vLLM's workers: loads new weights, and ends the worker when the rollout actor ends."""

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
ALIGNMENT = 64
"""Bytes. Tensors begin at multiples of it within the memory that they travel through."""


class VllmWorker:
    """Methods that vLLM adds to its worker (``worker_extension_cls``); every worker of an engine
    runs them.
    """

    model_runner: Any
    _first: frozenset[str] | None = None
    """What the first weight sync filled, for quantised models, of whose scales no checkpoint knows,
    and for adapters.
    """
    _receiver: BroadcastReceiver | None = None

    def forget_names(self) -> None:
        """Unlink the shared memory of vLLM's processes, which all have open: the kernel frees it
        when they end.
        """
        for path in SHARED.findall(Path("/proc/self/maps").read_text(encoding="utf-8")):
            Path(path).unlink(missing_ok=True)

    def take_weights(self, path: str, packed: bytes, rank: int = 0, alpha: float = 0.0) -> bytes:
        """Verify and load the tensors that ``written`` put into the file: those of adapters, if
        they have a ``rank``. Returns the pickled fault, or nothing. The old weights stay when
        verifying finds a fault.
        """
        manifest: Manifest = pickle.loads(packed)

        def tensors() -> Iterator[tuple[str, Tensor]]:
            with open(path, "rb") as file:
                # torch wants memory that can be written; a
                # private mapping shares pages until one is.
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            read = dict(_read(memory, manifest))
            verify(manifest, read)
            yield from read.items()

        return self._take(manifest.version, tensors(), rank, alpha)

    def take_broadcast(
        self, version: bytes, broadcast: bytes, rank: int = 0, alpha: float = 0.0
    ) -> bytes:
        """The same of a broadcast, whose tensors are loaded in the memory in which they arrive, one
        bucket after the other.
        """
        settings, meeting = pickle.loads(broadcast)
        self._receiver = self._receiver or BroadcastReceiver(settings)
        of = pickle.loads(version)
        return self._take(of, self._receiver.stream(of, meeting), rank, alpha)

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
        """Put the adapters in the place of the last ones, from a folder as peft saves it: vLLM
        reads no others.
        """
        wanted = self._first or frozenset(tensors)
        _complain(version, [f"{name} is missing" for name in sorted(wanted - tensors.keys())])
        layers = sorted({name.rsplit(".", 3)[1] for name in tensors})
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "adapter_config.json").write_text(
                json.dumps(
                    {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": layers}
                ),
                encoding="utf-8",
            )
            save_file(tensors, Path(folder) / "adapter_model.safetensors")
            try:
                self.add_lora(adapter(folder))  # type: ignore[attr-defined]
            except (ValueError, RuntimeError) as error:
                _complain(version, [str(error)])
        self._first = wanted

    def _load(self, version: Version, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load through vLLM's reload, which refuses unknown names and only logs missing ones.

        It is brought to its end in any case: the parts of a layer that an interrupted one has
        collected would count as parts of the next weights.
        """
        model: Any = self.model_runner.get_model()
        wanted, known, names = (
            frozenset(name for name, _ in model.named_parameters()),
            set[str](),
            list[str](),
        )
        failed: list[Exception] = []
        load, reload_weights = model.load_weights, self.reload_weights  # type: ignore[attr-defined]

        def noting(weights: Iterator[tuple[str, Tensor]]) -> set[str]:
            known.update(load(weights))
            return known

        def given() -> Iterator[tuple[str, Tensor]]:
            try:
                for name, tensor in weights:
                    names.append(name)
                    yield name, tensor
            except (WeightSyncError, BroadcastFailed) as error:
                failed.append(error)

        _repack_experts(model)
        model.load_weights = noting
        try:
            reload_weights(weights_iterator=given())
        except Exception as error:
            deque(given(), maxlen=0)  # the other members of a broadcast go on
            reload_weights(weights_iterator=iter(()))
            if not isinstance(error, KeyError | ValueError):
                raise
            _complain(version, [str(error)])
        finally:
            vars(model).pop("load_weights", None)
        if failed:
            raise failed[0]
        _complain(version, _incomplete(model.packed_modules_mapping, names))
        if self.model_runner.model_config.quantization is not None:
            wanted = self._first = self._first or frozenset(known)
        _complain(version, [f"{name} is missing" for name in sorted(wanted - known)])
        _refresh_tied_head(model)


def adapter(folder: str = "") -> Any:
    """vLLM's name for the policy's adapters: to load them from a folder, or to compute with them."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, folder or "synced", load_inplace=bool(folder))


def _complain(version: Version, faults: Sequence[str]) -> None:
    if faults:
        raise WeightSyncError(
            f"version {version} is of another model than the engine's: {', '.join(faults)}"
        )


def _incomplete(packed: Mapping[str, Sequence[str]], names: Iterable[str]) -> list[str]:
    """Returns the missing parts of parameters that vLLM merges (``packed``): it would leave
    uninitialised memory there.
    """
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
    """Let vLLM pack experts on CPU anew, as at its start: its reload (0.32) copies them unpacked to
    where packed ones are read.
    """
    from vllm.platforms import current_platform

    for module in model.modules() if current_platform.is_cpu() else ():
        if hasattr(method := getattr(module, "quant_method", None), "moe_kernel"):
            method.moe_kernel = None  # type: ignore[union-attr]


def _refresh_tied_head(model: nn.Module) -> None:
    """Repack a tied head on CPU, where vLLM multiplies with repacked copies: its reload (0.32) does
    not update this copy.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and "cpu_linear" in vars(module):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def written(meeting: str, manifest: Manifest, tensors: Mapping[str, Tensor]) -> int:
    """Opens a file in memory with the tensors in the manifest's order: the one of another engine
    that says at the file ``meeting`` that it has it, else a new one. It is gone when all have
    closed it. Raises WeightSyncError when the names differ.
    """
    if faults := name_faults(manifest, tensors):
        raise WeightSyncError(f"version {manifest.version}: {'; '.join(faults)}")
    title = f"weights-{hashlib.sha256(repr(manifest).encode()).hexdigest()}"
    with open(meeting, "a+", encoding="utf-8") as said:
        # One engine of the node writes, and the others wait and find its file.
        fcntl.flock(said, fcntl.LOCK_EX)
        said.seek(0)
        with suppress(OSError):
            file = os.open(said.read(), os.O_RDONLY)
            if os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{title} "):
                return file
            os.close(file)  # the number belongs to another file by now
        file = os.memfd_create(title)
        try:
            with open(
                file, "wb", closefd=False
            ) as buffer:  # which takes what one call of the kernel does not: 2 GiB
                for name, start in _layout(manifest):
                    buffer.seek(start)
                    buffer.write(raw(tensors[name]))
        except BaseException:
            os.close(file)
            raise
        said.truncate(0)
        said.write(f"/proc/{os.getpid()}/fd/{file}")
    return file


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
        flat = torch.frombuffer(
            memory, dtype=dtype, count=record.nbytes // dtype.itemsize, offset=start
        )
        yield name, flat.view(record.shape)


def end_with(owner: int) -> None:
    """Kill this process, and all between it and its ancestor ``owner``, when ``owner`` ends."""
    between = [psutil.Process(), *psutil.Process().parents()]
    pids = [process.pid for process in between]
    if owner not in pids:
        # The owner ended before this process could watch it.
        os.kill(os.getpid(), signal.SIGKILL)
    # A pidfd stays with its process; a number could be given to another one.
    file = os.pidfd_open(owner)

    def watch() -> None:
        select.select([file], [], [])
        # This process comes last, or it could not end the others.
        for process in reversed(between[: pids.index(owner)]):
            process.kill()  # psutil notices when the number belongs to another process by now

    threading.Thread(target=watch, name="end with the rollout actor", daemon=True).start()


if OWNER in os.environ and int(os.environ[OWNER]) != os.getpid():
    end_with(int(os.environ[OWNER]))
