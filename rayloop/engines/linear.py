"""Linear layers on CPUs through oneDNN, which PyTorch itself uses for bfloat16 only.

PyTorch gives float32 products to MKL, which took twice as long on the AMD CPU measured (docs/performance.md).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def use_onednn(model: nn.Module) -> None:
    """Let the model's linear layers compute with oneDNN where that is possible: float32 on a CPU."""
    if torch.cuda.is_available() or not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module)


def _linear(module: nn.Linear, rows: Tensor) -> Tensor:
    """``rows`` [..., in] to [..., out]."""
    weight, bias = module.weight, module.bias
    if rows.dtype != torch.float32 or weight.dtype != torch.float32 or not rows.numel():
        return nn.functional.linear(rows, weight, bias)
    if not torch.is_grad_enabled():
        return _product(rows, weight, bias)
    product: Tensor = _Linear.apply(rows, weight, bias)
    return product


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``rows weightᵀ + bias``, [..., in] and [out, in] to [..., out]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        return (
            _product(gradient, weight.t()) if needs_rows else None,
            _product(flat.t(), rows.flatten(0, -2).t()) if needs_weight else None,
            flat.sum(0) if needs_bias else None,
        )
