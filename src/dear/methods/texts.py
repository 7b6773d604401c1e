"""Several texts per class: sentences whose unit features are averaged, at unit length again.

A class has its own sentences (`{class: [sentence, …]}`), or synonyms in its name ("cat|kitty"), each in the
template; else one prompt. The mean takes the place of the prompt's feature. A method that learns in the text
tower learns on the prompt: what the other sentences add to its frozen feature is added to the learned one.
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

#: Between the names of one class. Not the bars of a special token such as <|endoftext|>, which the tokenizer
#: rejects.
SYNONYMS = re.compile(r"(?<!<)(?<!&lt;)\|(?!>|&gt;)")
_AT_ONCE = 256  # texts, which bounds the memory of the text tower


def names_of(name: str) -> list[str]:
    """The names of a class: one, or several with `|` between.

    >>> names_of("cat | kitty"), names_of("cat")
    (['cat', 'kitty'], ['cat'])
    """
    return [part for each in SYNONYMS.split(name) if (part := each.strip())] or [name]


@dataclass(frozen=True, eq=False)
class ClassTexts:
    """Sentences of classes, trained or not, and the mean features that are known already.

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
        sentences = self.sentences.get(name)
        return (
            tuple(sentences) if sentences else tuple(fill_template(template, each) for each in names_of(name))
        )

    def several(self, name: str) -> bool:
        """Whether a class has more than its one prompt: several texts, or a mean feature."""
        return name in self.means or name in self.sentences or len(names_of(name)) > 1

    @torch.no_grad()
    def features(self, clip: Clip, names: Iterable[str], template: str) -> dict[str, Tensor]:
        """Unit means [E] by class, for classes that have several texts; each is computed once."""
        listed = [name for name in dict.fromkeys(names) if self.several(name)]
        computed = self._computed.setdefault((id(clip), template), (clip, {}))[1]
        unknown = [name for name in listed if name not in self.means and name not in computed]
        texts = [self.of(name, template) for name in unknown]
        flat = [text for some in texts for text in some]
        parts = [
            unit(clip.encode_text(flat[start : start + _AT_ONCE])) for start in range(0, len(flat), _AT_ONCE)
        ]
        rows = torch.cat(parts).split([len(some) for some in texts]) if parts else ()
        computed.update({name: unit(part.mean(dim=0)) for name, part in zip(unknown, rows, strict=True)})
        known = {name: mean.to(clip.device) for name, mean in self.means.items()}
        return {name: known[name] if name in known else computed[name] for name in listed}
