"""Why a model answers as it does: its score as a sum over heads, tokens and patches, and other answers.

The score of a class is compared with that of another, the runner-up unless one is named. Both are taken apart
exactly (`parts`) and shown above the mean of all classes, which changes no answer. Answers without
something are computed, not guessed: without the heads of a role (what they add to the feature replaced by its
mean over reference images), and without a concept (its heads, and the span of its words in the feature).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.calibration.scales import apply_scales
from dear.clip.model import Clip
from dear.data.batches import Images, image_set, over_batches, pixels_for
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.heads.concept_words import known_concepts, readable_words, value_features
from dear.heads.contributions import head_maps
from dear.heads.known_roles import known_roles
from dear.heads.names import Head
from dear.heads.roles import RoleMap
from dear.shortcuts.removal import span_basis
from dear.tasks.explain.explanation import Bar, Explanation, HeadPart, Otherwise
from dear.tasks.explain.groups import EARLY, HeadGroups, head_groups
from dear.tasks.explain.parts import Parts, Trace, means_of, spread
from dear.utils.progress import Progress

if TYPE_CHECKING:
    from dear.runs.model import Model

REFERENCE = 96  #: reference images at most
BATCH = 16
MLPS, EMBEDDING, CONSTANTS, CALIBRATION, UNKNOWN = (
    "MLPs",
    "Embedding",
    "Constants",
    "Calibration",
    "Not taken apart",
)
_TOP_HEADS, _NEIGHBORS = 6, 6


@dataclass(frozen=True)
class ReferenceMeans:
    """What is known of reference images: means of heads, mean feature, and heads' outputs."""

    images: ImageSet
    means: list[dict[int, Tensor]]
    center: Tensor  #: [E], mean feature
    states: Tensor  #: [n, L, H, d], of the class token, divided by its spread


