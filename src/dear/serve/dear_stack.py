"""Several DeAR adapters in one pass: every image of a batch brings its own tokens, P_attr, alpha and texts.

Attribute tokens are inputs of the image tower, so adapters that put as many tokens into the same layers under
the same masks differ in inputs alone. `DeAR.image_sides` runs once on learned tensors with a leading
dimension B; what remains for each adapter is the product with its class weights, done for all images as one
batched product.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from dear.clip.correction import AppliedCorrection
from dear.clip.gpu import Runner
from dear.methods.dear import DeAR, ImageSides, Learned
from dear.methods.frozen import Frozen


def stack_key(model: DeAR) -> Hashable:
    """Everything that adapters must agree on to be computed in one pass."""
    config = model.config
    shapes = tuple(None if part is None else (part.shape, part.dtype) for part in model.learned)
    masks = tuple(
        (layer, mask.visible.shape, mask.visible.numpy(force=True).tobytes())
        for layer, mask in model.masks.items()
    )
    return (
        "dear", model.first, model.entry, len(model.attributes), shapes, masks, config.beta,
        config.token_start, config.focus_share, config.center,
    )  # fmt: skip


def stacked_logits(
    models: Sequence[DeAR], key: Hashable, weights: Sequence[Tensor], frozen: Frozen, run: Runner
) -> list[Tensor]:
    """Logits [C_i] of each image under its adapter, in the default mode.

    Args:
        models: the adapter of each image, [B], all with the same `stack_key`.
        key: their `stack_key`.
        weights: `DeAR.cached_weights` [C_i, E] of each.
        frozen: `DeAR.inference_stage` of the images.
        run: runs the rest of the tower.
    """
    first = models[0]
    correction = _stack_corrections(models)
    maps = (None,) * 4 if correction is None else correction[1:]  # matrices and biases
    heads, corrected = first.clip.visual.removed_heads, correction is not None

    def sides(*inputs: Tensor | None) -> ImageSides:
        stage, adapters = Frozen._make(inputs[:4]), Learned._make(inputs[4:10])
        applied = AppliedCorrection._make((heads, *inputs[10:])) if corrected else None
        return first.image_sides(stage, adapters, applied)

    visual = first.clip.visual
    recording = ("dear", id(first.clip.plain), visual.positions.data_ptr(), heads, key)
    images = run(recording, sides, *frozen, *_stack(models), *maps).of(first.modes[0])  # [B, E]
    logits = first.clip.logit_scale * _products(_pad(weights), images)  # [B, C]
    rows = [row[: len(classes)] for row, classes in zip(logits.unbind(), weights, strict=True)]
    for index, model in enumerate(models):
        if model.joint:
            rows[index] = model.align_scales(rows[index][None], images[index, None])[0]
    return rows


def _stack(models: Sequence[DeAR]) -> Learned:
    """The learned tensors of each adapter [B, ...]."""
    columns = zip(*(model.learned for model in models), strict=True)
    stacked = Learned._make(None if parts[0] is None else torch.stack(parts) for parts in columns)
    if stacked.focus_mean is None:
        return stacked
    return stacked._replace(focus_mean=stacked.focus_mean[:, None])  # [B, 1, E]


def _stack_corrections(models: Sequence[DeAR]) -> AppliedCorrection | None:
    """The correction of each adapter's backbone, with matrices [B, E, E] and biases [B, 1, E]."""
    towers = {id(clip): clip.visual for clip in {model.clip: None for model in models}}
    corrections = [one for model in models if (one := towers[id(model.clip)].correction) is not None]
    if not corrections:
        return None
    heads, *columns = zip(*corrections, strict=True)
    if all(one is corrections[0] for one in corrections):  # most often: one concept removed for all
        parts = [column[0].expand(len(models), *column[0].shape) for column in columns]
    else:
        parts = [torch.stack(column) for column in columns]
    return AppliedCorrection(heads[0], *(part if part.ndim == 3 else part[:, None] for part in parts))


def _products(texts: Tensor, images: Tensor) -> Tensor:
    """Texts [B, C, E] times images [B, E]: [B, C], in the wider of the two precisions."""
    kind = torch.promote_types(texts.dtype, images.dtype)
    return torch.bmm(texts.to(kind), images.to(kind)[:, :, None])[:, :, 0]


def _pad(rows: Sequence[Tensor]) -> Tensor:
    """Tensors [C_i, ...] as one [B, C, ...], zeros behind the shorter ones."""
    if len({row.shape[0] for row in rows}) == 1:
        return torch.stack(list(rows))
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
