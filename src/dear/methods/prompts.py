"""The prompts of a task's classes and their constant tensors, computed once."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dear._io.text import check_name, fill_template
from dear.clip.edit import Edit
from dear.clip.model import Clip
from dear.errors import InputError, UsageError

TEMPLATE = "a photo of a {}."
_CLASSES_AT_ONCE = 256  # bounds the memory of the frozen passes over long class lists


def unit(x: Tensor) -> Tensor:
    """Features [..., E] at length 1, in float32 (float64 stays): cosines and logits need the precision."""
    return F.normalize(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x, dim=-1)


def scores(clip: Clip, images: Tensor, texts: Tensor) -> Tensor:
    """CLIP's logits [B, C]: temperature times the cosines of features [B, E] and [C, E]."""
    return clip.logit_scale * unit(images) @ unit(texts).T


def distance(adapted: Tensor, frozen: Tensor) -> Tensor:
    """1 - cosine, the mean over rows of unit features [n, E].

    >>> float(distance(torch.eye(2), torch.eye(2).flip(0)))
    1.0
    """
    return (1 - (adapted * frozen).sum(-1)).mean()


class ClassPrompts:
    """One prompt per class, as token ids, with the frozen work on them done once.

    Args:
        clip: the backbone whose text tower reads the prompts.
        classes: names of the classes.
        template: the sentence around a name, with `{}` in its place.
        ids: token ids [C, T] to use instead of tokenizing the sentences.
    """

    def __init__(self, clip: Clip, classes: Sequence[str], template: str, ids: Tensor | None = None) -> None:
        if isinstance(classes, str) or not classes:
            raise UsageError(f"classes must be a list of at least one name; got {classes!r}")
        nameless = [c for c in classes if not isinstance(c, str) or not c.strip()]
        if nameless:
            raise UsageError(f"a class name must be text that is not empty; got {nameless[0]!r}")
        self.clip = clip
        self.classes = tuple(check_name(name) for name in classes)
        self.template = template
        self.texts = tuple(fill_template(template, name) for name in self.classes)
        self.given = ids
        full = clip.tokenize(self.texts) if ids is None else ids
        if full.ndim != 2 or full.shape[0] != len(self.classes):
            raise InputError(
                f"ids must be [{len(self.classes)}, T], one row per class; got {list(full.shape)}"
            )
        if full.numel() == 0 or not 0 <= int(full.min()) <= int(full.max()) < clip.config.text.vocab:
            raise InputError(f"ids must be token numbers from 0 to {clip.config.text.vocab - 1}")
        self.ids = clip.text.cut(full).to(clip.device)  # [C, T]
        self.eot = clip.text.eot(self.ids)  # [C]
        self._frozen: Tensor | None = None
        self._prefix: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def on(self, clip: Clip) -> ClassPrompts:
        """The same prompts read by a copy of the backbone; the frozen features stay those of the first."""
        other = copy.copy(self)
        other._frozen = self.frozen
        if clip is not self.clip:
            other.clip, other._prefix = clip, {}
        else:
            other._prefix = dict(self._prefix)
        return other

    @property
    def frozen(self) -> Tensor:
        """Unit features of the prompts under the frozen text tower, [C, E]."""
        if self._frozen is None:
            with torch.no_grad():
                self._frozen = unit(self.clip.encode_text(self.ids))
        return self._frozen

    def prefix(self, last: int) -> Tensor:
        """What layer `last` of the frozen text tower gives, [C, T, D] (0: the embeddings); kept."""
        if last not in self._prefix:
            with torch.no_grad():
                tower = self.clip.text
                parts = [tower.run(tower.embed(i), last=last) for i in self.ids.split(_CLASSES_AT_ONCE)]
                self._prefix[last] = torch.cat(parts)
        return self._prefix[last]

    def features(self, edit: Edit, first: int = 1) -> Tensor:
        """Features [C, E] (not unit) of the text tower under `edit`, which starts to act at layer `first`.

        Layers before `first` are the kept prefix; the last layer computes EOT's row alone.
        """
        end = self.eot + (edit.count if edit.at is not None else 0)
        tower = self.clip.text
        x = tower.run(self.prefix(first - 1), first=first, edit=edit, read=end[:, None])  # [C, 1, D]
        return tower.project(x[:, 0])
