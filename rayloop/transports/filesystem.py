"""Weights as safetensors files below the run folder, which all nodes must see."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rayloop.core.failures import PublicationError
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.transports.manifest import manifest, verify


class Filesystem:
    """The source is the path of a safetensors file below ``folder``, which every node must see.

    The file is written aside and renamed, so that a path that exists is complete. The newest ``keep`` versions stay:
    an engine may still read the one before.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self._folder = Path(folder)
        self._keep = keep

    def pack(self, version: Version, tensors: Mapping[str, Tensor]) -> tuple[Manifest, str]:
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"weights-{version}.safetensors"
        aside = path.with_suffix(".partial")
        save_file(on_cpu, aside)
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
        self._prune()
        return manifest(version, on_cpu), str(path)

    def unpack(self, manifest: Manifest, source: str) -> Mapping[str, Tensor]:
        try:
            tensors = load_file(source)
        except (OSError, SafetensorError) as error:
            raise PublicationError(
                f"version {manifest.version}: {source} cannot be read: {error}. Do all nodes see this folder?"
            ) from error
        verify(manifest, tensors)
        return tensors

    def _prune(self) -> None:
        files = sorted(self._folder.glob("weights-*.safetensors"), key=lambda path: _version(path))
        for path in files[: -self._keep]:
            path.unlink()


def _version(path: Path) -> Version:
    lineage, step = path.stem.removeprefix("weights-").split(".")
    return Version(int(lineage), int(step))
