"""Heatmaps of other methods, written out: rollout, Grad-CAM, gradient x input, LeGrad.

Every function returns maps [B, S, S] of a question [B, E]: a direction of the feature's space, of which the
score is the cosine (rollout asks none). None of them sums to the score.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.model import Clip
from dear.clip.rows import Rows
from dear.clip.tower import Block


@dataclass(frozen=True)
class Pass:
    """One pass with all attention patterns [B, H, N, N] and layers' outputs [B, N, D] in the graph."""

    patterns: list[Tensor]
    outputs: list[Tensor]
    score: Tensor  #: [B]
    side: int

    def grid(self, patches: Tensor) -> Tensor:
        """Values of patches [B, N - 1] as maps."""
        return patches.unflatten(1, (self.side, self.side)).detach()


def forward(clip: Clip, pixels: Tensor, question: Tensor) -> Pass:
    """Run the image tower with everything kept."""
    visual = clip.visual
    x = visual.embed(pixels.clone().requires_grad_())
    patterns, outputs = [], []
    for block in visual.blocks:
        assert isinstance(block, Block)
        attn, normed = block.attn, block.ln_1(x)
        q, k, v = (attn.split(part(normed)) for part in (attn.q, attn.k, attn.v))
        pattern = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        patterns.append(pattern)
        x = x + attn.merge(pattern @ v)
        x = x + block.mlp(block.ln_2(x))
        outputs.append(x)
    score = (F.normalize(visual.project(Rows(x))[:, 0], dim=-1) * question).sum(-1)
    return Pass(patterns, outputs, score, clip.config.vision.side)


def rollout(run: Pass) -> Tensor:
    """Attention rollout (Abnar, Zuidema, ACL 2020): the class token's row of the product of patterns."""
    total: Tensor | None = None
    for pattern in run.patterns:
        mean = pattern.mean(1)
        mixed = 0.5 * mean + 0.5 * torch.eye(mean.shape[-1])
        total = mixed if total is None else mixed @ total
    assert total is not None
    return run.grid(total[:, 0, 1:])


def grad_cam(run: Pass, layer: int) -> Tensor:
    """Grad-CAM (Selvaraju et al., ICCV 2017) on the patches behind a layer, counted from 1."""
    (slope,) = torch.autograd.grad(run.score.sum(), run.outputs[layer - 1], retain_graph=True)
    weight = slope[:, 1:].mean(1, keepdim=True)
    return run.grid((weight * run.outputs[layer - 1][:, 1:]).sum(-1).relu())


def gradient_input(run: Pass, layer: int) -> Tensor:
    """Gradient times activation of each patch behind a layer."""
    (slope,) = torch.autograd.grad(run.score.sum(), run.outputs[layer - 1], retain_graph=True)
    return run.grid((slope * run.outputs[layer - 1])[:, 1:].sum(-1))


def legrad(clip: Clip, run: Pass, question: Tensor) -> Tensor:
    """LeGrad (Bousselham et al., ICCV 2025): positive gradients at patterns, summed over layers.

    The score of a layer is that of its own class token under the final norm and projection.
    """
    total = torch.zeros(len(question), run.side**2)
    for pattern, output in zip(run.patterns, run.outputs, strict=True):
        score = (F.normalize(clip.visual.project(Rows(output))[:, 0], dim=-1) * question).sum()
        (slope,) = torch.autograd.grad(score, pattern, retain_graph=True)
        total = total + slope.relu().mean(1).mean(1)[:, 1:]
    return run.grid(total)