class Explainer:
    """Explains the answers of a model.

    Args:
        model: what answers.
        reference: images whose means heads are replaced with, and in which neighbors are looked for (the
            training images, usually); None: no answer without something can be given.
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
        self.images = None if reference is None else _some(reference, REFERENCE)
        self._progress = progress

    # -- computing --------------------------------------------------------------------------------

    def trace(self, pixels: Tensor) -> Trace:
        """The model's calibrated logits of normalized pixels [B, 3, S, S], to be taken apart."""
        scales, bound = self.model.scales(self.mode), {}

        def answer(clip: Clip) -> Tensor:
            if clip not in bound:  # bound once: texts are kept
                bound[clip] = self.method.bound(clip)
            logits = bound[clip](pixels)[self.mode]
            return logits if scales is None else apply_scales(logits, scales.to(logits))

        return Trace(self.method.clip, answer)

    @cached_property
    def reference(self) -> ReferenceMeans | None:
        """The reference images, run once."""
        if self.images is None:
            return None

        def run(some: ImageSet, rows: list[int]) -> tuple[Trace, Tensor, Tensor]:
            trace = self.trace(pixels_for(self.method.clip, some, rows))
            states = trace.head_states()[0]
            return trace, trace.features(), states[min(states)].float()

        parts, _ = over_batches(
            self.images,
            run,
            self.method.clip,
            unreadable="skip",
            progress=self._progress,
            stage="reference",
            batch=BATCH,
        )
        means = means_of(trace for trace, _, _ in parts)
        features = torch.cat([features for _, features, _ in parts])
        return ReferenceMeans(
            self.images, means, features.mean(0), torch.cat([states for *_, states in parts])
        )

    @cached_property
    def concepts(self) -> dict[str, tuple[tuple[str, ...], Tensor, Tensor]]:
        """Per concept the words that the backbone reads, their features [K, E], and their span [E, E]."""
        clip, found = self.model.clip, {}
        for name, concept in known_concepts().items():
            if clip.tokenizer is not None and len(readable_words(clip, concept.words)) > 1:
                words, features = value_features(clip, concept)
                basis = span_basis(features)
                found[name] = (words, features, (basis.T @ basis).float())
        return found

    # -- explanations -----------------------------------------------------------------------------

    def explain(
        self,
        images: Images,
        answer: str | None = None,
        against: str | None = None,
        progress: Progress | None = None,
    ) -> list[Explanation]:
        """Explain the answers for images.

        Args:
            images: files or Pillow images, or an image set.
            answer: the class to explain; None: the answer.
            against: the class to compare with; None: the likeliest other one.
            progress: called with ("images", images done, images in all).
        """
        chosen = [None if name is None else self._class(name) for name in (answer, against)]
        if len(self.model.classes) < 2:
            raise UsageError("with one class there is nothing to compare an answer with; add another class")
        if chosen[0] is not None and chosen[0] == chosen[1]:
            raise UsageError(f"{answer!r} cannot be compared with itself; name another class to compare with")
        found = image_set(images)

        def run(some: ImageSet, rows: list[int]) -> list[Explanation]:
            trace = self.trace(pixels_for(self.method.clip, some, rows))
            return self._explained(trace, [found.key(row) for row in rows], chosen)

        parts, _ = over_batches(images, run, self.method.clip, progress=progress, batch=BATCH)
        return [explanation for part in parts for explanation in part]

    def bars(self, pixels: Tensor) -> list[tuple[str, str, tuple[Bar, ...]]]:
        """Answer, runner-up and bars alone, of normalized pixels [B, 3, S, S]."""
        trace = self.trace(pixels)
        pairs = self.pairs(trace.logits.cpu())
        questions = self.questions(pairs)
        table = self.table(trace.parts(questions), questions)
        names = [[self.model.classes[c] for c in pair] for pair in pairs.tolist()]
        return [(names[b][0], names[b][1], self._bars(table, b)) for b in range(len(pairs))]

    def _bars(self, table: Mapping[str, Tensor], image: int) -> tuple[Bar, ...]:
        return tuple(
            Bar(name, self._kind(name), float(value[0, image]), float(value[1, image]))
            for name, value in table.items()
        )

    def _class(self, name: str) -> int:
        classes = self.model.classes
        same = [c for c, known in enumerate(classes) if known.casefold() == name.casefold()]
        if not same:
            raise UsageError(f"the model has no class {name!r}; it has {', '.join(classes[:12])}")
        return same[0]

    def pairs(self, logits: Tensor, chosen: Sequence[int | None] = (None, None)) -> Tensor:
        """The class to explain and the one to compare with, [B, 2]."""
        order = logits.argsort(dim=1, descending=True, stable=True).tolist()
        found = []
        for row in order:
            first = chosen[0] if chosen[0] is not None else next(c for c in row if c != chosen[1])
            second = chosen[1] if chosen[1] is not None else next(c for c in row if c != first)
            found.append([first, second])
        return torch.tensor(found)

    def questions(self, pairs: Tensor) -> Tensor:
        """Both classes above the mean of all, [2, B, C]."""
        return F.one_hot(pairs.T, len(self.model.classes)).double() - 1 / len(self.model.classes)

    def _explained(
        self, trace: Trace, names: Sequence[str], chosen: Sequence[int | None]
    ) -> list[Explanation]:
        logits = trace.logits.cpu()
        pairs = self.pairs(logits, chosen)
        questions = self.questions(pairs)
        parts = trace.parts(questions, patches=True)
        assert parts.patches is not None
        table = self.table(parts, questions)
        everything = parts.patches.sum(2)  # [2, B, L, H, S, S], over the rows
        by_head = parts.heads.sum(2)  # [2, B, L, H]
        probabilities = logits.float().softmax(-1)
        roles, concepts = self._otherwise(trace, pairs, logits)
        near = self._neighbors(trace, by_head)
        lost = table[UNKNOWN].abs().sum(0) if UNKNOWN in table else torch.zeros(len(names))
        total = torch.stack([value.abs().sum(0) for value in table.values()]).sum(0)
        notices = tuple(self.notices(trace))
        found = []
        for b, name in enumerate(names):
            order = probabilities[b].argsort(descending=True, stable=True).tolist()
            maps = {"": spread(everything[:, b].sum((1, 2)))}
            for group, heads in self.groups.heads.items():
                maps[group] = sum((everything[:, b, layer - 1, h] for layer, h in heads), torch.zeros(()))
            bars = self._bars(table, b)
            own = self._own_heads(bars)
            without = [each[b] for each in concepts]
            found.append(
                Explanation(
                    image=name,
                    answer=self.model.classes[int(pairs[b, 0])],
                    other=self.model.classes[int(pairs[b, 1])],
                    probabilities=tuple((self.model.classes[c], float(probabilities[b, c])) for c in order),
                    scores=(float(parts.score[0, b]), float(parts.score[1, b])),
                    bars=bars,
                    heads=self._heads(by_head[:, b]),
                    maps=maps,
                    roles=tuple(each[b] for each in roles),
                    # Two witnesses: what goes away without it, and what its own heads add.
                    concepts=tuple(sorted(without, key=lambda c: -c.beyond - own.get(c.name, 0.0))),
                    neighbors=near[b] if near else (),
                    exact=1 - float(lost[b] / total[b]) if float(total[b]) else 1.0,
                    notices=notices,
                )
            )
        return found

    def table(self, parts: Parts, questions: Tensor) -> dict[str, Tensor]:
        """The parts by name, [Q, B] each: their sum is the score."""
        heads = parts.heads[:, :, 0]
        found = {
            name: sum((heads[:, :, layer - 1, head] for layer, head in keys), torch.zeros(()))
            for name, keys in self.groups.heads.items()
        }
        found[MLPS] = parts.mlps[:, :, 0].sum(-1)
        found[EMBEDDING] = parts.start[:, :, 0]
        votes = parts.rows()
        for name, places in self._tokens(votes.shape[-1] - 1).items():
            found[name] = votes[:, :, places].sum(-1)
        removed = {key: value for key, value in parts.constants.items() if key.startswith("correction")}
        if removed:
            found[self._removal] = sum(removed.values(), torch.zeros(()))
        constant = sum((v for key, v in parts.constants.items() if key not in removed), torch.zeros(()))
        if parts.linear:
            constant = constant + parts.rest
        else:
            found[UNKNOWN] = parts.rest
        found[CONSTANTS] = constant
        return {name: value.expand_as(parts.score) for name, value in found.items()}

    @property
    def _removal(self) -> str:
        correction = self.model.clip.correction
        return f"Removal of {correction.note}" if correction is not None and correction.note else "Removal"

    def _tokens(self, count: int) -> dict[str, list[int]]:
        """Extra tokens by name: their rows."""
        names = getattr(self.method, "attributes", None)
        if not count:
            return {}
        if names and count % len(names) == 0:
            each = count // len(names)
            return {
                f"Token {name}": list(range(1 + i * each, 1 + (i + 1) * each)) for i, name in enumerate(names)
            }
        return {"Tokens": list(range(1, 1 + count))}

    def _own_heads(self, bars: Sequence[Bar]) -> dict[str, float]:
        """What the heads of each role add to the lead beyond as many heads of the role map's layers."""
        if not self.groups.by_role:
            return {}
        late = {name: len(heads) for name, heads in self.groups.heads.items() if name != EARLY}
        added = {bar.name: bar.decides for bar in bars if bar.name in late}
        each = sum(added.values()) / sum(late.values())
        return {name: added[name] - each * late[name] for name in self.groups.named}

    def _kind(self, name: str) -> str:
        if name in self.groups.named:
            return "role" if self.groups.by_role else "layer"
        if name in self.groups.heads:
            return "heads"
        return "token" if name.startswith("Token") else "rest"

    def _heads(self, parts: Tensor) -> tuple[HeadPart, ...]:
        """The heads that decide most, from parts [2, L, H]."""
        owner = {key: name for name, keys in self.groups.heads.items() for key in keys}
        size = parts.shape[-1]
        order = (parts[0] - parts[1]).abs().flatten().argsort(descending=True)[:_TOP_HEADS].tolist()
        found = []
        for place in order:
            key = (place // size + 1, place % size)
            known = self.role_map is not None and key in self.role_map.table
            phrases = self.role_map[key].phrases if known and self.role_map is not None else ()
            values = parts[:, key[0] - 1, key[1]]
            found.append(HeadPart(*key, owner[key], float(values[0]), float(values[1]), tuple(phrases)))
        return tuple(found)

    def notices(self, trace: Trace) -> list[str]:
        """What a reader should know."""
        found = [self.groups.notice] if self.groups.notice else []
        if self.images is None:
            found.append("There are no reference images, so answers without something cannot be computed.")
        if not trace.linear:
            found.append(
                f"{self.method.title} compares an image with its training images by a kernel: that part of "
                "the score cannot be taken apart exactly and is one bar."
            )
        return found

    # -- other answers ----------------------------------------------------------------------------

    def _otherwise(
        self, trace: Trace, pairs: Tensor, logits: Tensor
    ) -> tuple[list[list[Otherwise]], list[list[Otherwise]]]:
        """Answers without the heads of each group, and without each concept: [..][B]."""
        known = self.reference
        if known is None:
            return [], []
        roles = [
            self._changed(name, trace.without(heads, known.means), pairs, logits, len(heads))
            for name, heads in self.groups.named.items()
        ]
        concepts = []
        features = trace.features() - known.center  # [B, E]
        for name, (words, texts, span) in self.concepts.items():
            heads = () if self.role_map is None else self.role_map.select(concept=name)
            affine = torch.eye(len(span)) - span, known.center @ span
            new = trace.without(heads, known.means, affine)
            nearest = (features @ (texts - texts.mean(0)).T).argmax(-1).tolist()
            values = [words[place] for place in nearest]
            share = float(span.trace()) / len(span)
            concepts.append(self._changed(name, new, pairs, logits, len(heads), share, values))
        return roles, concepts

    def _changed(
        self,
        name: str,
        new: Tensor,
        pairs: Tensor,
        logits: Tensor,
        heads: int,
        share: float = 0.0,
        values: Sequence[str] | None = None,
    ) -> list[Otherwise]:
        """What new logits change; `share` of the feature's directions was removed for them."""
        new = new.float().cpu()
        best = new.softmax(-1).max(-1)
        margins = [(own.gather(1, pairs)[:, 0] - own.gather(1, pairs)[:, 1]) for own in (logits.float(), new)]
        return [
            Otherwise(
                name,
                float(margins[0][b] - margins[1][b]),
                float(margins[0][b] * (1 - share) - margins[1][b]),
                self.model.classes[int(best.indices[b])],
                float(best.values[b]),
                "" if values is None else values[b],
                heads,
            )
            for b in range(len(new))
        ]

    @cached_property
    def _maps(self) -> Tensor:
        clip = self.method.clip
        return head_maps(clip, range(1, clip.config.vision.layers + 1)).float().cpu()

    def _neighbors(self, trace: Trace, parts: Tensor) -> list[tuple[int, ...]]:
        """Reference images most alike in the heads of the group that decides, for parts [2, B, L, H]."""
        known = self.reference
        if known is None:
            return []
        states = trace.head_states()[0]
        own = states[min(states)].float()
        found = []
        for b in range(len(own)):
            decides = parts[0, b] - parts[1, b]
            named = self.groups.named
            best = max(named, key=lambda g: float(sum(decides[layer - 1, h] for layer, h in named[g])))
            spaces = [self._space(states_, named[best]) for states_ in (known.states, own[b : b + 1])]
            center = spaces[0].mean(0)
            alike = F.normalize(spaces[0] - center, dim=-1) @ F.normalize(spaces[1] - center, dim=-1).T
            found.append(tuple(alike[:, 0].argsort(descending=True)[:_NEIGHBORS].tolist()))
        return found

    def _space(self, states: Tensor, heads: Sequence[Head]) -> Tensor:
        """What heads add to the feature, side by side, [n, heads x E]."""
        terms = [states[:, layer - 1, h] @ self._maps[layer - 1, h] for layer, h in heads]
        return torch.cat(terms, dim=-1)


def _some(images: ImageSet, most: int) -> ImageSet:
    """At most `most` images, as many of each class as there is room for."""
    if len(images) <= most:
        return images
    order: list[int] = []
    places = [(images.labels == label).nonzero()[:, 0].tolist() for label in range(len(images.classes))]
    for turn in range(max(len(own) for own in places)):
        order += [own[turn] for own in places if turn < len(own)]
    return images.subset(sorted(order[:most]))
