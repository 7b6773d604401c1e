"""A method bound again and again to one backbone encodes its texts once."""

from __future__ import annotations

import torch
from tiny import images, mixed_roles, tiny_clip

from dear.methods import build_method


def test_texts_are_encoded_once_and_again_after_training(monkeypatch) -> None:
    method = build_method(
        "dear", tiny_clip(dtype=torch.float32), ("red", "green"), roles=mixed_roles(), seed=1
    )
    encoded = []
    texts = type(method).texts
    monkeypatch.setattr(type(method), "texts", lambda self: encoded.append(1) or texts(self))
    pixels = images(2, dtype=torch.float32)
    first = method.in_precision("auto").logits(pixels)
    assert torch.equal(method.in_precision("auto").logits(pixels), first)
    assert len(encoded) == 1
    with torch.no_grad():
        method.text_tokens.add_(1.0)
    assert not torch.equal(method.in_precision("auto").logits(pixels), first)
    assert len(encoded) == 2
