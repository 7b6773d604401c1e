"""Calibrated scores of classes as sums of parts by role, and what an average reference image gets of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.calibration.calibration import apply_scales
from dear.clip.model import Clip
from dear.data.batches import over_batches, pixels_for
from dear.data.duplicates import find_duplicates
from dear.data.images import ImageSet, evenly_spaced
from dear.errors import DataError
from dear.heads.known_roles import known_roles
from dear.heads.roles import RoleMap
from dear.tasks.explain.explanation import AVERAGE, FIXED, MLPS, UNKNOWN
from dear.tasks.explain.groups import HeadGroups, head_groups
from dear.tasks.explain.parts import Parts, Trace, means_of
from dear.utils.progress import Progress

if TYPE_CHECKING:
    from dear.runs.model import Model

REFERENCE = 96  #: reference images at most
BATCH = 16


@dataclass(frozen=True)
class ClassMeans:
    """Means over the reference images of the score of one class: by part, and by head [L, H]."""

    parts: Mapping[str, float]
    heads: Tensor


@dataclass(frozen=True)
class Reference:
    """Reference images: means of heads' outputs, mean feature, outputs per image, and their traces."""

    images: ImageSet
    means: list[dict[int, Tensor]]
    center: Tensor  #: [E], mean feature
    states: Tensor  #: [n, L, H, d], of the class token, divided by its spread
    traces: tuple[Trace, ...]  #: without activations
    by_class: dict[int, ClassMeans] = field(default_factory=dict)  #: computed when a class is explained


