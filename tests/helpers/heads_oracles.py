"""The obvious versions, which the fast code must equal, and a small backbone to run them on."""

import numpy as np
import torch

from dear.clip.config import ClipConfig, TextConfig, VisionConfig
from dear.clip.model import Clip


def literal_textspan(C, T, count, rank=80):
    """TEXTSPAN for one head, step by step as the method page writes it, in numpy float64."""
    C, T = np.asarray(C, np.float64), np.asarray(T, np.float64)
    n, d = C.shape
    T = T / np.linalg.norm(T, axis=1, keepdims=True)
    _, singular, rows = np.linalg.svd(C, full_matrices=False)
    tolerance = (
        singular[0] * max(n, d) * np.finfo(np.float32).eps
    )  # np.linalg.matrix_rank's, for float32 data
    V = rows[: min(rank, int((singular > tolerance).sum()))].T
    T = T @ V @ V.T
    C = C - C.mean(axis=0)
    picks = []
    for _ in range(count):
        spread = (C @ T.T).std(axis=0)
        best = int(np.argmax(spread))
        if spread[best] * np.sqrt(n) <= tolerance:
            break
        t = T[best].copy()
        picks.append(best)
        C = C - np.outer(C @ t, t) / (t @ t)
        T = T - np.outer(T @ t, t) / (t @ t)
    return picks


def literal_contributions(clip, pixels):
    """[B, L, H, E] and [B, E] by running every block by hand, every head of every token on its own."""
    visual = clip.visual
    x = visual.embed(pixels)
    heads = visual.config.heads
    streams, others = [], [x[:, 0]]
    for block in visual.blocks:
        y = block.ln_1(x)
        q, k, v = (linear(y) for linear in (block.attn.q, block.attn.k, block.attn.v))
        width = q.shape[-1] // heads
        added, layer = torch.zeros_like(x), []
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            weights = torch.softmax(q[..., part] @ k[..., part].transpose(1, 2) / width**0.5, dim=-1)
            term = (weights @ v[..., part]) @ block.attn.o.weight[:, part].T  # [B, N, D]
            added, layer = added + term, [*layer, term[:, 0]]
        x = x + added + block.attn.o.bias
        m = block.mlp(block.ln_2(x))
        x = x + m
        streams.append(torch.stack(layer, 1))
        others += [m[:, 0], block.attn.o.bias.expand_as(m[:, 0])]
    last, norm = x[:, 0], visual.ln_post
    spread = (last.var(1, unbiased=False, keepdim=True) + norm.eps).sqrt()

    def carry(term, spread):
        return ((term - term.mean(-1, keepdim=True)) / spread * norm.weight) @ visual.proj

    terms = carry(torch.stack(streams, 1), spread[:, None, None])
    rest = sum(carry(term, spread) for term in others) + norm.bias @ visual.proj
    return terms, rest


def tiny_clip(activation="quick_gelu", seed=0, layers=4, heads=3, width=24, embed=20):
    """A random CLIP whose biases and norms are not at their neutral start."""
    torch.manual_seed(seed)
    config = ClipConfig(
        VisionConfig(
            width=width,
            layers=layers,
            heads=heads,
            mlp=48,
            activation=activation,
            image_size=32,
            patch_size=8,
        ),
        TextConfig(width=16, layers=2, heads=2, mlp=32, activation=activation),
        embed,
    )
    clip = Clip(config)
    with torch.no_grad():
        for name, value in clip.named_parameters():
            if name.endswith("bias"):
                value.normal_(std=0.3)
            elif ".ln_" in name:
                value.uniform_(0.5, 1.5)
            elif "attn" in name:
                value.mul_(3)
    return clip
