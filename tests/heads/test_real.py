"""The embedded backbone: real weights, images and phrases, against the literal procedure and the truth."""

import pytest
import torch
from heads_oracles import literal_textspan

import dear
from dear import world
from dear.heads.contributions import decompose
from dear.heads.corpus import load_corpus
from dear.heads.discover import default_corpus, default_phrases, discover_roles, text_features
from dear.heads.moments import compute_moments
from dear.heads.roles import RoleMap
from dear.heads.textspan import textspan_moments


@pytest.fixture(scope="module")
def mini():
    return dear.load("mini")


@pytest.fixture(scope="module")
def pixels(mini):
    """Images of everything there is in the attribute world, normalized."""
    rendered = world.render(world.sample(120, torch.Generator().manual_seed(3)))
    mean, std = torch.tensor(mini.config.mean), torch.tensor(mini.config.std)
    return (rendered.float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)


def test_real_contributions_sum_to_the_feature(mini, pixels):
    batch = pixels[:16]
    feature = mini.encode_image(batch)
    for layers in (None, [9, 10, 11, 12]):
        error = (decompose(mini, batch, layers).total() - feature).norm() / feature.norm()
        assert error < 1e-4


def test_real_phrases_equal_the_literal_procedure(mini, pixels):
    layers = (10, 12)
    texts, features, _ = text_features(mini, load_corpus("world").texts)
    contributions = torch.cat([decompose(mini, part, layers).heads for part in pixels.split(60)])
    picks = textspan_moments(compute_moments(mini, pixels.split(64), layers), features, 12).picks
    for place in range(2):
        for head in (0, 11):  # the literal procedure takes a second for each
            expected = literal_textspan(contributions[:, place, head].numpy(), features.numpy(), 12)
            assert picks[place, head].tolist() == expected
    assert len(texts) > 1000


def test_discovery_fits_the_backbone(mini, pixels, tmp_path):
    assert default_corpus(mini) == "world"
    assert default_phrases(mini) == 5
    roles = discover_roles(mini, pixels, concepts="tags", replicates=2)
    assert roles.layers == (9, 10, 11, 12)
    assert len(roles) == 48
    roles.save(tmp_path / "roles.json")
    assert RoleMap.load(tmp_path / "roles.json").check(mini) is None
    # Places are what the world's images differ in most: some head must have learned them.
    assert roles.concept_counts()["Location"] >= 3
