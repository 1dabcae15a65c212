"""Weight update: what arrives is what was sent, or the error names what is not."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rayloop.core.failures import WeightSyncError
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.transports.manifest import manifest, verify
from rayloop.transports.plain import ArrayReceiver, ArraySender, FileReceiver, FileSender, HandleReceiver, Handles, HandleSender

VERSION = Version(1, 7)


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(3, 5, generator=generator),
        "b.weight": torch.randn(4, 2, generator=generator).bfloat16(),
        "c.transposed": torch.randn(2, 6, generator=generator).t(),
        "d.scalar": torch.tensor(2.5),
    }


def test_manifest_describes_the_bytes() -> None:
    described = manifest(VERSION, tensors())
    assert described.version == VERSION
    assert described.tensors["b.weight"].dtype == "bfloat16"
    assert described.tensors["b.weight"].nbytes == 16
    assert described.tensors["c.transposed"].shape == (6, 2)
    verify(described, tensors())


def test_manifest_refuses_integers() -> None:
    with pytest.raises(WeightSyncError, match="counter"):
        manifest(VERSION, {"counter": torch.arange(3)})


def test_verify_names_every_fault() -> None:
    described = manifest(VERSION, tensors())
    sent = tensors()
    del sent["a.weight"]
    with pytest.raises(WeightSyncError, match=r"1\.7.*a\.weight: missing; stray: unknown"):
        verify(described, {**sent, "stray": torch.zeros(1)})
    flipped = tensors()
    flipped["a.weight"].view(torch.uint8)[1, 3] ^= 1
    short = {**flipped, "b.weight": flipped["b.weight"][:3], "c.transposed": flipped["c.transposed"].reshape(2, 6)}
    with pytest.raises(WeightSyncError) as error:
        verify(described, short)
    assert "a.weight: corrupt" in str(error.value)
    assert "b.weight: 12 of 16 bytes" in str(error.value)
    assert "c.transposed: is float32 [2, 6], not float32 [6, 2]" in str(error.value)
    with pytest.raises(WeightSyncError, match=r"a\.weight: is int32"):
        verify(described, {**tensors(), "a.weight": tensors()["a.weight"].view(torch.int32)})


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_object_store_reads_read_only_arrays_and_finds_damage() -> None:
    packed, receiver = ArraySender().pack(VERSION, tensors()), ArrayReceiver()
    described, source = packed.manifest, packed.source
    frozen = {name: array.copy() for name, array in source.items()}
    for array in frozen.values():
        array.setflags(write=False)
    assert torch.equal(receiver.unpack(described, frozen)["a.weight"], tensors()["a.weight"])
    with pytest.raises(WeightSyncError, match=r"a\.weight: 59 of 60 bytes"):
        receiver.unpack(described, {**source, "a.weight": source["a.weight"][:-1]})
    damaged = source["b.weight"].copy()
    damaged[5] ^= np.uint8(128)
    with pytest.raises(WeightSyncError, match=r"b\.weight: corrupt"):
        receiver.unpack(described, {**source, "b.weight": damaged})


def test_filesystem_prunes_and_finds_damage(tmp_path: Path) -> None:
    sender, receiver = FileSender(tmp_path), FileReceiver()
    packed = {step: sender.pack(Version(0, step), tensors()) for step in (8, 9, 10)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights-0.10.safetensors", "weights-0.9.safetensors"]
    with pytest.raises(WeightSyncError, match=r"0\.8.*cannot be read"):
        receiver.unpack(packed[8].manifest, packed[8].source)
    described, path = packed[10].manifest, packed[10].source
    content = bytearray(Path(path).read_bytes())
    content[-1] ^= 1
    Path(path).write_bytes(content)
    with pytest.raises(WeightSyncError, match="corrupt"):
        receiver.unpack(described, path)
    Path(path).write_bytes(content[:-8])
    with pytest.raises(WeightSyncError, match="cannot be read"):
        receiver.unpack(described, path)


def test_a_stale_file_is_noticed(tmp_path: Path) -> None:
    packed = FileSender(tmp_path).pack(VERSION, tensors())
    described = packed.manifest
    changed = dataclasses.replace(described, tensors={**described.tensors, "f": described.tensors["a.weight"]})
    with pytest.raises(WeightSyncError, match="f: missing"):
        FileReceiver().unpack(changed, packed.source)


def open_in_this_process(described: Manifest, source: Handles) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in HandleReceiver().unpack(described, source).items()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_process_opens_the_sender_s_gpu_memory() -> None:
    sender = HandleSender()
    packed = sender.pack(VERSION, tensors())
    with multiprocessing.get_context("spawn").Pool(1) as other:
        received = other.apply(open_in_this_process, (packed.manifest, packed.source))
        for name, tensor in tensors().items():
            assert torch.equal(received[name], tensor), name
        elsewhere = Handles("elsewhere", packed.source.tensors)
        with pytest.raises(WeightSyncError, match="cuda_ipc: the weights are on GPU elsewhere, this engine is on"):
            other.apply(open_in_this_process, (packed.manifest, elsewhere))
