"""Operations of a training step, counted: what no implementation can be faster than.

Matrix products and attention alone are counted, a multiplication and an addition as two operations. A layer
of width D and MLP width M, with n tokens of which r are computed, takes

    q, o: 2 r D² each;  k, v: 2 n D² each;  MLP: 4 r D M;  attention: 4 r n D

forward. Backward through frozen weights takes the same again for the products (gradients of inputs alone) and
twice as much for attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from dear.clip.config import ClipConfig, TowerConfig


def layer(tower: TowerConfig, tokens: int, rows: int | None = None, backward: bool = False) -> int:
    """Operations of one layer on one sequence.

    >>> from dear.clip.config import ClipConfig
    >>> layer(ClipConfig.named("ViT-B-16").vision, 197) // 10**6
    2907
    """
    rows = tokens if rows is None else rows
    width = tower.width
    products = 4 * rows * width**2 + 4 * tokens * width**2 + 4 * rows * width * tower.mlp
    attention = 4 * rows * tokens * width
    return products + (2 if backward else 1) * attention


@dataclass(frozen=True)
class StepCount:
    """Operations of a step by part; `total` is their sum."""

    embed: int
    prefix: int
    frozen: int
    adapted: int
    adapted_backward: int
    text: int
    text_backward: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(vars(self).values())


def dear_step(
    config: ClipConfig,
    batch: int,
    classes: int,
    words: int = 12,
    tokens: int = 5,
    text_tokens: int = 5,
    first: int | None = None,
) -> StepCount:
    """Operations of our DeAR step.

    Args:
        config: the model's shape.
        batch: images.
        classes: classes.
        words: tokens of the longest prompt, first and last included.
        tokens: attribute tokens.
        text_tokens: learned text tokens.
        first: J; the last third begins there by default.
    """
    v, t = config.vision, config.text
    first = v.last_third[0] if first is None else first
    n, long, text = v.positions, v.positions + tokens, words + text_tokens
    suffix = v.layers - first  # whole layers of the suffix; of the last only some rows are computed
    text_suffix = t.layers - (first if t.layers == v.layers else t.last_third[0])
    read = 1 + tokens
    # Of layer J's inputs only the tokens need a gradient: no product with q, k, v's weights for the others.
    spared = 6 * n * v.width**2
    text_spared = 6 * words * t.width**2
    e = config.embed_dim
    return StepCount(
        embed=batch * 2 * (n - 1) * 3 * v.patch_size**2 * v.width,
        prefix=batch * (first - 1) * layer(v, n),
        frozen=batch * (suffix * layer(v, n) + layer(v, n, 1) + 2 * v.width * e),
        adapted=batch * (suffix * layer(v, long) + layer(v, long, read) + 2 * read * v.width * e),
        adapted_backward=batch
        * (
            suffix * layer(v, long, backward=True)
            + layer(v, long, read, backward=True)
            + 4 * read * v.width * e
            - spared
        ),
        text=classes * (text_suffix * layer(t, text) + layer(t, text, 1) + 2 * t.width * e),
        text_backward=classes
        * (
            text_suffix * layer(t, text, backward=True)
            + layer(t, text, 1, backward=True)
            + 2 * t.width * e
            - text_spared
        ),
        head=6 * batch * classes * e,
    )
