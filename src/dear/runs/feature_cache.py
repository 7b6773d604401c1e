"""Frozen features of image files, cached between runs of the program.

A row is addressed by the content of the image file, the weights of the backbone and its precision. A changed
file or another backbone therefore never gets an old row, and the same image in two folders is computed once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dear.clip.config import Head
from dear.clip.model import Clip
from dear.data.batches import over_batches, pixels_for
from dear.data.images import ImageSet, stored_digest
from dear.methods.base import Method
from dear.utils.feature_store import FeatureStore
from dear.utils.progress import Progress

VERSION = 2  #: of the rows; raise it when preprocessing or the towers change their answers
_FORMAT = b"safetensors"  # of stored rows
_MOST_BYTES = 1 << 16  # of a row: larger ones would fill the disk
_BATCH = 100

Rows = Callable[[list[int]], Tensor]
"""Float rows [b, ...] of some images of a set, computed."""


class FeatureCache:
    """Rows of image files, read from a store (the user's own) where they are known and computed where not."""

    def __init__(self, store: FeatureStore | None = None) -> None:
        self.store = FeatureStore() if store is None else store

    def rows(self, what: bytes, images: ImageSet, indices: list[int], compute: Rows) -> Tensor:
        """Rows [b, ...] in float32 on the CPU; `what` says what they are and by which weights."""
        keys = _keys(images, indices, what)
        known = self.store.get(keys.values())
        missing = [index for index in indices if keys.get(index) not in known]
        fresh: dict[int, Tensor] = {}
        shape: tuple[int, ...] | None = None
        if missing:
            rows = compute(missing).float().cpu()
            shape = tuple(rows.shape[1:])
            fresh = dict(zip(missing, rows, strict=True))
            self._keep(images, fresh, keys)
        result = []
        for index in indices:
            row = fresh[index] if index in fresh else _unpack(known[keys[index]])
            if row is None or (shape is not None and tuple(row.shape) != shape):  # damaged: computed again
                row = compute([index]).float().cpu()[0]
            result.append(row)
        return torch.stack(result)

    def _keep(self, images: ImageSet, rows: Mapping[int, Tensor], keys: Mapping[int, bytes]) -> None:
        """Store rows of images, by their places, that have a key."""
        skipped = getattr(images, "problems", {})  # images that could not be read have no true row
        self.store.put(
            {
                keys[index]: save({"row": row.contiguous()})
                for index, row in rows.items()
                if index in keys
                and index not in skipped
                and row.numel() * 4 <= _MOST_BYTES
                and bool(row.isfinite().all())
            }
        )

    def image_features(self, clip: Clip, images: ImageSet, progress: Progress | None = None) -> Tensor:
        """Frozen image features [n, E] of CLIP's own view of every image, on the CPU."""
        parts, _ = over_batches(
            images, lambda some, rows: self.features(clip, some, rows), clip,
            progress=progress, batch=_BATCH,
        )  # fmt: skip
        return torch.cat([torch.empty(0, clip.feature_width), *parts])

    def focused_features(
        self,
        clip: Clip,
        images: ImageSet,
        groups: Sequence[Sequence[Head]],
        progress: Progress | None = None,
    ) -> Tensor:
        """Image features and what each of G groups of heads adds to them, [n, (1 + G) E], on the CPU."""
        clip = clip.focused(())
        what = _digest(f"parts of {[list(heads) for heads in groups]}", clip)

        @torch.no_grad()
        def some(reading: ImageSet, rows: list[int]) -> Tensor:
            def compute(missing: list[int]) -> Tensor:
                x = clip.visual.embed(pixels_for(clip, reading, missing).to(clip.device))
                features, terms = clip.visual.features_and_terms(x, 1, groups)
                return torch.cat([features, *terms], dim=1)

            return self.rows(what, reading, rows, compute)

        parts, _ = over_batches(images, some, clip, progress=progress, batch=_BATCH)
        return torch.cat([torch.empty(0, (1 + len(groups)) * clip.config.embed_dim), *parts])

    def remember(self, clip: Clip, images: ImageSet, features: Tensor) -> None:
        """Cache image features [n, W] that are known already, for `image_features` of the same backbone."""
        indices = list(range(len(images)))
        keys = _keys(images, indices, _digest("image feature", clip))
        self._keep(images, dict(zip(indices, features, strict=True)), keys)

    def features(self, clip: Clip, images: ImageSet, indices: list[int]) -> Tensor:
        """Frozen image features [b, E] of some images, on the CPU."""
        return self.rows(
            _digest("image feature", clip),
            images,
            indices,
            lambda rows: clip.encode_image(pixels_for(clip, images, rows)),
        )


def learned_digest(kind: str, method: Method, *words: str) -> bytes:
    """What identifies a method's answers: weights, options, roles, everything learned, and `words`."""
    found = hashlib.sha256(_digest(kind, method.clip))
    options = repr(sorted(asdict(method.config).items()))
    for text in (method.name, options, *method.trained_classes, "", *words):
        found.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))
    if method.roles is not None:
        kinds = [(key, role.kind, role.concept) for key, role in method.roles]
        found.update(repr((kinds, method.roles.core)).encode())
    given = method.prompts.given
    if given is not None:
        found.update(repr(given.tolist()).encode())
    for name, tensor in sorted(method.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


def _keys(images: ImageSet, indices: list[int], what: bytes) -> dict[int, bytes]:
    """The keys of those images that are files."""
    return {index: key for index in indices if (key := content_key(images, index, what)) is not None}


def content_key(images: ImageSet, index: int, what: bytes) -> bytes | None:
    """The key of an image's row; None for an image that is in memory only."""
    content = stored_digest(images, index)
    return None if content is None else hashlib.sha256(_FORMAT + what + content).digest()


def _digest(kind: str, clip: Clip) -> bytes:
    """What identifies rows of a backbone: all that decides them, precision and kind of device included."""
    corrected = None if clip.correction is None else clip.correction.digest
    state = (VERSION, kind, clip.identity, corrected, clip.focus, str(clip.visual.dtype), clip.device.type)
    return hashlib.sha256(repr(state).encode()).digest()


def _unpack(data: bytes) -> Tensor | None:
    """The row that was stored; None if the bytes are damaged."""
    try:
        return load(data).get("row")
    except SafetensorError:
        return None
