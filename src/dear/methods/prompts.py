"""The prompts of the classes: as they are, and with learned vectors in place of their first words.

A prompt is `BOT, words, EOT`; with learned vectors (CoOp and its descendants) `BOT, context, rest, EOT`. The
rest (class name, full stop) keeps the positions it has behind the words that the context replaces. The
context comes in as extra tokens of the text tower at layer 1, and may be replaced at deeper layers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dear.clip.edit import Edit, LayerEdit
from dear.clip.model import Clip
from dear.errors import InputError, UsageError
from dear.methods.tensors import normal, unit
from dear.methods.texts import ClassTexts, names_of
from dear.utils.text import check_name, fill_template

WORDS = "a photo of a"  #: what contexts start as
_CLASSES_AT_ONCE = 256  # bounds the memory of the frozen passes over long class lists
_TEXTS_AT_ONCE = 1024  # bounds the memory where every image has its own prompts


class ClassPrompts:
    """One prompt per class, as token ids, with the frozen work on them done once.

    Args:
        clip: the backbone whose text tower reads the prompts.
        classes: names of the classes.
        template: the sentence around a name, with `{}` in its place.
        ids: token ids [C, T] to use instead of tokenizing the sentences.
        texts: several sentences per class, for classes that have them; see `dear.methods.texts`.
    """

    def __init__(
        self,
        clip: Clip,
        classes: Sequence[str],
        template: str,
        ids: Tensor | None = None,
        texts: ClassTexts | None = None,
    ) -> None:
        if isinstance(classes, str) or not classes:
            raise UsageError(f"classes must be a list of at least one name; got {classes!r}")
        nameless = [c for c in classes if not isinstance(c, str) or not c.strip()]
        if nameless:
            raise UsageError(f"a class name must be text that is not empty; got {nameless[0]!r}")
        self.clip = clip
        self.classes = tuple(check_name(name) for name in classes)
        self.template = template
        self.texts = ClassTexts() if texts is None else texts
        self.names = tuple(names_of(name)[0] for name in self.classes)  #: as the prompts call the classes
        self.token_ids = ids
        sentences = [fill_template(template, name) for name in self.names]
        full = clip.tokenize(sentences) if ids is None else ids
        if full.ndim != 2 or full.shape[0] != len(self.classes):
            raise InputError(
                f"ids must be [{len(self.classes)}, T], one row per class; got {list(full.shape)}"
            )
        if full.numel() == 0 or not 0 <= int(full.min()) <= int(full.max()) < clip.config.text.vocab:
            raise InputError(f"ids must be token numbers from 0 to {clip.config.text.vocab - 1}")
        self.ids = clip.text.trim_padding(full).to(clip.device)  # [C, T]
        self.eot = clip.text.eot(self.ids)  # [C]
        self.several = ids is None and any(map(self.texts.several, self.classes))
        self._frozen: Tensor | None = None
        self._shift: Tensor | None = None
        self._source: ClassPrompts | None = None  # object that shares its frozen features; None: no other
        self._prefix: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def on(self, clip: Clip) -> ClassPrompts:
        """The same prompts read by a copy of the backbone; the frozen features stay those of the first."""
        other = copy.copy(self)
        other._source = self
        if clip is not self.clip:
            other.clip, other._prefix = clip, {}
        else:
            other._prefix = dict(self._prefix)
        return other

    @property
    def frozen(self) -> Tensor:
        """Unit features of the classes under the frozen text tower, [C, E]: of prompts, or means of texts."""
        if self._frozen is None and self._source is not None:
            self._frozen = self._source.frozen
        if self._frozen is None:
            with torch.inference_mode(False), torch.no_grad():  # a training may use them later
                frozen = unit(self.clip.encode_text(self.ids))
                if self.several:
                    means = self.texts.features(self.clip, self.classes, self.template)
                    rows = zip(self.classes, frozen, strict=True)
                    frozen = torch.stack([means.get(name, row).to(row) for name, row in rows])
                self._frozen = frozen
        return self._frozen

    def shifted(self, features: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Learned features [..., C, E] of the prompts, moved by what the other texts add to frozen ones.

        They are returned as they are where every class has one prompt; otherwise they are brought to unit
        length first. `chosen`: places of the classes, where they are not all.
        """
        if not self.several:
            return features
        if self._shift is None:
            with torch.inference_mode(False), torch.no_grad():
                self._shift = self.frozen - unit(self.clip.encode_text(self.ids)).to(self.frozen)
        shift = self._shift if chosen is None else self._shift[chosen]
        return unit(features) + shift.to(features.dtype)

    def set_frozen(self, features: Tensor) -> None:
        """Use features [C, E] that were computed elsewhere."""
        if len(features) != len(self):
            raise RuntimeError(f"features must have a row per class ({len(self)}), got {len(features)}")
        self._frozen = features

    def prefix(self, last: int) -> Tensor:
        """The output of layer `last` of the frozen text tower, [C, T, D] (0: the embeddings); cached."""
        if last not in self._prefix:
            with torch.no_grad():
                tower = self.clip.text
                parts = [tower.run(tower.embed(i), last=last) for i in self.ids.split(_CLASSES_AT_ONCE)]
                self._prefix[last] = torch.cat(parts)
        return self._prefix[last]

    def features(self, edit: Edit, first: int = 1) -> Tensor:
        """Features [C, E] (not unit) of the text tower under `edit`, which starts to act at layer `first`.

        Layers before `first` are the cached prefix; the last layer computes EOT's row alone.
        """
        end = self.eot + (edit.count if edit.at is not None else 0)
        tower = self.clip.text
        x = tower.run(self.prefix(first - 1), first=first, edit=edit, read=end[:, None])  # [C, 1, D]
        return self.shifted(tower.project(x[:, 0]))


