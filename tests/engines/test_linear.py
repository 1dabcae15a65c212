"""Linear layers through oneDNN: the same values and gradients as in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rayloop.engines.linear import use_onednn

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="linear layers are left alone where there is a GPU")


def passes(layer: nn.Linear, rows: Tensor) -> tuple[Tensor, ...]:
    """Output, and the gradients of input and parameters under a fixed one of the output."""
    rows = rows.detach().to(layer.weight.dtype).requires_grad_()
    output = layer(rows)
    gradient = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output.dtype)
    return output, *torch.autograd.grad(output, [rows, *layer.parameters()], gradient)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 48), (1, 130, 48), (3, 5, 48), (0, 48)])
def test_values_and_gradients(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 96, bias=bias)
    exact = nn.Linear(48, 96, bias=bias).double()
    exact.load_state_dict(layer.state_dict())
    use_onednn(layer)
    assert "forward" in vars(layer), "this machine's PyTorch has oneDNN"
    rows = torch.randn(shape)
    for found, expected in zip(passes(layer, rows), passes(exact, rows), strict=True):
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


def test_transposed_input_without_gradient() -> None:
    layer = nn.Linear(48, 96)
    rows = torch.randn(48, 9).t()
    with torch.inference_mode():
        expected = layer(rows)
        use_onednn(layer)
        torch.testing.assert_close(layer(rows), expected)


def test_only_what_needs_a_gradient_gets_one() -> None:
    layer = nn.Linear(48, 96).requires_grad_(False)
    use_onednn(layer)
    rows = torch.randn(5, 48, requires_grad=True)
    layer(rows).sum().backward()
    assert rows.grad is not None
    assert layer.weight.grad is None


def test_other_types_are_left_to_torch() -> None:
    layer = nn.Linear(48, 96).bfloat16()
    rows = torch.randn(5, 48).bfloat16()
    expected = layer(rows)
    use_onednn(layer)
    assert torch.equal(layer(rows), expected)
