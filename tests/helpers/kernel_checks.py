"""Every Triton kernel against plain PyTorch in float32, with every option and at sizes that fill no block.

Not collected by itself: `test_kernels.py` runs it through Triton's interpreter on the CPU, and on a GPU. With
COMPILE_ONLY=1 every launch is compiled for an H100 in bfloat16, to the machine code that a GPU would get, and
not run: no GPU is needed, and nothing is compared.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from dear.clip.edit import BlockMask
from dear.clip.gpu import attention as fast_attention
from dear.clip.gpu import kernels
from dear.clip.gpu import tower as fast
from dear.clip.tower import LayerNorm

COMPILE_ONLY = os.environ.get("COMPILE_ONLY") == "1"
DEVICE = "cpu" if COMPILE_ONLY or os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPE = torch.bfloat16 if COMPILE_ONLY else torch.float32
TIGHT = {"rtol": 2e-5, "atol": 2e-6}


class H100(DriverBase):
    """What Triton asks of a GPU in order to compile for it."""

    def __init__(self) -> None: ...

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, kind: str) -> str:
        raise NotImplementedError  # needed by launches alone

    def get_benchmarker(self) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_kernels", lambda: kernels)
    torch.manual_seed(0)
    if COMPILE_ONLY:
        run = JITFunction.run
        triton.runtime.driver.set_active(H100())
        monkeypatch.setattr(
            JITFunction,
            "run",
            lambda kernel, *args, **options: run(kernel, *args, **{**options, "warmup": True}),
        )


def same(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Values and the gradients of `inputs`, for one random direction."""
    if COMPILE_ONLY:
        torch.autograd.grad(actual, inputs, torch.ones_like(actual))
        return
    torch.testing.assert_close(actual, expected, **TIGHT)
    direction = torch.randn_like(expected)
    pairs = zip(*(torch.autograd.grad(y, inputs, direction) for y in (actual, expected)), strict=True)
    for gradient, expected_gradient in pairs:
        torch.testing.assert_close(gradient, expected_gradient, **TIGHT)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE).requires_grad_()


@pytest.mark.parametrize("kind", ["quick_gelu", "gelu", "gelu_tanh"])
def test_activation(kind: str) -> None:
    x = normal(3, 701)  # more than one program, the last not full
    if kind == "quick_gelu":
        expected = x * torch.sigmoid(1.702 * x)
    else:
        expected = F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    same(fast.activate(x, kind), expected, [x])


@pytest.mark.parametrize("change", [True, False])
@pytest.mark.parametrize("inserting", [True, False, None])
@pytest.mark.parametrize(("at", "batched"), [(None, False), (1, True)])
def test_residual_tokens_and_norm(
    change: bool, inserting: bool | None, at: int | None, batched: bool
) -> None:
    batch, length, width, count, token_weight = 2, 5, 37, 2, 0.7
    x, added = normal(batch, length, width), normal(batch, length, width)
    tokens = normal(batch, count, width) if batched else normal(count, width)
    norm = LayerNorm(width, 1e-5).to(DEVICE)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    mix = None if inserting is None else fast.Mix(tokens, at, token_weight, inserting)
    stream, normed = fast.add_norm(x, added if change else None, norm, torch.float32, mix)
    plain = x + added if change else x
    fresh = tokens if batched else tokens.expand(batch, -1, -1)
    if inserting is not None:
        start = at if at is not None else length - (0 if inserting else count)
        stop = start if inserting else start + count
        if not inserting:
            fresh = token_weight * fresh + (1 - token_weight) * plain[:, start:stop]
        plain = torch.cat([plain[:, :start], fresh, plain[:, stop:]], 1)
    inputs = [x, *([added] if change else []), *([tokens] if mix else [])]
    same(torch.cat([stream, normed], -1), torch.cat([plain, norm(plain)], -1), inputs)


def masks(heads: int, count: int, extra: int) -> Tensor:
    see = torch.rand(heads, 1 + extra, 1 + extra) < 0.5
    see[:, 0, 0] = True
    see |= torch.eye(1 + extra, dtype=torch.bool)
    see[0, 0, 1:] = see[0, 1:, 0] = False  # an isolated head
    return BlockMask(see).additive(count - extra, torch.device(DEVICE), torch.float32)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, hidden: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + hidden.to(q.dtype)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("head", "count"), [(9, 70), (16, 131)])  # 131: unchecked blocks and a tail
def test_attention(masked: bool, causal: bool, head: int, count: int) -> None:
    heads, extra = 2, 3
    qkv = normal(2, count, 3 * heads * head)
    mask = masks(heads, count, extra) if masked else None
    hidden = torch.zeros(heads, count, count, device=DEVICE) if mask is None else mask
    if causal:
        hidden = hidden + torch.full_like(hidden, float("-inf")).triu(1)
    unmasked = count - extra if masked else count
    actual = fast_attention.attend(qkv, None, heads, mask, None, causal, unmasked)
    same(actual, plain_attention(*qkv.chunk(3, -1), heads, hidden), [qkv])


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_attention_of_some_rows(masked: bool, causal: bool, batched: bool) -> None:
    heads, head, count, extra = 2, 9, 70, 3
    kv = normal(2, count, 2 * heads * head)
    rows = torch.tensor([[4, 69, 20], [0, 7, 33]] if batched else [0, 67, 69], device=DEVICE)
    q = normal(2, 3, heads * head)
    mask = masks(heads, count, extra) if masked else None
    hidden = torch.zeros(heads, count, count, device=DEVICE) if mask is None else mask
    if causal:
        hidden = hidden + torch.full_like(hidden, float("-inf")).triu(1)
    hidden = hidden[:, rows].transpose(0, 1) if batched else hidden[:, rows]
    actual = fast_attention.attend(kv, q, heads, mask, rows, causal, 0)
    same(actual, plain_attention(q, *kv.chunk(2, -1), heads, hidden), [kv, q])


@pytest.mark.parametrize("count", [70, 131])
def test_joined_tokens(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, head, extra = 3, 16, 5

    def attention_and_norm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.transpose(-1, -2) / head**0.5
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    monkeypatch.setattr(fast_attention, "_attention_and_norm", attention_and_norm)
    qkv = normal(2, count, 3 * heads * head).detach()
    mask = masks(heads, count, extra)
    actual = fast_attention.join_tokens(qkv, heads, mask, count - extra)
    if not COMPILE_ONLY:
        torch.testing.assert_close(actual, plain_attention(*qkv.chunk(3, -1), heads, mask), **TIGHT)
