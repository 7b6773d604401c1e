"""Several DeAR adapters in one pass: every image of a batch brings its own tokens, P_attr, alpha and texts.

Attribute tokens are inputs of the image tower, so adapters that put as many tokens into the same layers under
the same masks differ in inputs alone. The tower runs once on tokens [B, T, D]; what is left to each adapter
are small products, done for all images as one batched product.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dear.clip.gpu import Runner
from dear.methods.base import Frozen, unit

if TYPE_CHECKING:
    from dear.methods.dear import DeAR


def stack_key(model: DeAR) -> Hashable:
    """Everything that adapters must agree on to be computed in one pass; cached, for it never changes."""
    cached: Hashable = model.__dict__.get("_stack_key")
    if cached is None:
        config, masks = model.config, hashlib.sha256()
        for layer, mask in model.masks.items():
            masks.update(f"{layer} {tuple(mask.visible.shape)} ".encode())
            masks.update(bytes(mask.visible.flatten().to(torch.uint8).tolist()))
        learned = tuple((name, tuple(getattr(model, name).shape)) for name in _projection(model))
        cached = (
            "dear", model.first, model.entry, len(model.attributes), tuple(model.tokens.shape),
            model.tokens.dtype, config.early_tokens, config.early_beta, config.beta, config.token_start,
            config.projection, learned, masks.digest(), bool(config.focus), config.focus_share,
            config.center,
        )  # fmt: skip
        model.__dict__["_stack_key"] = cached
    return cached


def stacked_logits(models: Sequence[DeAR], frozen: Frozen, mode: str, run: Runner) -> list[Tensor]:
    """Logits [C_i] of each image under its own adapter, of `models` [B] with equal `stack_key`.

    `frozen` is `DeAR.inference_stage` of the images; `run` runs the suffix of the tower.
    """
    first = models[0]
    tokens = _learned(models, "tokens")  # [B, T, D], or [B, L, T, D]
    v = _learned(models, "v")  # [B, 1 + A]
    projections = [_learned(models, name) for name in _projection(first)]
    visual, changes = first.clip.visual, _corrections(models)
    key = ("dear", id(first.clip.plain), visual.positions.data_ptr(), visual.removed_heads, stack_key(first))

    early = (_learned(models, "early_tokens"),) if first.config.early_tokens else ()  # [B, L, T, D]
    means = [model.focus_mean for model in models if model.focus_mean is not None]
    focus = (torch.stack(means)[:, None],) if means else ()  # [B, 1, E]
    counts = (len(frozen), len(early), len(projections), len(changes), len(focus))

    def suffix(*given: Tensor) -> tuple[Tensor, ...]:
        parts = iter(given)
        tokens, v = next(parts), next(parts)
        stage, before, learned, own, focused = (tuple(islice(parts, count)) for count in counts)
        return _features(first, stage, tokens, before, v, learned, own, focused)

    given = (*frozen, *early, *projections, *changes, *focus)
    f_cls, mixed = run(key, suffix, tokens, v, *given)  # [B, E] each
    weights = [_class_weights(model) for model in models]
    means = [model.image_mean for model in models if model.image_mean is not None]
    center = torch.stack(means) if first.config.center else None  # [B, E]
    if mode == "decoupled":
        chosen = first.centered(f_cls, center)
    else:
        chosen = first.centered(mixed, center, first.own_share)
    logits = first.clip.logit_scale * _products(_padded(weights), chosen)  # [B, C]
    rows = [row[: len(own)] for row, own in zip(logits.unbind(), weights, strict=True)]
    for place, model in enumerate(models):
        if model.joint:
            rows[place] = model.on_one_scale(rows[place][None], chosen[place, None])[0]
    return rows


def _learned(models: Sequence[DeAR], name: str) -> Tensor:
    """A learned tensor of each adapter, stacked; read from the dict, for a Module finds attributes slowly."""
    return torch.stack([getattr(model, name) for model in models])


def _corrections(models: Sequence[DeAR]) -> tuple[Tensor, ...]:
    """Matrix and bias of each adapter's correction: of features [B, E], and of pooled vectors [B, D]."""
    towers = {id(clip): clip.visual for clip in {model.clip: None for model in models}}
    corrections = [one for model in models if (one := towers[id(model.clip)].correction) is not None]
    if not corrections:
        return ()
    found = list(zip(*(one[1:] for one in corrections), strict=True))  # all fields but the heads
    if all(one is corrections[0] for one in corrections):  # most often: one concept removed for all
        return tuple(part[0].expand(len(models), *part[0].shape) for part in found)
    return tuple(torch.stack(part) for part in found)


