"""A CUDA device that is not there: ``load`` before torch is imported, ``pretend`` after it."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")


def load() -> None:
    """Compile ``device.cpp`` (once per version of it; seconds) and load it.

    Raises CalledProcessError.
    """
    assert "torch" not in sys.modules, "torch asks for CUDA's hooks when it is imported"
    spec = importlib.util.find_spec("torch")
    assert spec
    assert spec.origin
    torch = Path(spec.origin).parent
    made = Path(tempfile.gettempdir()) / f"fake_cuda_{SOURCE.stat().st_mtime_ns}.so"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            new = Path(folder) / made.name
            options = [
                "-std=c++20",
                "-O1",
                "-shared",
                "-fPIC",
                f"-I{torch}/include",
                f"-L{torch}/lib",
                f"-Wl,-rpath,{torch}/lib",
            ]
            subprocess.run(
                ["g++", *options, str(SOURCE), "-o", str(new), "-lc10", "-ltorch_cpu"], check=True
            )
            new.rename(made)
    ctypes.CDLL(str(made), ctypes.RTLD_GLOBAL)


class _Idle:
    """A stream or an event on which nothing ever happens; equal to any other."""

    priority = stream_id = device_index = 0

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _Idle]:
        return lambda *arguments, **options: self

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def pretend(attend: Callable[..., Any]) -> None:
    """Let Python's side of torch find a device; ``attend`` takes the place of
    scaled_dot_product_attention.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "_is_compiled": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "is_current_stream_capturing": False,
        "get_rng_state_all": [],
        "current_stream": _Idle(),
        "default_stream": _Idle(),
        "stream": _Idle(),
        "set_device": None,
        "synchronize": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "_lazy_init": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *arguments, answer=answer, **options: answer)
    torch.accelerator.current_stream = lambda device=None: _Idle()  # type: ignore[assignment]
    for place, name in (
        (torch.cuda, "Stream"),
        (torch.cuda, "Event"),
        (torch, "Stream"),
        (torch, "Event"),
    ):
        setattr(place, name, _Idle)
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment,method-assign]
    torch.nn.functional.scaled_dot_product_attention = attend  # type: ignore[assignment]
    # Without a CUDA kernel of its own the dispatcher takes this one apart, into tensors that no GPU
    # holds.
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("silu_backward", lambda gradient, value: torch.empty_like(gradient), "CUDA")
    pretend.kept = kernels  # type: ignore[attr-defined]  # unloaded with its library


def attend_on_gpu(
    query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float | None, grouped: bool
) -> tuple[str, Any]:
    """The kernel that scaled_dot_product_attention takes on a GPU in half precision, and its
    output: flash without a mask, else the memory-efficient one, which wants every head's keys and a
    mask of numbers.
    """
    import torch

    aten = torch.ops.aten
    if mask is None:
        return (
            "flash",
            aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[
                0
            ],
        )
    if grouped:
        key, value = (
            one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value)
        )
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    if extra := -bias.shape[-1] % 16:
        bias = torch.nn.functional.pad(bias, (0, extra))[..., : mask.shape[-1]]
    bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    again = torch.is_grad_enabled() and query.requires_grad
    return (
        "masked",
        aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, again, 0.0, causal, scale=scale
        )[0],
    )
