"""Methods bound to copies of their backbone, evaluated while they train, found by name."""

from __future__ import annotations

import pytest
import torch
from tiny import Colors, mixed_roles, tiny_clip

from dear.clip import Clip, ClipConfig, TextConfig, VisionConfig
from dear.errors import UsageError
from dear.methods import METHODS, DeAR, Method, build_method, find_method
from dear.methods.role_masks import layer_mask
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.train.recording import mark_changed
from dear.train.run import train

NAMES = ("red", "green", "blue")
LABELS, DOMAINS = torch.tensor([0, 2, 1]), torch.tensor([0, 1, 0])


def build(name: str, clip: Clip | None = None, **options: object) -> Method:
    clip = clip or tiny_clip(dtype=torch.float32)
    model = build_method(name, clip, NAMES, roles=mixed_roles(), **options)
    train(model, Colors(domains=2), Recipe.of(model, epochs=0, batch=6))  # cache models prepare
    return model


def pixels(count: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(seed))


def test_training_a_bound_method_trains_the_first() -> None:
    """Parameters and buffers alike: PromptSRC's sums over epochs are buffers that training replaces."""
    model = build("promptsrc")
    before = model.adapter_state()
    train(model.bind(model.clip), Colors(), Recipe(epochs=1, batch=6))
    assert not torch.equal(model.adapter_state()["vectors"], before["vectors"])


def test_a_backbone_of_another_shape_or_device_is_refused() -> None:
    model = build("coop")
    vision = VisionConfig(width=36, layers=2, heads=4, image_size=24, patch_size=8)
    small = Clip(ClipConfig(vision, TextConfig(width=24, layers=5, heads=3), embed_dim=20))
    with pytest.raises(UsageError, match="random"):
        model.bind(small)


def test_evaluating_within_training_changes_no_bit_of_it() -> None:
    states = []
    for precision in (None, "float32", "bfloat16"):
        model = build_method("dear", tiny_clip(dtype=torch.float32), NAMES, roles=mixed_roles())

        def progress(*_: object, model: Method = model, precision: str | None = precision) -> None:
            if precision is not None:
                Model(model, precision=precision).evaluate(Colors())

        train(model, Colors(), Recipe(epochs=3, batch=5, lr=1e-2), progress=progress)
        states.append(model.adapter_state())
    for state in states[1:]:
        assert all(torch.equal(tensor, states[0][key]) for key, tensor in state.items())


def test_what_is_kept_is_computed_again_after_a_change_that_pytorch_did_not_see() -> None:
    """A replayed update writes to the learned tensors without raising their version."""
    model = build("dear")
    before = model.logits(pixels())
    for p in model.parameters():
        p.data.mul_(2)  # as a replay does: the version of p stays
    mark_changed(model.parameters())
    after = model.logits(pixels())
    model._cache.clear()
    assert torch.equal(after, model.logits(pixels()))
    assert not torch.equal(after, before)


def test_float32_is_obeyed_on_a_backbone_loaded_in_16_bits() -> None:
    clip = tiny_clip(dtype=torch.bfloat16)
    model = build_method("zeroshot", clip, NAMES)
    bound = model.in_precision("float32")
    assert bound.clip.visual.dtype == bound.clip.dtype == torch.float32
    assert bound.clip.fingerprint == clip.fingerprint
    exact = clip.float().encode_image(pixels())  # the same weights, computed in float32
    assert torch.equal(bound.clip.encode_image(pixels()), exact)
    model = build_method("zeroshot", tiny_clip(dtype=torch.bfloat16), NAMES)
    assert model.in_precision("auto").clip is model.clip


def test_attributes_by_another_name_have_the_masks_of_their_own() -> None:
    named = build("dear", attributes=("colour", "PLACE", "texture"))
    plain = build("dear", attributes=("Color", "Location", "Texture"))
    assert isinstance(named, DeAR)
    assert named.attributes == named.config.attributes == ("Color", "Location", "Texture")
    for layer, mask in named.masks.items():
        expected = layer_mask(mixed_roles(), layer, ("Color", "Location", "Texture"))
        assert torch.equal(mask.visible, expected.visible)
    assert torch.equal(named.logits(pixels()), plain.logits(pixels()))
    with pytest.raises(UsageError, match="Color, Color"):
        build("dear", attributes=("colour", "Color"))
    with pytest.raises(UsageError, match="Location, Location"):
        build("dear", attributes=("place", "Location"))


def test_a_method_from_outside_is_found_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "MyMethod", METHODS["coop"])
    assert find_method("MyMethod") is find_method("mymethod") is METHODS["coop"]
    assert find_method("DeAR") is METHODS["dear"]
    with pytest.raises(UsageError, match="'my-method'"):
        find_method("my-method")
