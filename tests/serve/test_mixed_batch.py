"""Several adapters, one batch: every image gets the answer of its own adapter."""

from __future__ import annotations

import pytest
import torch
from stacks import adapters
from tiny import images, tiny_clip

from dear.methods import METHODS
from dear.serve import mixed_batch


@pytest.mark.parametrize("name", METHODS)
def test_equal_stage_keys_mean_equal_stages(name: str) -> None:
    first, second, _ = adapters(name, tiny_clip())
    pixels = images(2)
    if first.cut == "feature":
        torch.testing.assert_close(first.inference_stage(pixels).x, first.clip.encode_image(pixels))
    assert (first.cut, first.class_token_at) == (second.cut, second.class_token_at)
    for one, other in zip(first.inference_stage(pixels), second.inference_stage(pixels), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_batch_of_all_methods_at_once() -> None:
    clip = tiny_clip()
    methods = [method for name in METHODS for method in adapters(name, clip, 2)]
    order = torch.randperm(len(methods), generator=torch.Generator().manual_seed(0)).tolist()
    methods, pixels = [methods[i] for i in order], images(len(methods))
    together = mixed_batch.logits(methods, pixels)
    for method, logits, image in zip(methods, together, pixels, strict=True):
        torch.testing.assert_close(logits, method.logits(image[None])[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["dear", "linear-probe", "coop"])
def test_neighbors_change_nothing(name: str) -> None:
    first, second, third = adapters(name, tiny_clip())
    pixels = images(4)
    alone = mixed_batch.logits([first], pixels[:1])[0]
    for neighbors in ([second, third, second], [first, first, first], [third, first, second]):
        torch.testing.assert_close(mixed_batch.logits([first, *neighbors], pixels)[0], alone)
