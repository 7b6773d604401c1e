"""Several texts per class: the unit features of its sentences are averaged and normalized again.

A class has a list of sentences (`{class: [sentence, …]}`), or synonyms in its name ("cat|kitty"), each put
into the template; otherwise it has one prompt. The mean replaces the feature of the prompt. A method that
learns in the text tower learns on the prompt; the difference between the frozen mean and the frozen feature
of the prompt is then added to the learned feature.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.methods.tensors import unit
from dear.utils.text import fill_template

#: Separator of synonyms; not the bars of a special token such as <|endoftext|>, which the tokenizer rejects.
SYNONYMS = re.compile(r"(?<!<)(?<!&lt;)\|(?!>|&gt;)")
_BATCH = 256  # texts per pass of the text tower, which bounds its memory


def names_of(name: str) -> list[str]:
    """The synonyms in a class name, which `|` separates.

    >>> names_of("cat | kitty"), names_of("cat")
    (['cat', 'kitty'], ['cat'])
    """
    return [synonym for part in SYNONYMS.split(name) if (synonym := part.strip())] or [name]


@dataclass(frozen=True, eq=False)
class ClassTexts:
    """Sentences of classes, and mean features that were computed elsewhere.

    >>> ClassTexts({"cat": ("a small cat.",)}).of("cat", "a photo of a {}.")
    ('a small cat.',)
    >>> ClassTexts().of("cat|kitty", "a {}.")
    ('a cat.', 'a kitty.')
    """

    sentences: Mapping[str, Sequence[str]] = field(default_factory=dict)  #: by class
    means: Mapping[str, Tensor] = field(default_factory=dict)  #: class -> [E], at unit length
    #: computed means, by backbone and template; the reference to the backbone keeps its id unique
    _computed: dict[tuple[int, str], tuple[Clip, dict[str, Tensor]]] = field(default_factory=dict)

    def of(self, name: str, template: str) -> tuple[str, ...]:
        """All sentences of a class."""
        if sentences := self.sentences.get(name):
            return tuple(sentences)
        return tuple(fill_template(template, synonym) for synonym in names_of(name))

    def has_several(self, name: str) -> bool:
        """Whether a class has sentences, synonyms, or a mean feature instead of one prompt."""
        return name in self.means or name in self.sentences or len(names_of(name)) > 1

    @torch.no_grad()
    def features(self, clip: Clip, names: Iterable[str], template: str) -> dict[str, Tensor]:
        """Unit mean features [E] of the classes with several texts, by class; each is computed once."""
        wanted = [name for name in dict.fromkeys(names) if self.has_several(name)]
        computed = self._computed.setdefault((id(clip), template), (clip, {}))[1]
        missing = [name for name in wanted if name not in self.means and name not in computed]
        texts = [self.of(name, template) for name in missing]
        flat = [text for sentences in texts for text in sentences]
        chunks = [flat[start : start + _BATCH] for start in range(0, len(flat), _BATCH)]
        if chunks:
            features = torch.cat([unit(clip.encode_text(chunk)) for chunk in chunks])  # [texts, E]
            by_class = features.split([len(sentences) for sentences in texts])
            means = {name: unit(rows.mean(dim=0)) for name, rows in zip(missing, by_class, strict=True)}
            computed.update(means)
        stored = {name: mean.to(clip.device) for name, mean in self.means.items()}
        return {name: stored[name] if name in stored else computed[name] for name in wanted}
