"""Weight update: what arrives is what was sent, or the error names what is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rayloop.core.failures import WeightSyncError
from rayloop.core.types import Version
from rayloop.transports.manifest import ROW_WORDS, checksum, manifest, verify
from rayloop.transports.plain import ArrayReceiver, ArraySender

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


def test_a_checksum_is_of_the_bytes_wherever_they_are() -> None:
    whole = torch.randn(5 * ROW_WORDS + 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = int(checksum(whole))
    assert int(checksum(whole.view(torch.uint8))) == expected
    assert int(checksum(torch.cat([whole[:1], whole])[1:])) == expected, (
        "from an odd place in memory"
    )
    assert int(checksum(torch.stack([whole, whole], 1)[:, 0])) == expected, "a view of every other"


@pytest.mark.parametrize("words", [2, 1000, ROW_WORDS + 3, 3 * ROW_WORDS])
def test_a_checksum_notices_what_a_sum_would_not(words: int) -> None:
    """Blocks that are swapped, changes that cancel, signs that flip in pairs, a one that moves
    among zeros.
    """
    before = torch.randint(
        -(2**31), 2**31, (words,), dtype=torch.int32, generator=torch.Generator().manual_seed(words)
    )
    changed = [torch.cat([before[words // 2 :], before[: words // 2]]), before.flip(0)]
    for first, second in ((0, 1), (0, words - 1), (0, words // 2), (min(ROW_WORDS, words - 1), 0)):
        changed += [before.clone() for _ in range(3)]
        changed[-1][[first, second]] ^= -(2**31)
        changed[-2][[first, second]] = before[[second, first]]
        changed[-3][first] += 1
        changed[-3][second] -= 1
    expected = int(checksum(before))
    assert [i for i, one in enumerate(changed) if int(checksum(one)) == expected] == []
    ones = []
    for place in range(0, words, max(1, words // 20)):
        single = torch.zeros(words, dtype=torch.int32)
        single[place] = 1
        ones.append(int(checksum(single)))
    assert len(set(ones)) == len(ones)


def test_verify_names_every_fault() -> None:
    described = manifest(VERSION, tensors())
    sent = tensors()
    del sent["a.weight"]
    with pytest.raises(WeightSyncError, match=r"1\.7.*a\.weight: missing; stray: unknown"):
        verify(described, {**sent, "stray": torch.zeros(1)})
    flipped = tensors()
    flipped["a.weight"].view(torch.uint8)[1, 3] ^= 1
    short = {
        **flipped,
        "b.weight": flipped["b.weight"][:3],
        "c.transposed": flipped["c.transposed"].reshape(2, 6),
    }
    with pytest.raises(WeightSyncError) as error:
        verify(described, short)
    assert "a.weight: corrupt" in str(error.value)
    assert "b.weight: 12 of 16 bytes" in str(error.value)
    assert "c.transposed: is float32 [2, 6], not float32 [6, 2]" in str(error.value)
    with pytest.raises(WeightSyncError, match=r"a\.weight: is int32"):
        verify(described, {**tensors(), "a.weight": tensors()["a.weight"].view(torch.int32)})


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_object_store_reads_read_only_arrays_and_finds_damage() -> None:
    packed, receiver = ArraySender().serialize(VERSION, tensors()), ArrayReceiver()
    described, source = packed.manifest, packed.source
    frozen = {name: array.copy() for name, array in source.items()}
    for array in frozen.values():
        array.setflags(write=False)
    assert torch.equal(receiver.deserialize(described, frozen)["a.weight"], tensors()["a.weight"])
    with pytest.raises(WeightSyncError, match=r"a\.weight: 59 of 60 bytes"):
        receiver.deserialize(described, {**source, "a.weight": source["a.weight"][:-1]})
    damaged = source["b.weight"].copy()
    damaged[5] ^= np.uint8(128)
    with pytest.raises(WeightSyncError, match=r"b\.weight: corrupt"):
        receiver.deserialize(described, {**source, "b.weight": damaged})