class ContextPrompts:
    """One prompt per class with `count` learned vectors in place of its first words.

    Args:
        prompts: the classes; token ids, if the caller passed them, are the prompts themselves.
        count: length of the context.
        words: the first words of every prompt, of which `count` are replaced; the context starts as their
            embeddings. Empty, or too short: placeholders, and a random start.
        tail: the sentence from the class name on.
    """

    def __init__(self, prompts: ClassPrompts, count: int, words: str = WORDS, tail: str = "{}.") -> None:
        if count < 0:
            raise UsageError(f"context must be at least 0, got {count}")
        self.count = count
        self.words = words
        self.prompts = prompts
        if words and int(prompts.clip.text.word_count(prompts.clip.tokenize([words]))[0]) < count:
            self.words = ""
        lead = self.words or " ".join("X" * count)
        sentences = [f"{lead} {tail.replace('{}', name)}" for name in prompts.names]
        ids = prompts.clip.tokenize(sentences) if prompts.token_ids is None else prompts.token_ids
        self.ids = prompts.clip.text.trim_padding(ids).to(prompts.clip.device)  # [C, T]
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
        return self.prompts.shifted(self._run(clip, self._rest(clip), self.eot, tokens))

    def features_each(self, clip: Clip, contexts: Tensor) -> Tensor:
        """Features [B, C, E] of all prompts under each of the contexts [B, count, D]."""
        rest, classes = self._rest(clip), len(self.ids)
        parts = []
        for some in contexts.split(max(1, _TEXTS_AT_ONCE // classes)):
            rows = rest.repeat(len(some), 1, 1)  # [b C, T, D]
            each = some.repeat_interleave(classes, dim=0)  # [b C, count, D]
            parts.append(self._run(clip, rows, self.eot.repeat(len(some)), {1: each}))
        return self.prompts.shifted(torch.cat(parts).view(len(contexts), classes, -1))

    def _rest(self, clip: Clip) -> Tensor:
        """Embedded prompts without the replaced words, [C, T - count, D]."""
        rows, at = clip.text.embed(self.ids), clip.text.first_word
        return torch.cat([rows[:, :at], rows[:, at + self.count :]], dim=1)

    def _run(self, clip: Clip, rows: Tensor, end: Tensor, tokens: Mapping[int, Tensor]) -> Tensor:
        tower = clip.text
        at = tower.first_word
        placed = {**tokens, 1: tokens[1] + tower.positions[at : at + self.count]}
        edit = Edit(
            {layer: LayerEdit(tokens=part) for layer, part in placed.items()}, count=self.count, at=at
        )
        return tower.project(tower.run(rows, edit=edit, read=end[:, None])[:, 0])
