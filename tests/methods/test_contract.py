"""Both stages of every method, and methods bound to copies of their backbone."""

from __future__ import annotations

import pytest
import torch
from tiny import Colors, mixed_roles, tiny_clip

from dear.clip import Clip, ClipConfig, TextConfig, VisionConfig
from dear.clip.precision import cast_backbone
from dear.errors import RunError, UsageError
from dear.methods import METHODS, DeAR, Method, build_method, find_method
from dear.methods.base import in_precision
from dear.methods.dear import layer_mask
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


def shake(model: Method) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(2)) * 0.1)


@pytest.mark.parametrize("name", METHODS)
class TestStages:
    def test_the_frozen_stage_knows_nothing_learned(self, name: str) -> None:
        model = build(name)
        before = model.frozen_stage(pixels())
        shake(model)
        after = model.frozen_stage(pixels())
        assert len(before) == len(after) >= 1
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other)
            assert one.shape[0] == 3
            assert not one.requires_grad

    def test_the_frozen_stage_of_an_image_is_its_own(self, name: str) -> None:
        """Which is what allows it to be computed ahead of time in groups, and kept."""
        model = build(name)
        whole = model.frozen_stage(pixels())
        alone = [model.frozen_stage(pixels()[i : i + 1]) for i in range(3)]
        for place, tensor in enumerate(whole):
            parts = torch.cat([stage[place] for stage in alone])
            torch.testing.assert_close(tensor, parts, rtol=1e-4, atol=1e-5)

    def test_both_stages_in_sequence_are_the_logits_and_the_loss(self, name: str) -> None:
        model = build(name)
        shake(model)
        with torch.no_grad():
            found = model.logits_from_frozen(model.frozen_stage(pixels()))
            for mode, logits in model.all_logits(pixels()).items():
                assert torch.equal(found[mode], logits)
        if not model.trainable_parameters:
            return
        results = []
        for staged in (True, False):
            model.zero_grad()
            with torch.random.fork_rng():
                torch.manual_seed(0)  # dropout
                if staged:
                    loss = model.loss_from_frozen(model.frozen_stage(pixels()), LABELS, DOMAINS)
                else:
                    loss = model.loss(pixels(), LABELS, DOMAINS)
            model.backward(loss, lambda x: x)
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            results.append([loss.total.detach(), *grads])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_a_bound_method_shares_what_is_learned_and_nothing_else(self, name: str) -> None:
        model = build(name)
        shake(model)
        logits, clip, prompts = model.logits(pixels()), model.clip, model.prompts
        frozen, kept = prompts.frozen, dict(prompts._prefix)
        other = model.bound(cast_backbone(clip, torch.bfloat16))
        assert other.prompts is not prompts
        assert 0 < (other.logits(pixels()) - logits).abs().max() < 1.0
        assert model.clip is clip
        assert model.prompts is prompts
        assert prompts.frozen is frozen
        assert all(prompts._prefix[layer] is tensor for layer, tensor in kept.items())
        assert torch.equal(model.logits(pixels()), logits)
        shake(other)
        assert [id(p) for p in model.parameters()] == [id(p) for p in other.parameters()]
        assert [id(b) for b in model.buffers()] == [id(b) for b in other.buffers()]
        if model.trainable_parameters:
            assert not torch.equal(model.logits(pixels()), logits)

    def test_the_frozen_twin_of_a_model_is_the_frozen_clip(self, name: str) -> None:
        model = build(name)
        shake(model)
        frozen = METHODS["zeroshot"](model.clip, NAMES).logits(pixels())
        torch.testing.assert_close(Model(model).frozen().forward(pixels())["default"], frozen)

    def test_a_refused_state_changes_nothing(self, name: str) -> None:
        model = build(name)
        shake(model)
        before, logits = model.adapter_state(), model.logits(pixels())
        state = {key: tensor.reshape(-1)[:0] for key, tensor in before.items()} | {"stray": torch.zeros(1)}
        with pytest.raises(RunError, match="stray"):
            model.load_adapter_state(state)
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.adapter_state().items())
        assert torch.equal(model.logits(pixels()), logits)


def test_training_a_bound_method_trains_the_first() -> None:
    """Parameters and buffers alike: PromptSRC's sums over epochs are buffers that training replaces."""
    model = build("promptsrc")
    before = model.adapter_state()
    train(model.bound(model.clip), Colors(), Recipe(epochs=1, batch=6))
    assert not torch.equal(model.adapter_state()["vectors"], before["vectors"])


def test_a_backbone_of_another_shape_or_device_is_refused() -> None:
    model = build("coop")
    vision = VisionConfig(width=36, layers=2, heads=4, image_size=24, patch_size=8)
    small = Clip(ClipConfig(vision, TextConfig(width=24, layers=5, heads=3), embed_dim=20))
    with pytest.raises(UsageError, match="copy of its own backbone"):
        model.bound(small)


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
    bound = in_precision(model, "float32")
    assert bound.clip.visual.dtype == bound.clip.dtype == torch.float32
    assert bound.clip.fingerprint == clip.fingerprint
    exact = clip.float().encode_image(pixels())  # the same weights, computed in float32
    assert torch.equal(bound.clip.encode_image(pixels()), exact)
    model = build_method("zeroshot", tiny_clip(dtype=torch.bfloat16), NAMES)
    assert in_precision(model, "auto").clip is model.clip


def test_attributes_by_another_name_have_the_masks_of_their_own() -> None:
    named = build("dear", attributes=("colour", "PLACE", "texture"))
    plain = build("dear", attributes=("Color", "Location", "Texture"))
    assert isinstance(named, DeAR)
    assert named.attributes == named.config.attributes == ("Color", "Location", "Texture")
    for layer, mask in named.masks.items():
        expected = layer_mask(mixed_roles(), layer, ("Color", "Location", "Texture"))
        assert torch.equal(mask.visible, expected.visible)
    assert torch.equal(named.logits(pixels()), plain.logits(pixels()))
    with pytest.raises(UsageError, match="twice"):
        build("dear", attributes=("colour", "Color"))
    with pytest.raises(UsageError, match="twice"):
        build("dear", attributes=("place", "Location"))


def test_a_method_from_outside_is_found_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "MyMethod", METHODS["coop"])
    assert find_method("MyMethod") is find_method("mymethod") is METHODS["coop"]
    assert find_method("DeAR") is METHODS["dear"]
    with pytest.raises(UsageError, match="no method is called 'my-method'"):
        find_method("my-method")
