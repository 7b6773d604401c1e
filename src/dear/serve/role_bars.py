"""The score of an answer as a sum over roles, for `?explain=roles`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dear.errors import DearError
from dear.images.views import normalize
from dear.runs.model import Model
from dear.serve.errors import Refused
from dear.tasks.explain.explainer import Explainer


def role_bars(model: Model, raw: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Answer, runner-up and bars of images uint8 [3, S, S]."""
    if len(model.classes) < 2:
        raise Refused(400, "with one class there is nothing to explain an answer against")
    with torch.inference_mode(False):
        bound = model.bound.bind(model.bound.clip)
        # Texts were encoded in inference mode, from which no gradient can be taken.
        bound.prompts.set_frozen(bound.prompts.frozen.clone())
        config = bound.clip.config
        pixels = normalize(torch.stack(list(raw)).to(bound.clip.device), config.mean, config.std)
        try:
            results = Explainer(Model(bound, model.calibration)).bars(pixels)
        except DearError as error:
            raise Refused(400, str(error)) from None
    return [
        {"answer": answer, "against": other, "bars": [bar.facts() for bar in bars]}
        for answer, other, bars in results
    ]
