"""What `Clip.identity` knows: everything that decides an answer, and nothing else."""

from dataclasses import replace

import pytest
import torch

from dear import Clip, ClipConfig
from dear.clip.config import TextConfig, VisionConfig
from dear.clip.correction import Correction
from dear.export.graph import traceable_clip

CONFIG = ClipConfig(
    VisionConfig(width=32, layers=2, heads=2, image_size=32, patch_size=16),
    TextConfig(width=32, layers=2, heads=2, context=12, vocab=64),
    16,
)


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    return {name: t.half().float() for name, t in Clip(CONFIG).state_dict().items()}


def model(state, config=CONFIG):
    clip = Clip(config)
    clip.load_state_dict({name: t.clone() for name, t in state.items()})
    return clip


def test_every_part_that_decides_an_answer_changes_it(state):
    vision, text = CONFIG.vision, CONFIG.text
    configs = [
        replace(CONFIG, vision=replace(vision, activation="gelu")),
        replace(CONFIG, vision=replace(vision, heads=4)),
        replace(CONFIG, vision=replace(vision, eps=1e-6)),
        replace(CONFIG, text=replace(text, activation="gelu")),
        replace(CONFIG, resize="squash"),
        replace(CONFIG, interpolation="bilinear"),
        replace(CONFIG, mean=(0.5, 0.5, 0.5)),
        replace(CONFIG, std=(0.5, 0.5, 0.5)),
    ]
    identities = [model(state).identity, *(model(state, config).identity for config in configs)]
    for name in ("text.blocks.1.mlp.up.weight", "visual.patch.weight", "log_scale"):
        changed = {k: v.clone() for k, v in state.items()}
        changed[name].view(-1)[-1] += 0.25
        identities.append(model(changed).identity)
    assert len(set(identities)) == len(identities)
    assert all(one.startswith("sha256:") for one in identities)


def test_storage_precision_and_corrections_do_not(state):
    plain = model(state)
    expected = plain.identity
    assert model(state).half().identity == expected  # these values fit into float16
    assert Clip(replace(CONFIG)).identity != expected
    half = Correction(torch.eye(16) / 2, torch.zeros(16))
    fresh = model(state)
    fresh.log_scale.data -= 1e-4  # bfloat16 rounds this model's values
    for name, parameter in fresh.visual.named_parameters():
        parameter.data += 1e-4 if "weight" in name else 0
    copies = [
        fresh.with_correction(half),
        fresh.cast(torch.bfloat16),
        fresh.cast(torch.bfloat16).with_correction(half),
        traceable_clip(fresh.cast(torch.bfloat16)),
    ]
    assert {one.identity for one in copies} == {fresh.identity}
    assert fresh.with_correction(half).fold_correction().identity != fresh.identity


def test_a_copy_in_another_precision_leaves_the_original_as_it_is():
    vision = replace(CONFIG.vision, patch_bias=True)
    original = Clip(replace(CONFIG, vision=vision)).float()
    before = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    assert original.cast(torch.bfloat16).visual.patch.bias.dtype == torch.bfloat16
    for name, tensor in original.state_dict().items():
        assert tensor.dtype == torch.float32, name
        assert torch.equal(tensor, before[name]), name
