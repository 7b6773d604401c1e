"""Why a model answers as it does: its score as a sum over heads, tokens and patches, and other answers.

The score of a class is compared with that of another, the runner-up unless one is named. Both are decomposed
exactly (`parts`) and shown above the mean of all classes, which changes no answer. Every part is relative to
its mean over reference images: what an average image gets is one part, and the others say what is particular
about this image. Answers without something are computed: without the heads of a role (what they add to the
feature replaced by its mean over reference images), and without a concept (its heads, and the span of its
words in the feature).

Of several labels each answered one is explained: its score is compared with the logit of its threshold, and
both are absolute, because labels do not compete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dear.calibration.scales import apply_scales
from dear.clip.model import Clip
from dear.data.batches import Images, image_set, over_batches, pixels_for
from dear.data.duplicates import Prints, find_duplicates, matching_pairs, read_prints
from dear.data.folds import IntArray
from dear.data.images import ImageSet
from dear.errors import DataError, UsageError
from dear.heads.concept_words import known_concepts, readable_words, value_features
from dear.heads.contributions import head_maps
from dear.heads.known_roles import known_roles
from dear.heads.names import Head
from dear.heads.roles import RoleMap
from dear.shortcuts.removal import span_basis
from dear.tasks.explain.explanation import (
    AVERAGE,
    FIXED,
    MLPS,
    THRESHOLD,
    UNKNOWN,
    Bar,
    Counterfactual,
    Explanation,
    Explanations,
    HeadPart,
    Neighbor,
    label_or_not,
)
from dear.tasks.explain.groups import EARLY, HeadGroups, head_groups
from dear.tasks.explain.parts import Parts, Trace, means_of, smooth
from dear.utils.progress import Progress

if TYPE_CHECKING:
    from dear.runs.model import Model

REFERENCE = 96  #: reference images at most
BATCH = 16
_TOP_HEADS, _NEIGHBORS = 6, 6


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


class Explainer:
    """Explains the answers of a model.

    Args:
        model: what answers.
        reference: images to compare with, usually the training images: parts are relative to their mean
            over them, heads are replaced by their mean. Unreadable ones are skipped. None: parts are
            absolute, and there are no answers without something.
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

    # -- computing --------------------------------------------------------------------------------

    def trace(self, pixels: Tensor) -> Trace:
        """The model's calibrated logits of normalized pixels [B, 3, S, S], to be taken apart."""
        scales, bound = self.model.scale.factors(self.mode), {}

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

    @cached_property
    def concepts(self) -> dict[str, tuple[tuple[str, ...], Tensor, Tensor]]:
        """Per concept the words that the backbone reads, their features [K, E], and their span [E, E]."""
        clip = self.model.clip
        concepts: dict[str, tuple[tuple[str, ...], Tensor, Tensor]] = {}
        if not self.groups.by_role:  # a map that names no heads names no concepts either
            return concepts
        for name, concept in known_concepts().items():
            if clip.tokenizer is not None and len(readable_words(clip, concept.words)) > 1:
                words, features = value_features(clip, concept)
                basis = span_basis(features)
                concepts[name] = (words, features, (basis.T @ basis).float())
        return concepts

    # -- explanations -----------------------------------------------------------------------------

    def explain(
        self,
        images: Images,
        answer: str | None = None,
        against: str | None = None,
        progress: Progress | None = None,
    ) -> Explanations:
        """Explain the answers for images.

        Args:
            images: files or Pillow images, or an image set.
            answer: the class to explain; None: the answer, or each answered label.
            against: the class to compare with; None: the likeliest other one. Not for several labels.
            progress: called with ("images", images done, images in all).
        """
        if self.several and against is not None:
            raise UsageError(
                f"against: a label is compared with its threshold, not with {against!r}; leave it out"
            )
        chosen = [
            None if name is None else find_class(self.model.classes, name) for name in (answer, against)
        ]
        if len(self.model.classes) < 2 and not self.several:
            raise UsageError("with one class there is nothing to compare an answer with; add another class")
        if chosen[0] is not None and chosen[0] == chosen[1]:
            raise UsageError(f"{answer!r} cannot be compared with itself; name another class to compare with")
        every = image_set(images)

        def run(some: ImageSet, rows: list[int]) -> list[Explanation]:
            pixels = pixels_for(self.method.clip, some, rows)
            names, copies = [every.key(row) for row in rows], self._copies_of(every.subset(rows))
            return (
                self._explain_labels(pixels, names, copies, chosen[0])
                if self.several
                else self._explain(pixels, names, copies, chosen)
            )

        parts, _ = over_batches(images, run, self.method.clip, progress=progress, batch=BATCH)
        items = tuple(explanation for part in parts for explanation in part)
        return Explanations(items, self.method.title, self.notes())

    def notes(self) -> dict[str, str]:
        """How explanations are made, for people."""
        classes, reference = self.model.classes, self.reference
        return {
            "model": f"{self.method.title} on {self.model.clip.name}, mode {self.mode}",
            "classes": ", ".join(classes[:20]) + (" …" if len(classes) > 20 else ""),
            "reference images": "none"
            if reference is None
            else f"{len(reference.images)} of {reference.images.name}",
        }

    def bars(self, pixels: Tensor) -> list[tuple[str, str, tuple[Bar, ...]]]:
        """Answer, runner-up and bars alone, of normalized pixels [B, 3, S, S]."""
        self.model.require_one_label("an explanation by bars alone")
        trace = self.trace(pixels)
        pairs = self.pairs(trace.logits.cpu())
        table = self.relative_table(trace.parts(self.questions(pairs)), pairs)
        names = [[self.model.classes[c] for c in pair] for pair in pairs.tolist()]
        return [(names[b][0], names[b][1], self._bars(table, b)) for b in range(len(pairs))]

    def _bars(self, table: Mapping[str, Tensor], image: int) -> tuple[Bar, ...]:
        return tuple(
            Bar(name, self._kind(name), float(value[0, image]), float(value[1, image]))
            for name, value in table.items()
        )

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
        return self.model.scale.limits(self.mode).double().clamp(1e-6, 1 - 1e-6).logit()

    def _explain_labels(
        self, pixels: Tensor, names: Sequence[str], copies: Sequence[set[int]], label: int | None
    ) -> list[Explanation]:
        """Explanations of each answered label, or of `label`; of none, that closest to its threshold."""
        logits = self.model.scale.calibrated(self.model.forward(pixels)[self.mode].float().cpu(), self.mode)
        above = logits - self.limits
        rows = []
        for image, row in enumerate(above):
            labels = (row >= 0).nonzero()[:, 0].tolist() or [int(row.argmax())]
            rows += [(image, each) for each in (labels if label is None else [label])]
        result = []
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            places = torch.tensor([image for image, _ in part])
            chosen = torch.tensor([[each] for _, each in part])
            which = [image for image, _ in part]
            result += self._explain(
                pixels[places], [names[i] for i in which], [copies[i] for i in which], (), chosen
            )
        return result

    def _explain(
        self,
        pixels: Tensor,
        names: Sequence[str],
        copies: Sequence[set[int]],
        chosen: Sequence[int | None],
        labels: Tensor | None = None,
    ) -> list[Explanation]:
        """Explanations of two classes, or of several labels [B, 1] and their thresholds.

        `copies` are places of the reference images that show the same as each image.
        """
        trace = self.trace(pixels)
        logits = trace.logits.cpu()
        pairs = self.pairs(logits, chosen) if labels is None else labels
        parts = trace.parts(self.questions(pairs), patches=True)
        table = self.relative_table(parts, pairs)
        by_head = self._relative_heads(parts.heads[:, :, 0], pairs)  # [2, B, L, H]
        scores = parts.score
        if labels is not None:
            limits = self.limits[labels.T]  # [1, B]
            table = {name: _with_zeros(value) for name, value in table.items()}
            table[THRESHOLD] = _with_zeros(limits).flip(0)
            by_head, scores = _with_zeros(by_head), torch.cat([scores, limits.to(scores)])
        probabilities = self.model.scale.probabilities(logits.float())
        without_heads, without_concepts = self._counterfactuals(trace, pairs, logits)
        neighbors = self._neighbors(trace, by_head, copies)
        unknown = table[UNKNOWN].abs().sum(0) if UNKNOWN in table else torch.zeros(len(names))
        total = torch.stack([value.abs().sum(0) for value in table.values()]).sum(0)
        notices, views = tuple(self.notices(trace)), self._views(pixels)
        result = []
        for b, name in enumerate(names):
            order = probabilities[b].argsort(descending=True, stable=True).tolist()
            bars = self._bars(table, b)
            excess = self._excess(bars)
            concepts = [each[b] for each in without_concepts]
            result.append(
                Explanation(
                    image=name,
                    view=views[b],
                    answer=self.model.classes[int(pairs[b, 0])],
                    other=self.model.classes[int(pairs[b, 1])] if labels is None else THRESHOLD.lower(),
                    probabilities=tuple((self.model.classes[c], float(probabilities[b, c])) for c in order),
                    scores=(float(scores[0, b]), float(scores[1, b])),
                    bars=bars,
                    head_parts=by_head[:, b],
                    heads=self._heads(by_head[:, b]),
                    maps=self._patch_maps(parts, table, b),
                    without_heads=tuple(each[b] for each in without_heads),
                    # Two witnesses: the lead without the concept, and what its heads add.
                    without_concepts=tuple(
                        sorted(concepts, key=lambda c: -c.drop_beyond_chance - excess.get(c.name, 0.0))
                    ),
                    neighbors=neighbors[b] if neighbors else (),
                    exact=1 - float(unknown[b] / total[b]) if float(total[b]) else 1.0,
                    notices=notices,
                    labels=None if labels is None else self._answered(logits[b]),
                    threshold=None if labels is None else float(self.limits[labels[b, 0]].sigmoid()),
                )
            )
        return result

    def _answered(self, logits: Tensor) -> tuple[str, ...]:
        """The labels whose logits [C] reach their thresholds."""
        has = (logits >= self.limits).tolist()
        return tuple(name for name, one in zip(self.model.classes, has, strict=True) if one)

    def table(self, parts: Parts) -> dict[str, Tensor]:
        """The parts by name, [Q, B] each: their sum is the score."""
        heads = parts.heads[:, :, 0]  # of the class token, [Q, B, L, H]
        table = {
            name: sum((heads[:, :, layer - 1, head] for layer, head in keys), torch.zeros(()))
            for name, keys in self.groups.heads.items()
        }
        rows = parts.rows()
        for name, places in self._tokens(rows.shape[-1] - 1).items():
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

    def _relative_heads(self, heads: Tensor, labels: Tensor) -> Tensor:
        """Heads' parts [Q, B, L, H] of the scores of classes [B, Q] less their means."""
        means = self._means(labels)
        if not means:
            return heads
        return heads - torch.stack([torch.stack([each.heads for each in row]) for row in means])

    def _patch_maps(self, parts: Parts, table: Mapping[str, Tensor], image: int) -> dict[str, Tensor]:
        """Bars of heads and tokens by patch, [2, S, S] each: a map sums to its bar.

        What does not come from a patch of this image (the mean over reference images, other tokens) is spread
        evenly over all patches.
        """
        assert parts.patches is not None
        patches = parts.patches[:, image].double()  # [2, R, L, H, S, S]
        maps = {
            name: sum((patches[:, 0, layer - 1, h] for layer, h in heads), torch.zeros(()))
            for name, heads in self.groups.heads.items()
        }
        for name, rows in self._tokens(patches.shape[1] - 1).items():
            maps[name] = patches[:, rows].sum((1, 2, 3))
        for name, value in maps.items():
            missing = table[name][: len(value), image] - value.sum((1, 2))  # [2], or [1] of a label
            maps[name] = value + (missing / value[0].numel())[:, None, None]
        if self.several:
            maps = {name: _with_zeros(value) for name, value in maps.items()}
        return {"": smooth(sum(maps.values(), torch.zeros(()))), **maps}

    def _views(self, pixels: Tensor) -> list[Image.Image]:
        """What the model sees: normalized pixels [B, 3, S, S] as images."""
        config = self.method.clip.config
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (config.mean, config.std))
        bytes_ = ((pixels.float().cpu() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
        return [Image.fromarray(each.permute(1, 2, 0).contiguous().numpy()) for each in bytes_]

    @property
    def _removal(self) -> str:
        correction = self.model.clip.correction
        return f"Removal of {correction.note}" if correction is not None and correction.note else "Removal"

    def _tokens(self, count: int) -> dict[str, list[int]]:
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

    def _excess(self, bars: Sequence[Bar]) -> dict[str, float]:
        """What the heads of each role add to the lead, beyond the mean of as many heads of the role map."""
        if not self.groups.by_role:
            return {}
        late = {name: len(heads) for name, heads in self.groups.heads.items() if name != EARLY}
        added = {bar.name: bar.lead for bar in bars if bar.name in late}
        each = sum(added.values()) / sum(late.values())
        return {name: added[name] - each * late[name] for name in self.groups.named}

    def _kind(self, name: str) -> str:
        if name in self.groups.named:
            return "role" if self.groups.by_role else "layer"
        if name in self.groups.heads:
            return "heads"
        if name == AVERAGE:
            return "average"
        return "token" if name.startswith("Token") else "rest"

    def _heads(self, parts: Tensor) -> tuple[HeadPart, ...]:
        """The heads that add most to the lead or take most from it, from parts [2, L, H]."""
        groups = {key: name for name, keys in self.groups.heads.items() for key in keys}
        size = parts.shape[-1]
        order = (parts[0] - parts[1]).abs().flatten().argsort(descending=True)[:_TOP_HEADS].tolist()
        result = []
        for place in order:
            key = (place // size + 1, place % size)
            phrases: tuple[str, ...] = ()
            if self.groups.by_role and self.role_map is not None and key in self.role_map.table:
                phrases = self.role_map[key].phrases
            answer, other = parts[:, key[0] - 1, key[1]].tolist()
            result.append(HeadPart(*key, groups[key], answer, other, phrases))
        return tuple(result)

    def notices(self, trace: Trace) -> list[str]:
        """What a reader should know."""
        notices = [self.groups.notice] if self.groups.notice else []
        if self.images is None:
            notices.append(
                "There are no reference images: bars are not relative to an average image, and answers "
                "without a role or concept are not computed."
            )
        if not trace.linear:
            notices.append(
                f"{self.method.title} compares an image with its training images by a kernel: that part of "
                f"the score is one bar, {UNKNOWN.lower()}."
            )
        return notices

    # -- other answers ----------------------------------------------------------------------------

    def _counterfactuals(
        self, trace: Trace, pairs: Tensor, logits: Tensor
    ) -> tuple[list[list[Counterfactual]], list[list[Counterfactual]]]:
        """Answers without the heads of each group, and without each concept: [..][B]."""
        reference = self.reference
        if reference is None:
            return [], []
        groups = [
            self._changed(name, trace.without(heads, reference.means), pairs, logits, len(heads))
            for name, heads in self.groups.named.items()
        ]
        concepts = []
        features = trace.features() - reference.center  # [B, E]
        for name, (words, texts, span) in self.concepts.items():
            heads = () if self.role_map is None else self.role_map.select(concept=name)
            affine = torch.eye(len(span)) - span, reference.center @ span
            new = trace.without(heads, reference.means, affine)
            nearest = (features @ (texts - texts.mean(0)).T).argmax(-1).tolist()
            values = [words[place] for place in nearest]
            share = float(span.trace()) / len(span)
            concepts.append(self._changed(name, new, pairs, logits, len(heads), share, values))
        return groups, concepts

    def _changed(
        self,
        name: str,
        new: Tensor,
        pairs: Tensor,
        logits: Tensor,
        heads: int,
        share: float = 0.0,
        values: Sequence[str] | None = None,
    ) -> list[Counterfactual]:
        """What new logits change; `share` of the feature's directions was removed for them."""
        new = new.float().cpu()
        before, after = self._margins(logits.float(), pairs), self._margins(new, pairs)
        best = self.model.scale.probabilities(new).max(-1)
        answers = [self.model.classes[place] for place in best.indices.tolist()]
        values_of = best.values
        if self.several:
            names = [self.model.classes[label] for label in pairs[:, 0].tolist()]
            has_label = (after >= 0).tolist()
            answers = [label_or_not(label, has) for label, has in zip(names, has_label, strict=True)]
            values_of = new.gather(1, pairs)[:, 0].sigmoid()
        return [
            Counterfactual(
                name,
                float(before[b] - after[b]),
                float(before[b] * (1 - share) - after[b]),
                answers[b],
                float(values_of[b]),
                "" if values is None else values[b],
                heads,
            )
            for b in range(len(new))
        ]

    def _margins(self, logits: Tensor, pairs: Tensor) -> Tensor:
        """The lead [B] of each class over the other one, or of each label over its threshold."""
        first = logits.gather(1, pairs[:, :1])[:, 0]
        other = self.limits[pairs[:, 0]] if self.several else logits.gather(1, pairs[:, 1:])[:, 0]
        return first - other.to(first)

    @cached_property
    def _maps(self) -> Tensor:
        clip = self.method.clip
        return head_maps(clip, range(1, clip.config.vision.layers + 1)).float().cpu()

    def _copies_of(self, images: ImageSet) -> list[set[int]]:
        """The reference images, by their places, that are an image itself or a copy of it; for each image."""
        copies: list[set[int]] = [set() for _ in range(len(images))]
        if self.reference is not None:
            (rows, prints), (places, others) = read_prints(images), self._reference_prints
            for first, second, _ in matching_pairs(prints, others):
                for i, j in zip(rows[first].tolist(), places[second].tolist(), strict=True):
                    copies[i].add(j)
        return copies

    @cached_property
    def _reference_prints(self) -> tuple[IntArray, Prints]:
        """Places of the reference images and what their copies are found by."""
        assert self.reference is not None
        return read_prints(self.reference.images)

    def _neighbors(
        self, trace: Trace, parts: Tensor, copies: Sequence[set[int]]
    ) -> list[tuple[Neighbor, ...]]:
        """Reference images most alike in the heads of the group that decides, for parts [2, B, L, H].

        `copies` are places of the reference images that each image is not compared with.
        """
        reference = self.reference
        if reference is None:
            return []
        states, groups, result = trace.head_states()[0], self.groups.named, []
        queries = states[min(states)].float()
        for b in range(len(queries)):
            lead = parts[0, b] - parts[1, b]
            best = max(groups, key=lambda g: float(sum(lead[layer - 1, h] for layer, h in groups[g])))
            near, query = (self._space(rows, groups[best]) for rows in (reference.states, queries[b : b + 1]))
            center = near.mean(0)
            alike = F.normalize(near - center, dim=-1) @ F.normalize(query - center, dim=-1).T  # [n, 1]
            order = alike[:, 0].argsort(descending=True).tolist()
            others = [place for place in order if place not in copies[b]][:_NEIGHBORS]
            result.append(tuple(Neighbor(reference.images, place) for place in others))
        return result

    def _space(self, states: Tensor, heads: Sequence[Head]) -> Tensor:
        """What heads add to the feature, side by side, [n, heads x E]."""
        terms = [states[:, layer - 1, h] @ self._maps[layer - 1, h] for layer, h in heads]
        return torch.cat(terms, dim=-1)


def _with_zeros(values: Tensor) -> Tensor:
    """Values [1, ...] of a label, and zeros for its threshold: [2, ...]."""
    return torch.cat([values, torch.zeros_like(values)])


def find_class(classes: Sequence[str], name: str) -> int:
    """Place of the class that a user names, in any case."""
    for place, known in enumerate(classes):
        if known.casefold() == name.casefold():
            return place
    raise UsageError(f"the model has no class {name!r}; it has {', '.join(classes[:12])}")


def _distinct_subset(images: ImageSet, most: int) -> ImageSet:
    """At most `most` images, equally many of each class where there are enough, and of copies one."""
    if len(images) > most:
        order: list[int] = []
        places = [(images.labels == label).nonzero()[:, 0].tolist() for label in range(len(images.classes))]
        for turn in range(max(len(rows) for rows in places)):
            order += [rows[turn] for rows in places if turn < len(rows)]
        images = images.subset(sorted(order[:most]))
    return images.subset(find_duplicates(images).distinct(images.labels.tolist()))
