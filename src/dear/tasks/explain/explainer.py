"""Why a model answers as it does: its score as a sum over heads, tokens and patches, and other answers.

The score of a class is compared with that of another, the runner-up unless one is named. Both are decomposed
exactly (`parts`) and shown above the mean of all classes, which changes no answer. Every part is relative to
its mean over reference images: what an average image gets is one part, and the others say what is particular
about this image (`scores`). Answers without a role and without a concept are computed (`counterfactuals`).

Of several labels each answered one is explained: its score is compared with the logit of its threshold, and
both are absolute, because labels do not compete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from PIL import Image
from torch import Tensor

from dear.data.batches import Images, image_set, over_batches, pixels_for
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.tasks.explain.counterfactuals import Counterfactuals
from dear.tasks.explain.explanation import (
    AVERAGE,
    THRESHOLD,
    UNKNOWN,
    Bar,
    Explanation,
    Explanations,
    HeadPart,
)
from dear.tasks.explain.groups import EARLY
from dear.tasks.explain.neighbors import Neighbors
from dear.tasks.explain.parts import Parts, Trace, smooth
from dear.tasks.explain.scores import BATCH, ScoreParts
from dear.utils.progress import Progress

_TOP_HEADS = 6


class Explainer:
    """Explains the answers of a model from the parts of its scores."""

    def __init__(self, scores: ScoreParts) -> None:
        self.scores, self.model, self.method = scores, scores.model, scores.method
        self._counterfactuals, self._neighbors = Counterfactuals(scores), Neighbors(scores)

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
        if self.scores.several and against is not None:
            raise UsageError(
                f"against: a label is compared with its threshold, not with {against!r}; leave it out"
            )
        chosen = [
            None if name is None else find_class(self.model.classes, name) for name in (answer, against)
        ]
        if len(self.model.classes) < 2 and not self.scores.several:
            raise UsageError("with one class there is nothing to compare an answer with; add another class")
        if chosen[0] is not None and chosen[0] == chosen[1]:
            raise UsageError(f"{answer!r} cannot be compared with itself; name another class to compare with")
        image_list = image_set(images)

        def run(some: ImageSet, rows: list[int]) -> list[Explanation]:
            pixels = pixels_for(self.method.clip, some, rows)
            names = [image_list.key(row) for row in rows]
            copies = self._neighbors.copies_of(image_list.subset(rows))
            return (
                self._explain_labels(pixels, names, copies, chosen[0])
                if self.scores.several
                else self._explain(pixels, names, copies, chosen)
            )

        parts, _ = over_batches(images, run, self.method.clip, progress=progress, batch=BATCH)
        items = tuple(explanation for part in parts for explanation in part)
        return Explanations(items, self.method.title, self.notes())

    def notes(self) -> dict[str, str]:
        """How explanations are made, for people."""
        classes, reference = self.model.classes, self.scores.reference
        return {
            "model": f"{self.method.title} on {self.model.clip.name}, mode {self.scores.mode}",
            "classes": ", ".join(classes[:20]) + (" …" if len(classes) > 20 else ""),
            "reference images": "none"
            if reference is None
            else f"{len(reference.images)} of {reference.images.name}",
        }

    def bars(self, pixels: Tensor) -> list[tuple[str, str, tuple[Bar, ...]]]:
        """Answer, runner-up and bars alone, of normalized pixels [B, 3, S, S]."""
        self.model.require_one_label("an explanation by bars alone")
        trace = self.scores.trace(pixels)
        pairs = self.scores.pairs(trace.logits.cpu())
        table = self.scores.relative_table(trace.parts(self.scores.questions(pairs)), pairs)
        names = [[self.model.classes[c] for c in pair] for pair in pairs.tolist()]
        return [(names[b][0], names[b][1], self._bars(table, b)) for b in range(len(pairs))]

    def _bars(self, table: Mapping[str, Tensor], image: int) -> tuple[Bar, ...]:
        return tuple(
            Bar(name, self._kind(name), float(value[0, image]), float(value[1, image]))
            for name, value in table.items()
        )

    def _explain_labels(
        self, pixels: Tensor, names: Sequence[str], copies: Sequence[set[int]], label: int | None
    ) -> list[Explanation]:
        """Explanations of each answered label, or of `label`; of none, that closest to its threshold."""
        logits = self.model.calibrator.calibrate(
            self.model.forward(pixels)[self.scores.mode].float().cpu(), self.scores.mode
        )
        above = logits - self.scores.limits
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

        `copies` are the reference images, by their indices, that are copies of each image.
        """
        trace = self.scores.trace(pixels)
        logits = trace.logits.cpu()
        pairs = self.scores.pairs(logits, chosen) if labels is None else labels
        parts = trace.parts(self.scores.questions(pairs), patches=True)
        table = self.scores.relative_table(parts, pairs)
        by_head = self.scores.relative_heads(parts.heads[:, :, 0], pairs)  # [2, B, L, H]
        scores = parts.score
        if labels is not None:
            limits = self.scores.limits[labels.T]  # [1, B]
            table = {name: _with_zeros(value) for name, value in table.items()}
            table[THRESHOLD] = _with_zeros(limits).flip(0)
            by_head, scores = _with_zeros(by_head), torch.cat([scores, limits.to(scores)])
        probabilities = self.model.calibrator.probabilities(logits.float())
        without_heads, without_concepts = self._counterfactuals.answers(trace, pairs, logits)
        neighbors = self._neighbors.find(trace, by_head, copies)
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
                    threshold=None if labels is None else float(self.scores.limits[labels[b, 0]].sigmoid()),
                )
            )
        return result

    def _answered(self, logits: Tensor) -> tuple[str, ...]:
        """The labels whose logits [C] reach their thresholds."""
        has = (logits >= self.scores.limits).tolist()
        return tuple(name for name, one in zip(self.model.classes, has, strict=True) if one)

    def _patch_maps(self, parts: Parts, table: Mapping[str, Tensor], image: int) -> dict[str, Tensor]:
        """Bars of heads and tokens by patch, [2, S, S] each: a map sums to its bar.

        What does not come from a patch of this image (the mean over reference images, other tokens) is spread
        evenly over all patches.
        """
        assert parts.patches is not None
        patches = parts.patches[:, image].double()  # [2, R, L, H, S, S]
        maps = {
            name: sum((patches[:, 0, layer - 1, h] for layer, h in heads), torch.zeros(()))
            for name, heads in self.scores.groups.heads.items()
        }
        for name, rows in self.scores.tokens(patches.shape[1] - 1).items():
            maps[name] = patches[:, rows].sum((1, 2, 3))
        for name, value in maps.items():
            missing = table[name][: len(value), image] - value.sum((1, 2))  # [2], or [1] of a label
            maps[name] = value + (missing / value[0].numel())[:, None, None]
        if self.scores.several:
            maps = {name: _with_zeros(value) for name, value in maps.items()}
        return {"": smooth(sum(maps.values(), torch.zeros(()))), **maps}

    def _views(self, pixels: Tensor) -> list[Image.Image]:
        """What the model sees: normalized pixels [B, 3, S, S] as images."""
        config = self.method.clip.config
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (config.mean, config.std))
        bytes_ = ((pixels.float().cpu() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
        return [Image.fromarray(each.permute(1, 2, 0).contiguous().numpy()) for each in bytes_]

    def _excess(self, bars: Sequence[Bar]) -> dict[str, float]:
        """What the heads of each role add to the lead, beyond the mean of as many heads of the role map."""
        if not self.scores.groups.by_role:
            return {}
        late = {name: len(heads) for name, heads in self.scores.groups.heads.items() if name != EARLY}
        added = {bar.name: bar.lead for bar in bars if bar.name in late}
        each = sum(added.values()) / sum(late.values())
        return {name: added[name] - each * late[name] for name in self.scores.groups.named}

    def _kind(self, name: str) -> str:
        if name in self.scores.groups.named:
            return "role" if self.scores.groups.by_role else "layer"
        if name in self.scores.groups.heads:
            return "heads"
        if name == AVERAGE:
            return "average"
        return "token" if name.startswith("Token") else "rest"

    def _heads(self, parts: Tensor) -> tuple[HeadPart, ...]:
        """The heads that add most to the lead or take most from it, from parts [2, L, H]."""
        groups = {key: name for name, keys in self.scores.groups.heads.items() for key in keys}
        roles = self.scores.role_map if self.scores.groups.by_role else None
        size = parts.shape[-1]
        order = (parts[0] - parts[1]).abs().flatten().argsort(descending=True)[:_TOP_HEADS].tolist()
        result = []
        for place in order:
            key = (place // size + 1, place % size)
            phrases = roles[key].phrases if roles is not None and key in roles.table else ()
            answer, other = parts[:, key[0] - 1, key[1]].tolist()
            result.append(HeadPart(*key, groups[key], answer, other, phrases))
        return tuple(result)

    def notices(self, trace: Trace) -> list[str]:
        """What a reader should know."""
        notices = [self.scores.groups.notice] if self.scores.groups.notice else []
        if self.scores.images is None:
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


def _with_zeros(values: Tensor) -> Tensor:
    """Values [1, ...] of a label, and zeros for its threshold: [2, ...]."""
    return torch.cat([values, torch.zeros_like(values)])


def find_class(classes: Sequence[str], name: str) -> int:
    """Place of the class that a user names, in any case."""
    for place, known in enumerate(classes):
        if known.casefold() == name.casefold():
            return place
    raise UsageError(f"the model has no class {name!r}; it has {', '.join(classes[:12])}")
