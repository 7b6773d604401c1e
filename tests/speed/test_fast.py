"""The fast way through a tower gives what the plain way gives (skipped where there is no GPU)."""

from __future__ import annotations

import pytest
import torch
from tiny import mixed_roles, tiny_clip, token_ids

import dear
from dear.clip.config import TextConfig
from dear.clip.gpu import tower as fast
from dear.clip.precision import cast_backbone
from dear.clip.tower import Attention
from dear.heads.roles import RoleMap
from dear.methods import DeAR
from dear.methods.base import in_precision


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
    clip = cast_backbone(tiny_clip(dtype=torch.float32), torch.bfloat16)
    assert clip.visual.dtype == torch.bfloat16
    assert not fast.usable(clip.visual, torch.zeros(1, 10, 36), None)


def models(size: str) -> DeAR:
    if size == "tiny":  # heads of 9 and 8 numbers: every edge of every block is used
        clip, roles = tiny_clip(dtype=torch.float32).cuda(), mixed_roles()
    else:
        torch.manual_seed(0)
        clip, roles = dear.Clip(dear.ClipConfig.named("ViT-B-32")).cuda(), RoleMap.table2()
    paper = DeAR.preset("paper").options
    return DeAR(clip, ("red", "green", "blue"), roles=roles, ids=token_ids(), **paper)


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["tiny", "ViT-B-32"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_as_near_to_float32_as_the_plain_way(
    size: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models(size)
    side = model.clip.config.vision.image_size
    pixels = torch.randn(4, 3, side, side, device="cuda")
    labels = torch.tensor([0, 1, 2, 0], device="cuda")

    def answers() -> list[torch.Tensor]:
        model.zero_grad()
        model.loss(pixels, labels).total.backward()
        found = [p.grad.flatten() for p in model.parameters()]
        return [*found, *(scores.flatten() for scores in model.all_logits(pixels).values())]

    def error(found: list[torch.Tensor], true: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(a - b).norm() / b.norm() for a, b in zip(found, true, strict=True)])

    exact = answers()
    model = in_precision(model, precision)
    assert fast.usable(model.clip.visual, pixels, model.image_edit())
    quick = error(answers(), exact)
    monkeypatch.setattr(fast, "usable", lambda *_: False)
    plain = error(answers(), exact)
    assert bool((quick < 1.5 * plain + 2e-3).all()), (quick, plain)
