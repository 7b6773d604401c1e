"""Every BPE id that a text tower raised on this world must know."""

from __future__ import annotations

from functools import lru_cache

from dear.world.captions import BOT, EOT, words
from dear.world.tasks import TASKS


@lru_cache(maxsize=1)
def vocabulary_ids() -> tuple[int, ...]:
    """Sorted BPE ids of all captions, all class names of all tasks and all prompt templates.

    >>> ids = vocabulary_ids()
    >>> 300 < len(ids) < 600
    True
    """
    from instant_clip_tokenizer import Tokenizer

    tokenizer = Tokenizer()
    texts = [*words()]
    for task in TASKS.values():
        texts += [*task.classes, *(task.template.format(name) for name in task.classes)]
    return tuple(sorted({BOT, EOT}.union(*(tokenizer.encode(text) for text in texts))))
