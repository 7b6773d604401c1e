"""Frozen features of image files, cached between runs of the program.

A row is addressed by the content of the image file, the weights of the backbone and its precision. A changed
file or another backbone therefore never reads an old row, and the same image in two folders is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dear.clip.config import Head
from dear.clip.model import Clip
from dear.data.batches import Images, over_batches, pixels_for
from dear.data.content import stored_digest
from dear.data.images import ImageSet
from dear.methods.base import Method
from dear.methods.frozen import Frozen
from dear.utils import digest
from dear.utils.feature_store import FeatureStore
from dear.utils.progress import Progress

VERSION = 3  #: of the rows; increase it when preprocessing or the towers change their results
_FORMAT = b"safetensors"  # of stored rows
_MAX_ROW_BYTES = 1 << 16  # of a row: larger ones would fill the disk
_BATCH = 100

Rows = Callable[[list[int]], Tensor]
"""Float rows [b, ...] of some images of a set, computed."""


class FeatureCache:
    """Rows of image files, read from a store (by default the user's) or computed."""

    def __init__(self, store: FeatureStore | None = None) -> None:
        self.store = FeatureStore() if store is None else store

    def rows(self, namespace: bytes, images: ImageSet, indices: list[int], compute: Rows) -> Tensor:
        """Rows [b, ...] in float32 on the CPU; `namespace` identifies the computation and its weights."""
        keys = _keys(images, indices, namespace)
        stored = self.store.get(keys.values())
        missing = [index for index in indices if keys.get(index) not in stored]
        computed: dict[int, Tensor] = {}
        shape: tuple[int, ...] | None = None
        if missing:
            rows = compute(missing).float().cpu()
            shape = tuple(rows.shape[1:])
            computed = dict(zip(missing, rows, strict=True))
            self._store(images, computed, keys)
        result = []
        for index in indices:
            row = computed[index] if index in computed else _unpack(stored[keys[index]])
            if row is None or (shape is not None and tuple(row.shape) != shape):  # damaged: computed again
                row = compute([index]).float().cpu()[0]
            result.append(row)
        return torch.stack(result)

    def _store(self, images: ImageSet, rows: Mapping[int, Tensor], keys: Mapping[int, bytes]) -> None:
        """Store rows of images, by their places, that have a key."""
        skipped = getattr(images, "problems", {})  # images that could not be read have no true row
        self.store.put(
            {
                keys[index]: save({"row": row.contiguous()})
                for index, row in rows.items()
                if index in keys
                and index not in skipped
                and row.numel() * 4 <= _MAX_ROW_BYTES
                and bool(row.isfinite().all())
            }
        )

    def image_features(self, clip: Clip, images: ImageSet, progress: Progress | None = None) -> Tensor:
        """Frozen image features [n, E] of CLIP's own view of every image, on the CPU."""
        parts, _ = over_batches(
            images, lambda source, rows: self.features(clip, source, rows), clip,
            progress=progress, batch=_BATCH,
        )  # fmt: skip
        return torch.cat([torch.empty(0, clip.config.embed_dim), *parts])

    def features_and_terms(
        self,
        clip: Clip,
        images: ImageSet,
        groups: Sequence[Sequence[Head]],
        progress: Progress | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Image features [n, E], and the sum of the terms of each of G groups of heads, [n, E] each."""
        parts, _ = over_batches(
            images, lambda source, rows: self._terms(clip, source, rows, groups), clip,
            progress=progress, batch=_BATCH,
        )  # fmt: skip
        empty = torch.empty(0, 1 + len(groups), clip.config.embed_dim)
        features, *terms = torch.cat([empty, *parts]).unbind(1)
        return features, terms

    def _terms(
        self, clip: Clip, images: ImageSet, indices: list[int], groups: Sequence[Sequence[Head]]
    ) -> Tensor:
        """Image features and the terms of G groups of heads of some images, [b, 1 + G, E] on the CPU."""

        @torch.no_grad()
        def compute(missing: list[int]) -> Tensor:
            x = clip.visual.embed(pixels_for(clip, images, missing).to(clip.device))
            features, terms = clip.visual.features_and_terms(x, 1, groups)
            return torch.stack([features, *terms], dim=1)

        return self.rows(_terms_digest(clip, groups), images, indices, compute)

    def remember(
        self, clip: Clip, images: ImageSet, features: Tensor, heads: Sequence[Head], terms: Tensor
    ) -> None:
        """Cache image features [n, E] and the terms of some heads [n, E], for a training with this focus."""
        indices = list(range(len(images)))
        keys = _keys(images, indices, _terms_digest(clip, [sorted(set(heads))]))
        rows = torch.stack([features, terms], dim=1)  # [n, 2, E]
        self._store(images, dict(zip(indices, rows, strict=True)), keys)

    def frozen(
        self, clip: Clip, images: ImageSet, focus: Sequence[Head], progress: Progress | None = None
    ) -> Frozen:
        """Image features `x` [n, E] of every image and, with a focus, its terms [n, E], on the CPU."""
        if not focus:
            return Frozen(self.image_features(clip, images, progress))
        features, (terms,) = self.features_and_terms(clip, images, [focus], progress)
        return Frozen(features, focus=terms)

    def some_frozen(self, clip: Clip, images: ImageSet, indices: list[int], focus: Sequence[Head]) -> Frozen:
        """`frozen` for some images of a set, [b, E] each."""
        if not focus:
            return Frozen(self.features(clip, images, indices))
        features, terms = self._terms(clip, images, indices, [focus]).unbind(1)
        return Frozen(features, focus=terms)

    def features(self, clip: Clip, images: ImageSet, indices: list[int]) -> Tensor:
        """Frozen image features [b, E] of some images, on the CPU."""
        return self.rows(
            _digest("image feature", clip),
            images,
            indices,
            lambda rows: clip.encode_image(pixels_for(clip, images, rows)),
        )


def frozen_features(clip: Clip, images: Images, progress: Progress | None = None) -> Tensor:
    """Image features [n, E] of a backbone, on the CPU."""
    parts, _ = over_batches(
        images,
        lambda source, rows: clip.encode_image(pixels_for(clip, source, rows)).float().cpu(),
        clip,
        progress=progress,
    )
    return torch.cat([torch.empty(0, clip.config.embed_dim), *parts])


def learned_digest(kind: str, method: Method, *texts: str) -> bytes:
    """Digest of all that determines a method's logits: weights, options, roles, learned tensors, `texts`."""
    options = repr(sorted(asdict(method.config).items()))
    names = [method.name, options, *method.trained_classes, "", *texts]
    roles = None
    if method.roles is not None:
        roles = [(key, role.kind, role.concept) for key, role in method.roles], method.roles.core
    ids = method.prompts.token_ids
    learned = digest.of_tensors(method.state_dict())
    prompts = method.prompts
    class_texts = (
        [prompts.texts.of(name, method.template) for name in method.classes] if prompts.several_texts else []
    )
    described = repr((names, roles, None if ids is None else ids.tolist(), class_texts))
    return digest.of_parts(_digest(kind, method.clip), described, learned)


def _keys(images: ImageSet, indices: list[int], namespace: bytes) -> dict[int, bytes]:
    """The keys of those images that are files."""
    return {index: key for index in indices if (key := content_key(images, index, namespace)) is not None}


def content_key(images: ImageSet, index: int, namespace: bytes) -> bytes | None:
    """The key of an image's row; None for an image that is in memory only."""
    content = stored_digest(images, index)
    return None if content is None else digest.of_parts(_FORMAT, namespace, content)


def _digest(kind: str, clip: Clip) -> bytes:
    """Digest of all that determines a backbone's rows: weights, precision, kind of device."""
    corrected = None if clip.correction is None else clip.correction.digest
    state = (VERSION, kind, clip.identity, corrected, str(clip.visual.dtype), clip.device.type)
    return digest.of_parts(repr(state))


def _terms_digest(clip: Clip, groups: Sequence[Sequence[Head]]) -> bytes:
    return _digest(f"terms of {[list(heads) for heads in groups]}", clip)


def _unpack(data: bytes) -> Tensor | None:
    """The row that was stored; None if the bytes are damaged."""
    try:
        return load(data).get("row")
    except SafetensorError:
        return None
