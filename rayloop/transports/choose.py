"""From settings to a transport: a new one is a file of its own, and a line here."""

from __future__ import annotations

from pathlib import Path

from rayloop.transports.collective import Collective
from rayloop.transports.cuda_ipc import CudaIpc
from rayloop.transports.filesystem import Filesystem
from rayloop.transports.manifest import Transport
from rayloop.transports.object_store import ObjectStore
from rayloop.transports.settings import CollectiveTransport, CudaIpcTransport, FilesystemTransport, TransportSettings


def transport(settings: TransportSettings, folder: str | Path) -> Transport:
    """The transport that ``settings`` names; ``folder`` (below the run folder) is used by the filesystem transport."""
    if isinstance(settings, CollectiveTransport):
        return Collective(settings)
    if isinstance(settings, CudaIpcTransport):
        return CudaIpc()
    return Filesystem(folder) if isinstance(settings, FilesystemTransport) else ObjectStore()
