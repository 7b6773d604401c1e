"""Products by oneDNN equal the usual ones, also for unusual shapes and strides; one switch turns them off."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import dear
from dear.clip import cpu
from dear.clip.tower import activate

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of PyTorch lacks oneDNN"
)


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_onednn_is_faster", lambda: True)  # whatever the processor
    monkeypatch.setattr(cpu, "_MIN_WORK", 1)
    monkeypatch.setattr(cpu, "_MAX_VALUES", 20_000)  # so that some products are computed in parts
    monkeypatch.setattr(cpu, "_exact", set())
    monkeypatch.delenv("DEAR_KERNELS", raising=False)


@pytest.mark.parametrize(
    "shape", [(24,), (5, 24), (0, 24), (64, 24), (2, 160, 24), (2, 0, 24), (2, 83, 4, 24)]
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_products_equal_those_in_float64(shape: tuple[int, ...], with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(shape, generator=generator), torch.randn(7, 24, generator=generator)
    bias = torch.randn(7, generator=generator) if with_bias else None
    with torch.no_grad():
        result = cpu.linear(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
@pytest.mark.parametrize("shape", [(24,), (2, 83, 24), (2100, 24)])
@torch.no_grad()
def test_two_layers_equal_those_in_float64(shape: tuple[int, ...], activation: str) -> None:
    generator = torch.Generator().manual_seed(4)
    x, up, down = (torch.randn(size, generator=generator) for size in (shape, (40, 24), (24, 40)))
    first, second = torch.randn(80, generator=generator)[::2], torch.randn(24, generator=generator)
    result = cpu.mlp_by_onednn(x, (up, first), lambda h: activate(h, activation), (down, second))
    hidden = activate(F.linear(x.double(), up.double(), first.double()), activation)
    expected = F.linear(hidden, down.double(), second.double())
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_strides_of_every_argument_are_respected() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(24, 70, generator=generator).T
    weight = torch.randn(24, 7, generator=generator).T
    bias = torch.randn(14, generator=generator)[::2]
    expected = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(cpu.linear(x, weight, bias).double(), expected, rtol=0, atol=1e-5)
    repeated = torch.ones(1, 24).expand(70, 24)
    torch.testing.assert_close(cpu.linear(repeated, weight, None), F.linear(repeated, weight))


def test_gradients_do_not_depend_on_it() -> None:
    x, weight = torch.randn(5, 24, requires_grad=True), torch.randn(7, 24)
    gradients = [
        torch.autograd.grad(product(x, weight, None).sum(), x)[0] for product in (cpu.linear, F.linear)
    ]
    assert torch.equal(*gradients)


def test_it_sees_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_MAX_VALUES", 1 << 20)
    seen, convert = set(), torch.Tensor.to_mkldnn
    monkeypatch.setattr(torch.Tensor, "to_mkldnn", lambda x: seen.add(len(x)) or convert(x))
    with torch.no_grad():
        for rows in range(0, 4000, 3):
            cpu.linear(torch.ones(rows, 8), torch.ones(4, 8), None)
    assert len(seen) < 95  # it keeps half a megabyte for each
    assert {9, 12, 99} <= seen  # the first numbers are not padded


def test_towers_use_it_unless_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = dear.load("mini")
    size = clip.config.vision.image_size
    pixels = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(3))
    conversions, convert = [], torch.Tensor.to_mkldnn
    monkeypatch.setattr(torch.Tensor, "to_mkldnn", lambda x: conversions.append(x.shape) or convert(x))
    with torch.no_grad():
        fast = clip.encode_image(pixels)
        assert len(conversions) >= 5 * clip.config.vision.layers
        conversions.clear()
        monkeypatch.setenv("DEAR_KERNELS", "0")
        plain = clip.encode_image(pixels)
    assert not conversions
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("layer", ["up", "down"])
def test_a_layer_that_another_library_replaced_computes(layer: str) -> None:
    class Doubled(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base, self.weight, self.bias = base, base.weight, base.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.base(x)

    mlp = copy.deepcopy(dear.load("mini").visual.blocks[0].mlp)
    x = torch.randn(8, mlp.up.weight.shape[1], generator=torch.Generator().manual_seed(5))
    setattr(mlp, layer, Doubled(getattr(mlp, layer)))
    torch.testing.assert_close(mlp(x), mlp.down(activate(mlp.up(x), mlp.activation)))
