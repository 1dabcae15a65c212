"""Linear layers through either library: the same values and gradients as in double precision; and which of them is chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rayloop.engines import linear
from rayloop.engines.linear import Library, Products, use, use_fastest

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="linear layers are left alone where there is a GPU")

ONEDNN = Products("onednn", "onednn", "onednn", "onednn")
MIXED = [Products("onednn", "torch", "torch", "onednn"), Products("torch", "onednn", "onednn", "torch")]


def passes(layer: nn.Linear, rows: Tensor) -> tuple[Tensor, ...]:
    """Output, and the gradients of input and parameters under a fixed one of the output."""
    rows = rows.detach().to(layer.weight.dtype).requires_grad_()
    output = layer(rows)
    gradient = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output.dtype)
    return output, *torch.autograd.grad(output, [rows, *layer.parameters()], gradient)


@pytest.mark.parametrize("products", [ONEDNN, *MIXED, Products()])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 48), (1, 330, 48), (3, 5, 48), (0, 48)])
def test_values_and_gradients(shape: tuple[int, ...], bias: bool, products: Products) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 96, bias=bias)
    exact = nn.Linear(48, 96, bias=bias).double()
    exact.load_state_dict(layer.state_dict())
    use(layer, products)
    assert ("forward" in vars(layer)) is (products != Products())
    rows = torch.randn(shape)
    for found, expected in zip(passes(layer, rows), passes(exact, rows), strict=True):
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


def test_transposed_input_without_gradient() -> None:
    layer = nn.Linear(48, 96)
    rows = torch.randn(48, 9).t()
    with torch.inference_mode():
        expected = layer(rows)
        use(layer, ONEDNN)
        torch.testing.assert_close(layer(rows), expected)


def test_only_what_needs_a_gradient_gets_one() -> None:
    layer = nn.Linear(48, 96).requires_grad_(False)
    use(layer, ONEDNN)
    rows = torch.randn(5, 48, requires_grad=True)
    layer(rows).sum().backward()
    assert rows.grad is not None
    assert layer.weight.grad is None


def test_other_types_are_left_to_torch() -> None:
    layer = nn.Linear(48, 96).bfloat16()
    rows = torch.randn(5, 48).bfloat16()
    expected = layer(rows)
    use(layer, ONEDNN)
    assert torch.equal(layer(rows), expected)


def test_each_product_goes_to_the_library_that_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer that costs most is timed: its rows and weights, those of the gradients too, tell the products apart."""
    asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def faster(rows: Tensor, weight: Tensor, until: float) -> Library:
        asked.append((tuple(rows.shape), tuple(weight.shape)))
        return "onednn" if len(asked) in (1, 4) else "torch"

    monkeypatch.setattr(linear, "_faster", faster)
    linear._measured.cache_clear()
    model = nn.Sequential(nn.Linear(40, 24), nn.Linear(40, 24), nn.Linear(30, 50))
    try:
        use_fastest(model, "auto")
        use_fastest(nn.Linear(40, 24), "auto")
    finally:
        linear._measured.cache_clear()
    few, many, rows, weight = asked
    assert few == ((linear.FEW // 4, 40), (24, 40))
    assert many[0][0] > linear.FEW
    assert many[1] == (24, 40)
    assert rows == ((many[0][0], 24), (40, 24))
    assert weight == ((24, many[0][0]), (40, many[0][0]))
    assert linear.chosen() == f"{_own()} (forward; gradient of rows), onednn (forward, few rows; gradient of weights)"


def test_a_library_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_measured", None)  # nothing is timed
    layer = nn.Linear(4, 4)
    use_fastest(layer, "torch")
    assert (linear.chosen(), "forward" in vars(layer)) == (_own(), False)
    use_fastest(layer, "onednn")
    assert (linear.chosen(), "forward" in vars(layer)) == ("onednn", True)


def test_a_timing_takes_little_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    linear._measured.__wrapped__((96, 48), 1)
    assert torch.equal(before, torch.get_rng_state())
    slow, fast = torch.zeros(1), torch.zeros(1)
    assert linear._faster(slow[None], fast[None], until=0.0) in ("torch", "onednn")


def _own() -> str:
    return "mkl" if torch.backends.mkl.is_available() else "torch"
