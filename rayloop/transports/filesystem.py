"""Weights as safetensors files below the run folder, which all nodes must see."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rayloop.core.failures import WeightSyncError
from rayloop.core.files import sync
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.transports.seam import Receiver, Sender, WeightTransport, WeightUpdate
from rayloop.transports.settings import FilesystemTransport

if TYPE_CHECKING:
    from torch import Tensor


class Filesystem(WeightTransport[str]):
    """``source`` is the path of a file, which every node must see."""

    def __init__(self, settings: FilesystemTransport, folder: str) -> None:
        self._folder = folder

    def sender(self, host: str) -> FileSender:
        """The rank's half."""
        return FileSender(self._folder)

    def receiver(self) -> FileReceiver:
        """The rollout actor's half."""
        return FileReceiver()


class FileSender(Sender[str]):
    """Writes to a temporary name and renames, so that a path that exists is complete. Keeps the newest ``keep`` versions: an engine
    may still read the previous one."""

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self._folder = Path(folder)
        self._keep = keep

    def pack(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightUpdate[str]:
        """Writes the file and removes old ones."""
        from safetensors.torch import save_file

        from rayloop.transports.manifest import manifest

        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"weights-{version}.safetensors"
        aside = path.with_suffix(".partial")
        save_file(on_cpu, aside)
        sync(aside)
        os.replace(aside, path)
        self._prune()
        return WeightUpdate(manifest(version, on_cpu), str(path))

    def _prune(self) -> None:
        files = sorted(self._folder.glob("weights-*.safetensors"), key=lambda path: _version(path))
        for path in files[: -self._keep]:
            path.unlink()


class FileReceiver(Receiver[str]):
    """Reads the file."""

    def unpack(self, manifest: Manifest, source: str) -> Mapping[str, Tensor]:
        """The verified CPU tensors of the file. Raises WeightSyncError."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from rayloop.transports.manifest import verify

        try:
            tensors = load_file(source)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"version {manifest.version}: {source} cannot be read: {error}. Do all nodes see this folder?"
            ) from error
        verify(manifest, tensors)
        return tensors


def _version(path: Path) -> Version:
    lineage, step = path.stem.removeprefix("weights-").split(".")
    return Version(int(lineage), int(step))
