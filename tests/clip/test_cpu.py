"""Products on a CPU: oneDNN's are PyTorch's, weights are never stale, and gradients never miss anything."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import dear
from dear.clip import Clip, cpu
from dear.clip.tower import Linear, activate

X, W = torch.zeros(2, 8), torch.zeros(3, 8)

with torch.no_grad():
    pytestmark = pytest.mark.skipif(
        not cpu.usable(X, W), reason="oneDNN is not there, or not for this processor"
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activations that oneDNN's products were asked for."""
    found: list[str] = []
    product = cpu.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
        found.append(activation)
        return product(x, weight, bias, activation)

    monkeypatch.setattr(cpu, "linear", counted)
    return found


@pytest.fixture(scope="module")
def clip() -> Clip:
    return dear.load("mini").copy()


def pixels(clip: Clip, count: int = 3) -> Tensor:
    side = clip.config.vision.image_size
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(5, 24), (2, 7, 24), (1, 1, 24), (0, 7, 24)])
@pytest.mark.parametrize("scale", [0.1, 30.0])
@torch.no_grad()
def test_an_mlp_is_pytorchs(activation: str, shape: tuple[int, ...], scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(s, generator=generator) for s in (shape, (96, 24), (24, 96)))
    u, d = torch.randn(96, generator=generator), torch.randn(24, generator=generator)
    x = x * scale
    hidden = activate(F.linear(x.double(), up.double(), u.double()), activation)
    expected = F.linear(hidden, down.double(), d.double())
    found = cpu.mlp(x, (up, u), (down, d), activation)
    assert found.shape == shape
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5 * scale)


@torch.no_grad()
def test_however_tensors_lie_in_memory() -> None:
    x = torch.randn(7, 5, 24).transpose(0, 1)
    wide = torch.randn(32, 24)
    weights = [wide, wide.t().contiguous().t(), torch.randn(64, 48)[::2, ::2], wide[:1].expand(32, 24)]
    for weight in weights:
        for bias in (torch.randn(32), torch.randn(64)[::2], torch.zeros(1).expand(32), None):
            torch.testing.assert_close(
                cpu.linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4
            )


@torch.no_grad()
def test_an_mlp_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, up, down = (
        torch.randn(5, 9, 24),
        (torch.randn(96, 24), torch.randn(96)),
        (torch.randn(24, 96), torch.randn(24)),
    )
    whole = cpu.mlp(x, up, down, "gelu")
    monkeypatch.setattr(cpu, "KEPT", 4 * 96 * 8)  # 8 rows of 45
    torch.testing.assert_close(cpu.mlp(x, up, down, "gelu"), whole, rtol=1e-5, atol=1e-5)


def test_both_towers_take_it_and_answer_the_same(
    clip: Clip, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a photo of a red fox.", "a wolf"]
    image, text = clip.encode_image(pixels(clip)), clip.encode_text(texts)
    assert len(calls) == 6 * (clip.config.vision.layers + clip.config.text.layers)
    monkeypatch.setattr(cpu, "usable", lambda *_: False)
    del calls[:]
    for found, expected in ((image, clip.encode_image(pixels(clip))), (text, clip.encode_text(texts))):
        torch.testing.assert_close(found, expected, rtol=0, atol=float(1e-5 * expected.norm(dim=1).max()))
    assert not calls


def test_a_changed_weight_counts_at_once(clip: Clip) -> None:
    layer = Linear(8, 4)
    x = torch.randn(3, 8)
    with torch.no_grad():
        for change in (
            layer.weight.normal_,
            layer.bias.normal_,
            lambda: setattr(layer.weight, "data", torch.randn(4, 8)),
            lambda: layer.load_state_dict({"weight": torch.randn(4, 8), "bias": torch.randn(4)}),
            lambda: layer.to(torch.float64),
            lambda: layer.to(torch.float32),
        ):
            change()
            kind = layer.weight.dtype
            expected = F.linear(x.to(kind), layer.weight, layer.bias)
            torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_where_a_gradient_is_recorded_it_is_not_taken(clip: Clip, calls: list[str]) -> None:
    given = pixels(clip).requires_grad_()
    clip.visual(given).sum().backward()
    assert not calls
    assert given.grad is not None
    assert bool((given.grad != 0).any())
    with torch.no_grad():
        clip.visual(given)
    assert calls


@torch.no_grad()
def test_compilers_counters_and_other_precisions_get_pytorchs_own(clip: Clip, calls: list[str]) -> None:
    layer = Linear(8, 4).requires_grad_(False)
    layer.weight.normal_(), layer.bias.normal_()
    x = torch.randn(3, 8)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 3 * 8 * 4
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert layer(torch.zeros(3, 8)).shape == (3, 4)
    graph = torch.export.export(layer, (x,)).graph_module.code
    assert "mkldnn" not in graph
    assert "mkldnn" not in str(torch.jit.trace(layer, x, check_trace=False).inlined_graph)
    with torch.backends.mkldnn.flags(enabled=False):
        layer(x)
    for kind in (torch.bfloat16, torch.float64):
        assert layer.to(kind)(x).dtype == kind
    assert not calls


@torch.no_grad()
def test_a_processor_or_a_build_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu._operation.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not cpu.usable(X, W)
    monkeypatch.undo()
    cpu._operation.cache_clear()
    assert cpu.usable(X, W)


FAULTS = """
import resource, torch
from dear.clip import cpu
torch.set_num_threads(1)
with torch.no_grad():
    assert cpu.usable(torch.zeros(2, 8), torch.zeros(3, 8))
def layers(count):
    for _ in range(count):
        held = [torch.ones(7 << 18) for _ in range(4)]  # 7 MB each
        del held
layers(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
layers(10)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how glibc gives memory back")
def test_activations_come_to_lie_in_memory_that_is_there() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], text=True, capture_output=True, check=True)
    assert int(done.stdout) < 1_000  # all pages of ten layers: 72,000
