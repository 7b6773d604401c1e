"""The fast way through a tower gives what the plain way gives (skipped where there is no GPU)."""

from __future__ import annotations

import torch
from tiny import tiny_clip

from dear.clip.config import TextConfig
from dear.clip.gpu import tower as fast
from dear.clip.tower import Attention


def test_packed_projections_are_the_three_and_follow_them() -> None:
    torch.manual_seed(0)
    attention = Attention(TextConfig(width=24, layers=1, heads=3), causal=True)
    for p in attention.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(2, 5, 24)
    parts = [attention.q, attention.k, attention.v]
    before = torch.cat([part(x) for part in parts], -1)
    weight, bias = attention.packed()
    torch.testing.assert_close(torch.nn.functional.linear(x, weight, bias), before)
    assert attention.packed()[0] is weight
    with torch.no_grad():
        attention.k.weight.mul_(2)  # in place: the packed one is the same memory
    assert torch.equal(attention.packed()[0][24:48], attention.k.weight)
    attention.to(torch.float64)  # moved: packed again
    assert attention.packed()[0].dtype == torch.float64
    torch.testing.assert_close(attention.packed()[0][24:48], attention.k.weight)


def test_a_cpu_takes_the_plain_way() -> None:
    clip = tiny_clip(dtype=torch.float32).cast(torch.bfloat16)
    assert clip.visual.dtype == torch.bfloat16
    assert not fast.is_supported(clip.visual, torch.zeros(1, 10, 36), None)