class ScoreParts:
    """Decomposes the scores of a model.

    Args:
        model: what answers.
        reference: images that parts are relative to, at most `REFERENCE` of them; unreadable ones are
            skipped. None: parts are absolute, and there are no answers without a part.
        roles: role map; None: the method's, or the backbone's own.
        mode: way to predict; None: the usual one.
        progress: called with ("reference", images done, images in all).

    Raises:
        UsageError: the backbone pools its tokens by attention.
    """

    def __init__(
        self,
        model: Model,
        reference: ImageSet | None = None,
        roles: RoleMap | None = None,
        mode: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.method = model.bound
        self.mode = model.pick_mode(mode)
        self.role_map = roles or self.method.roles or known_roles(model.clip.plain)
        self.groups: HeadGroups = head_groups(model.clip.config.vision, self.role_map)
        self.images = None if reference is None else _distinct_subset(reference, REFERENCE)
        self._progress = progress

    def trace(self, pixels: Tensor) -> Trace:
        """The model's calibrated logits of normalized pixels [B, 3, S, S], with what decomposes them."""
        scales, bound = self.model.calibrator.scales(self.mode), {}

        def answer(clip: Clip) -> Tensor:
            if clip not in bound:  # bound once: texts are kept
                bound[clip] = self.method.bind(clip)
            logits = bound[clip](pixels)[self.mode]
            return logits if scales is None else apply_scales(logits, scales.to(logits))

        return Trace(self.method.clip, answer)

    @cached_property
    def reference(self) -> Reference | None:
        """The reference images, run once."""
        if self.images is None:
            return None

        def run(some: ImageSet, rows: list[int]) -> tuple[Trace, Tensor, Tensor]:
            trace = self.trace(pixels_for(self.method.clip, some, rows))
            states = trace.head_states()[0]
            result = trace, trace.features(), states[min(states)].float()
            trace.release_activations()
            return result

        images = self.images
        while True:
            batches, problems = over_batches(
                images,
                run,
                self.method.clip,
                unreadable="skip",
                progress=self._progress,
                stage="reference",
                batch=BATCH,
            )
            if not problems:
                break
            images = images.subset([row for row in range(len(images)) if row not in problems])
            if not len(images):
                raise DataError(f"{self.images.name}: no reference image can be read")
        traces, features, states = zip(*batches, strict=True)
        center = torch.cat(features).mean(0)
        return Reference(images, means_of(traces), center, torch.cat(states), traces)

    def _means(self, labels: Tensor) -> list[list[ClassMeans]]:
        """Means for classes [B, Q] as lists [Q][B]; empty without reference images."""
        reference = self.reference
        if reference is None:
            return []
        return [[self._class_means(reference, label) for label in row] for row in labels.T.tolist()]

    def _class_means(self, reference: Reference, label: int) -> ClassMeans:
        """Means of the parts of a class's score over the reference images."""
        if label not in reference.by_class:
            tables: list[dict[str, Tensor]] = []
            heads: list[Tensor] = []
            for trace in reference.traces:
                labels = torch.full((len(trace.logits), 1), label)
                parts = trace.parts(self.questions(labels))
                tables.append(self.table(parts))
                heads.append(parts.heads[0, :, 0])  # [B, L, H]
            means = {
                name: float(torch.cat([table[name][0] for table in tables]).mean()) for name in tables[0]
            }
            reference.by_class[label] = ClassMeans(means, torch.cat(heads).mean(0))
        return reference.by_class[label]

    def pairs(self, logits: Tensor, chosen: Sequence[int | None] = (None, None)) -> Tensor:
        """The class to explain and the one to compare with, [B, 2]."""
        order = logits.argsort(dim=1, descending=True, stable=True).tolist()
        pairs = []
        for row in order:
            first = chosen[0] if chosen[0] is not None else next(c for c in row if c != chosen[1])
            second = chosen[1] if chosen[1] is not None else next(c for c in row if c != first)
            pairs.append([first, second])
        return torch.tensor(pairs)

    def questions(self, pairs: Tensor) -> Tensor:
        """Weights of the classes: those of `pairs` [B, Q] above the mean of all, [Q, B, C].

        Of several labels each by itself.
        """
        weights = F.one_hot(pairs.T, len(self.model.classes)).double()
        return weights if self.several else weights - 1 / len(self.model.classes)

    @property
    def several(self) -> bool:
        """Whether images have several labels."""
        return self.model.method.several

    @cached_property
    def limits(self) -> Tensor:
        """Of several labels: the calibrated logit [C] from which an image has each label."""
        return self.model.calibrator.label_thresholds(self.mode).double().clamp(1e-6, 1 - 1e-6).logit()

    def table(self, parts: Parts) -> dict[str, Tensor]:
        """The parts by name, [Q, B] each: their sum is the score."""
        heads = parts.heads[:, :, 0]  # of the class token, [Q, B, L, H]
        table = {
            name: sum((heads[:, :, layer - 1, head] for layer, head in keys), torch.zeros(()))
            for name, keys in self.groups.heads.items()
        }
        rows = parts.rows()
        for name, places in self.tokens(rows.shape[-1] - 1).items():
            table[name] = rows[:, :, places].sum(-1)
        table[MLPS] = parts.mlps[:, :, 0].sum(-1)
        removed = {key: value for key, value in parts.constants.items() if key.startswith("correction")}
        if removed:
            table[self._removal] = sum(removed.values(), torch.zeros(()))
        constants = (value for key, value in parts.constants.items() if key not in removed)
        table[FIXED] = parts.start[:, :, 0] + sum(constants, torch.zeros(()))
        if parts.linear:
            table[FIXED] = table[FIXED] + parts.rest
        else:
            table[UNKNOWN] = parts.rest
        return {name: value.expand_as(parts.score) for name, value in table.items()}

    def relative_table(self, parts: Parts, labels: Tensor) -> dict[str, Tensor]:
        """`table` of the scores of classes [B, Q], less its means over the reference images: [Q, B] each.

        The sum of the means is one more part, so that the sum is the score.
        """
        table, means = self.table(parts), self._means(labels)
        if not means:
            return table

        def mean(name: str) -> Tensor:
            return torch.tensor([[each.parts[name] for each in row] for row in means], dtype=torch.float64)

        result = {name: value - mean(name) for name, value in table.items()}
        result[AVERAGE] = sum((mean(name) for name in table), torch.zeros(()))
        return result

    def relative_heads(self, heads: Tensor, labels: Tensor) -> Tensor:
        """Heads' parts [Q, B, L, H] of the scores of classes [B, Q] less their means."""
        means = self._means(labels)
        if not means:
            return heads
        return heads - torch.stack([torch.stack([each.heads for each in row]) for row in means])

    def tokens(self, count: int) -> dict[str, list[int]]:
        """Extra tokens by name: their rows; all together where the role map names no concept."""
        names = getattr(self.method, "attributes", None) if self.groups.by_role else None
        if not count:
            return {}
        if names and count % len(names) == 0:
            each = count // len(names)
            return {
                f"Token {name}": list(range(1 + i * each, 1 + (i + 1) * each)) for i, name in enumerate(names)
            }
        return {"Tokens": list(range(1, 1 + count))}

    @property
    def _removal(self) -> str:
        correction = self.model.clip.correction
        return f"Removal of {correction.note}" if correction is not None and correction.note else "Removal"


def _distinct_subset(images: ImageSet, most: int) -> ImageSet:
    """At most `most` images, equally many of each class where there are enough, and of copies one.

    They are spread evenly over the images of a class, which may be in order of something.
    """
    if len(images) > most:
        rows_of = [(images.labels == label).nonzero()[:, 0].tolist() for label in range(len(images.classes))]
        chosen: list[int] = []
        for number, rows in enumerate(sorted(rows_of, key=len)):
            count = (most - len(chosen)) // (len(rows_of) - number)
            chosen += [rows[place] for place in evenly_spaced(len(rows), count)]
        images = images.subset(sorted(chosen))
    return images.subset(find_duplicates(images).distinct(images.labels.tolist()))
