"""Where in an image any phrase is seen, without training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.model import Clip
from dear.data.batches import image_set, pixels_for
from dear.errors import UsageError
from dear.heads.concept_words import known_concepts, readable_words
from dear.tasks.explain.parts import Trace, smooth


@torch.no_grad()
def where(clip: Clip, image: Any, phrase: str) -> Tensor:
    """Where in an image a phrase is seen, [S, S]: parts of its score above other words', by patch.

    The score is the cosine with the phrase minus the mean cosine with the words of all known concepts; no
    training is needed.
    """
    if not phrase.strip():
        raise UsageError("phrase must be a word or a short phrase to look for, got nothing")
    words = [word for concept in known_concepts().values() for word in readable_words(clip, concept.words)]
    texts = F.normalize(clip.encode_text([f"a photo of {phrase.strip()}", *words[::3]]).float(), dim=-1)
    pixels = pixels_for(clip, image_set([image]), [0])
    trace = Trace(
        clip,
        lambda other: clip.logit_scale * F.normalize(other.encode_image(pixels).float(), dim=-1) @ texts.T,
    )
    question = torch.full((1, len(texts)), -1 / (len(texts) - 1), dtype=torch.float64)
    question[0, 0] = 1.0
    patches = trace.parts(question, patches=True).patches
    assert patches is not None
    return smooth(patches[0, 0].sum((0, 1, 2)))
