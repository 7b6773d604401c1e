"""Contributions: they sum to the feature and equal those of a tower run by hand."""

import pytest
import torch
from heads_oracles import literal_contributions, tiny_clip

from dear.clip.config import ClipConfig
from dear.clip.correction import Correction
from dear.clip.model import Clip
from dear.errors import UsageError
from dear.heads.contributions import decompose, head_maps, head_outputs


def relative(a, b):
    return float((a - b).norm() / b.norm())


def test_terms_sum_to_the_feature(clip, images):
    for layers in (None, [4], [1, 3], [3, 4]):
        parts = decompose(clip, images, layers)
        assert relative(parts.total(), clip.encode_image(images)) < 1e-5


def test_equal_a_tower_run_by_hand(clip, images):
    heads, rest = literal_contributions(clip, images)
    parts = decompose(clip, images)
    assert relative(parts.heads, heads) < 1e-5
    assert relative(parts.rest, rest) < 1e-5
    some = decompose(clip, images, [2, 4])
    assert some.layers == (2, 4)
    assert relative(some.heads, heads[:, [1, 3]]) < 1e-5
    assert relative(some.rest, rest + heads[:, [0, 2]].sum((1, 2))) < 1e-5


def test_small_form_is_the_same(clip, images):
    small = head_outputs(clip, images, [2, 4])
    full = torch.einsum("blhd,lhde->blhe", small.outputs, head_maps(clip, [2, 4]))
    assert relative(full, decompose(clip, images, [2, 4]).heads) < 1e-5
    assert relative(small.features, clip.encode_image(images)) < 1e-5


def test_terms_of_a_corrected_backbone_sum_to_its_feature(clip, images):
    width = clip.config.embed_dim
    random = torch.Generator().manual_seed(0)
    matrix = torch.eye(width) + 0.1 * torch.randn(width, width, generator=random)
    bias = torch.randn(width, generator=random)
    for heads in ((), ((1, 0), (4, 1))):
        corrected = clip.with_correction(Correction(matrix, bias, heads))
        plain = decompose(clip, images, [1, 4]).heads @ matrix
        for layers in (None, [4], [1, 4]):
            assert (
                relative(decompose(corrected, images, layers).total(), corrected.encode_image(images)) < 1e-5
            )
        parts = decompose(corrected, images, [1, 4])
        assert parts.layers == (1, 4)
        gone = [(layer, head) in heads for layer in (1, 4) for head in range(plain.shape[2])]
        assert not parts.heads.flatten(1, 2)[:, gone].any()
        kept = [not one for one in gone]
        assert relative(parts.heads.flatten(1, 2)[:, kept], plain.flatten(1, 2)[:, kept]) < 1e-5


def test_real_size_sums_to_the_feature():
    torch.manual_seed(0)
    clip = Clip(ClipConfig.named("ViT-B-16"))
    batch = torch.randn(2, 3, 224, 224)
    parts = decompose(clip, batch, clip.config.vision.last_third)
    assert parts.heads.shape == (2, 4, 12, 512)
    assert relative(parts.total(), clip.encode_image(batch)) < 1e-4


def test_layers_that_do_not_exist(images):
    clip = tiny_clip()
    for layers in ([0], [5], []):
        with pytest.raises(UsageError, match=r"\b4\b"):
            decompose(clip, images, layers)
    assert clip.config.vision.last_third == (4,)
