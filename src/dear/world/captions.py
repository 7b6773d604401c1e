"""Captions as tensors: token ids are looked up and put together on the device, no strings in the loop.

A caption is a template and a wording for each of its slots. Every wording is one row of a phrase table that
holds its BPE ids; a caption's ids are the rows of its phrases one after another. Because CLIP's BPE never
joins across blanks, this equals tokenizing the sentence (a test compares them).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

from dear.utils.byte_pairs import encode
from dear.world import factors as F
from dear.world.scenes import Scenes
from dear.world.templates import SLOTS, TEMPLATES, WORDS

BOT, EOT, PAD = 49406, 49407, 0
LENGTH = 32
CANONICAL = 0.75  # how often a value is named by its first word
_NOTHING, _A, _AN = 0, 1, 2  # rows of the phrase table with a special meaning


@dataclass(frozen=True)
class Captions:
    """A batch of captions."""

    ids: Tensor  #: int64 [B, 32], BOT … EOT, then zeros
    mask: Tensor  #: bool [B, F], which factors the caption names
    template: Tensor  #: int64 [B], row of `templates.TEMPLATES`
    phrase: Tensor  #: int64 [B, S], rows of the phrase table


@dataclass(frozen=True)
class _Wording:
    """All phrases, and how templates refer to them; made before tokenizing."""

    words: tuple[str, ...]  # [P]
    vowel: Tensor  # bool [P]: takes "an"
    slot: Tensor  # int64 [T, S]: 0 nothing, 1 article, 2 fixed words, 3.. the slots in order
    fixed: Tensor  # int64 [T, S]: phrase of fixed words
    column: Tensor  # int64 [slots + 3]: factor that fills a slot
    first: Tensor  # int64 [slots + 3, V]: first phrase of a value
    number: Tensor  # int64 [slots + 3, V]: how many phrases it has
    weight: Tensor  # int64 [T]
    named: Tensor  # bool [T, F]
    kinds: Tensor  # bool [T, K]
    multiple: Tensor  # bool [T, 2]: fits one subject, fits several

    def to(self, device: torch.device | str) -> _Wording:
        tensors = (getattr(self, field.name).to(device) for field in fields(self)[1:])
        return _Wording(self.words, *tensors)


@lru_cache(maxsize=1)
def _wording() -> _Wording:
    words: list[str] = ["", "a", "an"]
    width = max(map(len, WORDS.values()))
    first = torch.zeros(len(SLOTS) + 3, width, dtype=torch.int64)
    number = torch.ones_like(first)
    column = torch.zeros(len(SLOTS) + 3, dtype=torch.int64)
    for row, (name, factor) in enumerate(SLOTS.items(), start=3):
        column[row] = factor
        for value, wordings in enumerate(WORDS[name]):
            first[row, value], number[row, value] = len(words), len(wordings)
            words.extend(wordings)
    names = {f"{{{name}}}": row for row, name in enumerate(SLOTS, start=3)}
    length = max(len(template.parts) for template in TEMPLATES)
    slot = torch.zeros(len(TEMPLATES), length, dtype=torch.int64)
    fixed = torch.zeros_like(slot)
    named = torch.zeros(len(TEMPLATES), len(F.FACTORS), dtype=torch.bool)
    kinds = torch.zeros(len(TEMPLATES), len(F.KINDS), dtype=torch.bool)
    multiple = torch.zeros(len(TEMPLATES), 2, dtype=torch.bool)
    for row, template in enumerate(TEMPLATES):
        named[row, list(template.factors)] = True
        kinds[row, list(template.kinds)] = True
        multiple[row] = torch.tensor([template.multiple is not True, template.multiple is not False])
        for position, part in enumerate(template.parts):
            if part == "{a}":
                slot[row, position] = 1
            elif part in names:
                slot[row, position] = names[part]
            else:
                if part not in words:
                    words.append(part)
                slot[row, position], fixed[row, position] = 2, words.index(part)
    vowel = torch.tensor([word[:1] in set("aeiou") for word in words])
    weight = torch.tensor([template.weight for template in TEMPLATES])
    return _Wording(tuple(words), vowel, slot, fixed, column, first, number, weight, named, kinds, multiple)


class CaptionTable:
    """Captions for scenes: the BPE ids of every phrase [P, W], zeros after the last, and how many [P]."""

    def __init__(self, ids: Tensor, length: Tensor) -> None:
        self.ids, self.length = ids, length
        self._wording = _wording().to(ids.device)

    @classmethod
    def build(cls) -> CaptionTable:
        """Tokenize the phrases."""
        rows = [encode(word) for word in _wording().words]
        width = max(len(row) for row in rows)
        ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
        return cls(ids, torch.tensor([len(row) for row in rows]))

    def to(self, device: torch.device | str) -> CaptionTable:
        """The same table on another device."""
        return CaptionTable(self.ids.to(device), self.length.to(device))

    @torch.no_grad()
    def captions(self, scenes: Scenes, generator: torch.Generator) -> Captions:
        """Draw one caption for every scene; the generator is on the table's device or on the CPU."""
        wording = self._wording
        values = scenes.factors()
        steps = wording.slot.shape[1]
        uniform = torch.rand(len(scenes), 1 + steps, generator=generator, device=generator.device)
        uniform = uniform.to(self.ids.device)
        template = self._templates(scenes, values, uniform[:, 0])
        slot = wording.slot[template]  # [B, S]
        value = values.gather(1, wording.column[slot]).clamp_min(0)
        number = wording.number[slot, value]
        # The first wording most of the time, else one of the others.
        chance = ((uniform[:, 1:] - CANONICAL) / (1 - CANONICAL)).clamp(0, 1)
        variant = torch.minimum(1 + (chance * (number - 1)).floor().long(), number - 1)
        variant = torch.where(uniform[:, 1:] < CANONICAL, 0, variant)
        phrase = torch.where(slot == 2, wording.fixed[template], wording.first[slot, value] + variant)
        phrase = torch.where(slot == 0, _NOTHING, phrase)
        following = torch.cat((phrase[:, 1:], phrase.new_zeros(len(scenes), 1)), dim=1)
        article = torch.where(wording.vowel[following], _AN, _A)
        phrase = torch.where(slot == 1, article, phrase)
        return Captions(self.assemble(phrase), wording.named[template], template, phrase)

    def _templates(self, scenes: Scenes, values: Tensor, uniform: Tensor) -> Tensor:
        """int64 [B]: one fitting template per scene, drawn by weight."""
        wording = self._wording
        missing = (values < 0).float() @ wording.named.float().T > 0  # [B, T]
        fits = ~missing & wording.kinds[:, scenes.kind].T & wording.multiple[:, (scenes.count > 1).long()].T
        total = (fits * wording.weight).cumsum(1)
        target = (uniform * total[:, -1]).floor().long()
        target = torch.minimum(target, total[:, -1] - 1)
        return (total <= target[:, None]).sum(1)

    def assemble(self, phrase: Tensor) -> Tensor:
        """Phrases [B, S] to token ids [B, 32]."""
        length = self.length[phrase]  # [B, S]
        end = length.cumsum(1)
        start = end - length + 1
        rows = phrase.shape[0]
        ids = torch.full((rows, LENGTH + 1), PAD, dtype=torch.int64, device=phrase.device)
        for step in range(self.ids.shape[1]):
            position = torch.where(step < length, start + step, LENGTH)  # the last column is dropped
            ids.scatter_(1, position, self.ids[phrase, step])
        ids[:, 0] = BOT
        ids.scatter_(1, end[:, -1:] + 1, EOT)
        return ids[:, :LENGTH]

    def text(self, captions: Captions, row: int) -> str:
        """The sentence of one caption."""
        words = (self._wording.words[phrase] for phrase in captions.phrase[row].tolist())
        return " ".join(word for word in words if word).replace(" .", ".")


def matching_captions(scene_factors: Tensor, caption_factors: Tensor, caption_mask: Tensor) -> Tensor:
    """Which captions are true of which images.

    Args:
        scene_factors: int64 [B, F], from `Scenes.factors`.
        caption_factors: int64 [C, F], the factors of the scenes the captions were written for.
        caption_mask: bool [C, F], what the captions name.

    Returns:
        bool [B, C]: every factor the caption names has its value in the image.
    """
    shape = (len(scene_factors), len(caption_factors))
    result = torch.ones(shape, dtype=torch.bool, device=scene_factors.device)
    for factor in range(scene_factors.shape[1]):  # one after the other: [B, C, F] would not fit
        same = scene_factors[:, factor, None] == caption_factors[None, :, factor]
        result &= same | ~caption_mask[None, :, factor]
    return result
