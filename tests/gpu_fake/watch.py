"""What one rank does with its device: live bytes, waits of the host, collectives, attention calls,
floating-point operations.
"""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from tests.gpu_fake.device import attend_on_gpu

BLOCK = 512
"""Bytes that the caching allocator rounds a tensor up to."""
COLLECTIVES = {"_allgather_base_": "all_gathers", "_reduce_scatter_base_": "reduce_scatters"}
VALUES = {
    "nonzero",
    "unique_dim",
    "_unique2",
    "masked_select",
    "masked_scatter_backward",
    "bincount",
    "repeat_interleave",
}
"""Operations whose kernel on CUDA reads a number back before it returns."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


def _one(dtype: torch.dtype) -> bool | int | float:
    """What is read of any tensor."""
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


class Watch(TorchDispatchMode):
    """Watches all that happens while it is entered.

    ``image_tokens``: of the row, which a mask of them selects; ``peak``: bytes; ``waits``: by kind
    and line.
    """

    def __init__(self, image_tokens: int = 0) -> None:
        super().__init__()
        self._image_tokens = image_tokens
        self.live = self.peak = 0
        self.waits, self.collectives, self.attention = (
            Counter[str](),
            Counter[str](),
            Counter[str](),
        )
        self.devices, self.flops = Counter[str](), Counter[str]()
        self.at_peak: dict[str, float] = {}
        self._sizes, self._makers = dict[int, int](), dict[int, str]()
        self._noted = 0
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized(self._resize)  # type: ignore[assignment,method-assign]

    def close(self) -> None:
        """Undo what is changed outside of this object."""
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        name = func._opname
        if not any(
            isinstance(one, FakeTensor) for one in tree_iter((args, kwargs))
        ) and "cuda" not in str(kwargs.get("device")):
            with unset_fake_temporarily():  # what is computed on the CPU is computed
                return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            if args[0].device.type == "cuda":
                self.wait("item")
            return _one(args[0].dtype)
        if name in INDEXING:
            out = func(args[0], self._places(args[1]), *args[2:], **kwargs)
        else:
            out = func(*args, **kwargs)
        self._count(func, name, args, kwargs, out)
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                self.see(tensor, name)
        return out

    def _places(self, indices: Any) -> list[Any]:
        """The indices without masks: CUDA takes the places where a mask is true, for each of its
        dimensions.
        """
        places: list[Any] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                places.append(index)
                continue
            for _ in range(index.dim()):
                place = torch.empty(self._image_tokens, dtype=torch.int64, device=index.device)
                self.see(place, "places of a mask")
                places.append(place)
        return places

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        if name in COLLECTIVES:
            self.collectives[COLLECTIVES[name]] += 1
        elif name == "_to_copy":
            there, here = out.device.type, args[0].device.type
            if here == "cuda" != there or (
                there == "cuda" != here and not kwargs.get("non_blocking")
            ):
                self.wait(f"{here} to {there}")
        elif name in VALUES and "cuda" in str(args[0].device):
            self.wait(name)
        elif name in INDEXING:
            indices = [index for index in args[1] if index is not None]
            if args[0].device.type == "cuda" and any(
                i.dtype == torch.bool or i.device.type == "cpu" for i in indices
            ):
                self.wait("index by a mask or from the CPU")
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops["attention" if "attention" in name else "products"] += int(
                formula(*args, **kwargs, out_val=out)
            )

    def wait(self, kind: str) -> None:
        """Note that the host waits for the device here."""
        frames = [
            f
            for f in traceback.extract_stack()
            if "/rayloop/" in f.filename or "/transformers/" in f.filename
        ]
        # The backward pass calls operations from no line of Python.
        place = "autograd backward"
        if frames:
            place = f"{'/'.join(frames[-1].filename.split('/')[-2:])} {frames[-1].name}"
        self.waits[f"{kind}: {place}"] += 1

    def attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """scaled_dot_product_attention."""
        kind, out = attend_on_gpu(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        self.attention[kind] += 1
        return out

    def see(self, tensor: torch.Tensor, maker: str = "resident") -> None:
        """Count a tensor's storage until it is gone."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._makers[key] = (
                f"{maker} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            )
            self.devices[str(tensor.device)] += 1
            weakref.finalize(storage, self._gone, key)
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        size = -(-size // BLOCK) * BLOCK
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)
        if self.peak > 1.02 * self._noted:
            self._noted, found = self.peak, Counter[str]()
            for one, taken in self._sizes.items():
                found[self._makers[one]] += taken
            self.at_peak = {name: round(taken / 2**30, 2) for name, taken in found.most_common(28)}

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    def _resized(self, resize: Any) -> Any:
        def resized(
            storage: torch.UntypedStorage, size: int
        ) -> Any:  # how FSDP frees a gathered unit, and makes it again
            done = resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, size)
            return done

        return resized
