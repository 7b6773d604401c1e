"""Heads described by their weights alone: what each head writes for every direction of its input.

A head reads rows that `ln_1` has normed. For a row y it computes the value `V_h y` [d], and M_h turns that
into a contribution to the image feature (`dear.heads.contributions`). LayerNorm makes all rows equally long
and removes their mean, so without any image the plainest assumption is that no direction of a normed row is
preferred. The outputs for the D unit directions then take the place of the outputs for D images, and
everything that follows (TEXTSPAN, concepts, rules) stays as it is. The singular vectors of these D
contributions are those of the value-output matrix `diag(w) V_h M_h`, which SITH (Gentile et al., CVPR 2026)
describes by phrases one by one.

Nothing here depends on images, so a bootstrap over images cannot judge the result; `phrase_stability` draws
the phrases of the corpus anew instead, which shows how far roles depend on the wording. Whether roles say
anything is measured by `dear.heads.information`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.heads.contributions import block_of, check_layers, head_maps
from dear.heads.moments import Moments
from dear.heads.stability import REPLICATES, Stability, Table, measure_stability


@torch.no_grad()
def direction_outputs(clip: Clip, layers: Iterable[int] | None = None) -> Tensor:
    """Output of each head for each direction of its normed input.

    Row i belongs to a class token whose row, before the weight of `ln_1`, is the i-th unit vector less its
    mean. Biases are left out: they are the same for every input. With attention pooling of G heads, every
    pooling head reads the same row, so the output appears G times.

    Args:
        clip: the backbone; its correction, if it has one, plays no part.
        layers: counted from 1; None: all.

    Returns:
        [D, L, H, d] in float32, [D, L, H, G·d] with attention pooling; its mean over D is 0.

    Raises:
        UsageError: a layer does not exist.

    >>> from dear.clip.config import ClipConfig
    >>> direction_outputs(Clip(ClipConfig.named("ViT-B-32")), [11, 12]).shape
    torch.Size([768, 2, 12, 64])
    """
    visual, heads = clip.visual, clip.config.vision.heads
    copies = 1 if visual.pool is None else visual.pool.attn.heads
    outputs = []
    for layer in check_layers(clip, layers):
        block = block_of(visual, layer)
        values = block.attn.v.weight.float() * block.ln_1.weight.float()  # [D, D]: columns are directions
        values = values - values.mean(dim=1, keepdim=True)  # a normed row has mean 0
        outputs.append(values.T.unflatten(1, (heads, -1)).repeat(1, 1, copies))  # [D, H, G·d]
    return torch.stack(outputs, dim=1)


def weight_moments(clip: Clip, layers: Iterable[int] | None = None) -> Moments:
    """Moments over all directions of the heads' input, to be used like those over images.

    `textspan_moments` picks from them the phrases along which a head can write most.

    >>> from dear.clip.config import ClipConfig
    >>> weight_moments(Clip(ClipConfig.named("ViT-B-32")), [12]).count
    768
    """
    chosen = check_layers(clip, layers)
    result = Moments(head_maps(clip, chosen), chosen)
    result.add(direction_outputs(clip, chosen))
    return result


def draw_phrases(count: int, seed: int) -> list[int]:
    """Which of `count` phrases a bootstrap sample contains, ascending, each once: about 63 % of them.

    How often a phrase was drawn does not matter: TEXTSPAN cannot pick a direction twice.

    >>> draw_phrases(5, seed=0)
    [1, 2, 3, 4]
    """
    return sorted(set(random.Random(seed).choices(range(count), k=count)))


def phrase_stability(
    find: Callable[[list[int]], Table], roles: Table, count: int, replicates: int = REPLICATES
) -> Stability:
    """Stability of a role map when the phrases of its corpus are drawn again.

    Args:
        find: the roles that some of the `count` phrases, by number, lead to.
        roles: the roles that all phrases lead to.
        count: phrases in the corpus.
        replicates: how often phrases are drawn.
    """
    samples = (draw_phrases(count, seed) for seed in range(replicates))
    return replace(measure_stability(roles, map(find, samples)), over="phrases")
