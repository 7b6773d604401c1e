"""Prompts whose first words are learned vectors: what CoOp and its descendants share.

A prompt is `BOT, context, rest, EOT`. The rest (class name, full stop) keeps the positions it has behind the
words that the context replaces. The context comes in as extra tokens of the text tower at layer 1, and may be
replaced at deeper layers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.model import Clip
from dear.clip.tower import Edit, LayerEdit
from dear.errors import UsageError
from dear.methods.base import ClassPrompts, Frozen, Loss, Method, distance, normal, scores, unit

WORDS = "a photo of a"  #: what contexts start as
_TEXTS_AT_ONCE = 1024  # bounds the memory where every image has prompts of its own


class ContextPrompts:
    """One prompt per class with `count` learned vectors in place of its first words.

    Args:
        prompts: the classes; their token ids, if they were given as such, are the prompts themselves.
        count: length of the context.
        words: the first words of every prompt, of which `count` are replaced; the context starts as their
            embeddings. Empty, or too short: placeholders, and a random start.
        tail: the sentence from the class name on.
    """

    def __init__(self, prompts: ClassPrompts, count: int, words: str = WORDS, tail: str = "{}.") -> None:
        if count < 0:
            raise UsageError(f"a context of {count} vectors cannot be; give 0 or more")
        self.count = count
        self.words = words if words and _length(prompts.clip, words) >= count else ""
        lead = self.words or " ".join("X" * count)
        sentences = [f"{lead} {tail.replace('{}', name)}" for name in prompts.classes]
        ids = prompts.clip.tokenize(sentences) if prompts.given is None else prompts.given
        self.ids = prompts.clip.text.cut(ids).to(prompts.clip.device)  # [C, T]
        self.eot = prompts.clip.text.eot(self.ids)  # [C]
        words_there = prompts.clip.text.word_count(self.ids)
        if int(words_there.min()) < count:
            short = prompts.classes[int(words_there.argmin())]
            raise UsageError(f"the prompt of {short!r} has fewer words than the {count} to be replaced")

    def start(self, clip: Clip, generator: torch.Generator) -> Tensor:
        """Where the context starts, [count, D]."""
        if not self.words:
            return normal(generator, self.count, clip.config.text.width)
        ids = clip.tokenize([self.words]).to(clip.device)
        rows = clip.text.embed(ids)[0] - clip.text.positions[: ids.shape[1]]
        at = clip.text.first_word
        return rows[at : at + self.count]

    def deep_start(self, clip: Clip, generator: torch.Generator, depth: int) -> Tensor:
        """Where contexts of the layers 1 to `depth` start, [depth, count, D]: all but the first at random."""
        first = self.start(clip, generator).cpu().double()
        return torch.cat([first[None], normal(generator, depth - 1, *first.shape)])

    def features(self, clip: Clip, tokens: Mapping[int, Tensor]) -> Tensor:
        """Features [C, E] (not unit) with these tokens, [count, D] or [C, count, D], at these layers.

        Layer 1 must be among them; there the positions of the replaced words are added.
        """
        return self._run(clip, self._rest(clip), self.eot, tokens)

    def features_each(self, clip: Clip, contexts: Tensor) -> Tensor:
        """Features [B, C, E] of all prompts under each of the contexts [B, count, D]."""
        rest, classes = self._rest(clip), len(self.ids)
        parts = []
        for some in contexts.split(max(1, _TEXTS_AT_ONCE // classes)):
            rows = rest.repeat(len(some), 1, 1)  # [b C, T, D]
            each = some.repeat_interleave(classes, dim=0)  # [b C, count, D]
            parts.append(self._run(clip, rows, self.eot.repeat(len(some)), {1: each}))
        return torch.cat(parts).view(len(contexts), classes, -1)

    def _rest(self, clip: Clip) -> Tensor:
        """Embedded prompts without the replaced words, [C, T - count, D]."""
        rows, at = clip.text.embed(self.ids), clip.text.first_word
        return torch.cat([rows[:, :at], rows[:, at + self.count :]], dim=1)

    def _run(self, clip: Clip, rows: Tensor, end: Tensor, tokens: Mapping[int, Tensor]) -> Tensor:
        tower = clip.text
        at = tower.first_word
        placed = {**tokens, 1: tokens[1] + tower.positions[at : at + self.count]}
        edit = Edit({layer: LayerEdit(tokens=own) for layer, own in placed.items()}, count=self.count, at=at)
        return tower.project(tower.run(rows, edit=edit, read=end[:, None])[:, 0])


def _length(clip: Clip, words: str) -> int:
    """How many tokens the words are."""
    return int(clip.text.word_count(clip.tokenize([words]))[0])


def knowledge_loss(method: Method, frozen: Frozen, labels: Tensor, weight: float) -> Loss:
    """Cross-entropy + weight x distance of the learned text features to the frozen ones (KgCoOp, eq. 5)."""
    texts = method.texts()
    ce = F.cross_entropy(scores(method.clip, method.images_from_frozen(frozen), texts), labels)
    apart = distance(unit(texts), method.prompts.frozen)
    return Loss(ce + weight * apart, {"ce": ce.detach(), "knowledge": apart.detach()})
