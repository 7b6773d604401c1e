"""The prompts of the classes: unchanged, or with learned vectors in place of their first words.

A prompt is `BOT, words, EOT`; with learned vectors (CoOp and its descendants) `BOT, context, suffix, EOT`.
The suffix (class name, full stop) keeps its position embeddings. The context enters the text tower as extra
tokens at layer 1, and may be replaced at deeper layers.
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

WORDS = "a photo of a"  #: initial words of learned contexts
_CLASSES_AT_ONCE = 256  # bounds the memory of the frozen passes over long class lists
_TEXTS_AT_ONCE = 1024  # bounds the memory where every image has its own prompts


class ClassPrompts:
    """One prompt per class as token ids, with cached outputs of the frozen text tower.

    Args:
        clip: the backbone whose text tower reads the prompts.
        classes: names of the classes.
        template: prompt with `{}` for the class name.
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
            raise UsageError(f"classes must be a list of at least one name, got {classes!r}")
        invalid = [name for name in classes if not isinstance(name, str) or not name.strip()]
        if invalid:
            raise UsageError(f"a class name must be a string that is not empty, got {invalid[0]!r}")
        self.clip = clip
        self.classes = tuple(check_name(name) for name in classes)
        self.template = template
        self.texts = ClassTexts() if texts is None else texts
        self.names = tuple(names_of(name)[0] for name in self.classes)  #: used in prompts: the first synonym
        self.token_ids = ids
        sentences = [fill_template(template, name) for name in self.names]
        padded = clip.tokenize(sentences) if ids is None else ids
        if padded.ndim != 2 or padded.shape[0] != len(self.classes):
            raise InputError(
                f"ids must be [{len(self.classes)}, T], one row per class, got {list(padded.shape)}"
            )
        vocab = clip.config.text.vocab
        if padded.numel() == 0:
            raise InputError(f"ids must have at least one token per class, got {list(padded.shape)}")
        if not 0 <= (low := int(padded.min())) <= (high := int(padded.max())) < vocab:
            raise InputError(f"ids must be token numbers from 0 to {vocab - 1}, got {low} to {high}")
        self.ids = clip.text.trim_padding(padded).to(clip.device)  # [C, T]
        self.eot = clip.text.eot(self.ids)  # [C]
        #: whether some class has several texts, whose mean feature replaces that of its prompt
        self.several_texts = ids is None and any(map(self.texts.has_several, self.classes))
        self._frozen: Tensor | None = None
        self._shift: Tensor | None = None
        self._source: ClassPrompts | None = (
            None  # the object that `bind` copied, whose frozen features are used
        )
        self._prefix: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def bind(self, clip: Clip) -> ClassPrompts:
        """The same prompts on a copy of the backbone; the frozen features remain those of the original."""
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
            with torch.inference_mode(False), torch.no_grad():  # training cannot use inference tensors
                frozen = unit(self.clip.encode_text(self.ids))
                if self.several_texts:
                    means = self.texts.features(self.clip, self.classes, self.template)
                    rows = zip(self.classes, frozen, strict=True)
                    frozen = torch.stack([means.get(name, row).to(row) for name, row in rows])
                self._frozen = frozen
        return self._frozen

    @property
    def cached_frozen(self) -> Tensor | None:
        """`frozen` if it was computed."""
        return self._frozen

    def add_text_shift(self, features: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Learned features [..., C, E] of the prompts plus what several texts change in the frozen feature.

        The shift is `mean feature of the texts - feature of the prompt`, both frozen, and features are
        normalized first. If every class has one prompt, features are returned unchanged. `chosen` are the
        indices of the classes, if features has only some of them.
        """
        if not self.several_texts:
            return features
        if self._shift is None:
            with torch.inference_mode(False), torch.no_grad():
                self._shift = self.frozen - unit(self.clip.encode_text(self.ids)).to(self.frozen)
        shift = self._shift if chosen is None else self._shift[chosen]
        return unit(features) + shift.to(features.dtype)

    def set_frozen(self, features: Tensor) -> None:
        """Set the frozen unit features [C, E], computed elsewhere."""
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
        """Unnormalized features [C, E] of the text tower under `edit`, whose first changed layer is `first`.

        Layers before `first` come from the cached prefix; the last layer computes only the row of EOT.
        """
        end = self.eot + (edit.count if edit.at is not None else 0)
        tower = self.clip.text
        x = tower.run(self.prefix(first - 1), first=first, edit=edit, read=end[:, None])  # [C, 1, D]
        return self.add_text_shift(tower.project(x[:, 0]))


class ContextPrompts:
    """One prompt per class with `count` learned vectors in place of its first words.

    Args:
        prompts: the classes; if the caller passed token ids, the context replaces words of those.
        count: number of context vectors.
        words: first words of every prompt, of which `count` are replaced; the context is initialized with
            their embeddings. If empty or too short, it is initialized at random.
        tail: the prompt from the class name on.
    """

    def __init__(self, prompts: ClassPrompts, count: int, words: str = WORDS, tail: str = "{}.") -> None:
        if count < 0:
            raise UsageError(f"context must be at least 0, got {count}")
        self.count = count
        self.words = words
        self.prompts = prompts
        if words and int(prompts.clip.text.word_count(prompts.clip.tokenize([words]))[0]) < count:
            self.words = ""
        start = self.words or " ".join("X" * count)  # placeholders that the context replaces
        sentences = [f"{start} {tail.replace('{}', name)}" for name in prompts.names]
        ids = prompts.clip.tokenize(sentences) if prompts.token_ids is None else prompts.token_ids
        self.ids = prompts.clip.text.trim_padding(ids).to(prompts.clip.device)  # [C, T]
        self.eot = prompts.clip.text.eot(self.ids)  # [C]
        word_counts = prompts.clip.text.word_count(self.ids)  # [C]
        if int(word_counts.min()) < count:
            shortest = int(word_counts.argmin())
            raise UsageError(
                f"context must be at most the tokens of a prompt: {prompts.classes[shortest]!r} has "
                f"{int(word_counts[shortest])}, got {count}"
            )

    def start(self, clip: Clip, generator: torch.Generator) -> Tensor:
        """Initial context vectors [count, D]."""
        if not self.words:
            return normal(generator, self.count, clip.config.text.width)
        ids = clip.tokenize([self.words]).to(clip.device)
        embeddings = clip.text.embed(ids)[0] - clip.text.positions[: ids.shape[1]]  # [T, D]
        at = clip.text.first_word
        return embeddings[at : at + self.count]

    def deep_start(self, clip: Clip, generator: torch.Generator, depth: int) -> Tensor:
        """Initial contexts of layers 1 to `depth`, [depth, count, D]; those after layer 1 are random."""
        first = self.start(clip, generator).cpu().double()  # [count, D]
        return torch.cat([first[None], normal(generator, depth - 1, *first.shape)])

    def features(self, clip: Clip, tokens: Mapping[int, Tensor]) -> Tensor:
        """Unnormalized features [C, E] with tokens [count, D] or [C, count, D] by layer.

        Layer 1 is required; its tokens get the position embeddings of the replaced words.
        """
        return self.prompts.add_text_shift(self._run(clip, self._without_words(clip), self.eot, tokens))

    def features_each(self, clip: Clip, contexts: Tensor) -> Tensor:
        """Unnormalized features [B, C, E] of all prompts with each of the contexts [B, count, D]."""
        prompts, classes = self._without_words(clip), len(self.ids)
        features = []
        for chunk in contexts.split(max(1, _TEXTS_AT_ONCE // classes)):  # [b, count, D]
            rows = prompts.repeat(len(chunk), 1, 1)  # [C, T - count, D] -> [b C, T - count, D]
            tokens = chunk.repeat_interleave(classes, dim=0)  # [b, count, D] -> [b C, count, D]
            features.append(self._run(clip, rows, self.eot.repeat(len(chunk)), {1: tokens}))
        by_image = torch.cat(features).view(len(contexts), classes, -1)  # [B C, E] -> [B, C, E]
        return self.prompts.add_text_shift(by_image)

    def _without_words(self, clip: Clip) -> Tensor:
        """Embedded prompts without the replaced words, [C, T - count, D]."""
        rows, at = clip.text.embed(self.ids), clip.text.first_word
        return torch.cat([rows[:, :at], rows[:, at + self.count :]], dim=1)

    def _run(self, clip: Clip, rows: Tensor, eot: Tensor, tokens: Mapping[int, Tensor]) -> Tensor:
        """Features [n, E] of embedded prompts [n, T - count, D] with tokens inserted; eot [n]."""
        tower = clip.text
        at = tower.first_word
        by_layer = {**tokens, 1: tokens[1] + tower.positions[at : at + self.count]}
        layers = {layer: LayerEdit(tokens=part) for layer, part in by_layer.items()}
        x = tower.run(rows, edit=Edit(layers, count=self.count, at=at), read=eot[:, None])  # [n, 1, D]
        return tower.project(x[:, 0])