def _correct(features: Tensor, changes: Sequence[Tensor]) -> Tensor:
    """Rows [B, ..., E] under the affine map of each image; they stay as they are without one."""
    if not changes:
        return features
    matrix, bias = (change.to(features.dtype) for change in changes)
    if features.ndim == 2:
        return torch.bmm(features[:, None], matrix)[:, 0] + bias
    return torch.bmm(features, matrix) + bias[:, None]


def _features(
    model: DeAR,
    frozen: Frozen,
    tokens: Tensor,
    early: Sequence[Tensor],
    v: Tensor,
    projections: Sequence[Tensor],
    changes: Sequence[Tensor],
    focus: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Unit feature of the class token and the fused image side [B, E] each, as `DeAR` computes them."""
    visual = model.clip.visual
    learned = [tokens if tokens.ndim == 3 else tokens[:, i] for i in range(len(model.masks))]
    x_cls, own = model.pooled(frozen, learned, [one for sets in early for one in sets.unbind(1)])
    f_cls = unit(_correct(visual.into_space(x_cls), changes[:2]))  # eq. 10
    own = _correct(own, changes[2:])
    f_attr = own.to(projections[0].dtype)
    for matrix in projections:  # eq. 11: P_attr, or the two factors of its change
        f_attr = f_attr @ matrix
    if model.config.projection == "low-rank":
        f_attr = visual.into_space(own).to(f_attr.dtype) + f_attr
    if focus:
        f_attr = torch.cat([f_attr, model.focused(frozen, *focus)], dim=1)
    f_attr = unit(f_attr)
    weights = model.weights(v)  # [B, 1 + A], one more with a focus
    mixed = weights[:, :1] * f_cls + torch.einsum("ba,bae->be", weights[:, 1:], f_attr)  # eq. 17-19
    return f_cls, mixed


def _class_weights(model: DeAR) -> Tensor:
    """Class weights [C, E] while what they come from stays the same; `Method.cached` costs more per image."""
    sources = [model.text_tokens, *((model.log_direction_weight,) if model.directed else ())]
    stamp = (model.prompts, *((tensor.data_ptr(), tensor._version) for tensor in sources))
    cached: tuple[Any, Tensor] | None = model.__dict__.get("_stack_weights")
    if cached is None or cached[0] != stamp:
        cached = model.__dict__["_stack_weights"] = (stamp, model.cached_weights())
    return cached[1]


def _projection(model: DeAR) -> tuple[str, ...]:
    """Names of the learned tensors of P_attr."""
    return ("p_down", "p_up") if model.config.projection == "low-rank" else ("p_attr",)


def _products(texts: Tensor, images: Tensor) -> Tensor:
    """Texts [B, C, E] times images [B, E]: [B, C], in the wider of the two precisions."""
    kind = torch.promote_types(texts.dtype, images.dtype)
    return torch.bmm(texts.to(kind), images.to(kind)[:, :, None])[:, :, 0]


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Tensors [C_i, ...] as one [B, C, ...], zeros behind the shorter ones."""
    if len({row.shape[0] for row in rows}) == 1:
        return torch.stack(list(rows))
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
