"""TEXTSPAN equals the literal version, phrase for phrase."""

import numpy as np
import pytest
import torch
from heads_oracles import literal_textspan

from dear.errors import UsageError
from dear.heads.contributions import decompose, head_outputs
from dear.heads.moments import Moments, compute_moments
from dear.heads.textspan import textspan, textspan_moments


def random_case(seed, n, d, m, rank, mean=1.0, decay=0.9):
    """Contributions of a given rank with a mean and a falling spectrum, and text features around them."""
    rng = np.random.default_rng(seed)
    C = (rng.normal(size=(n, rank)) * decay ** np.arange(rank)) @ rng.normal(size=(rank, d))
    C = C + mean * rng.normal(size=rank) @ rng.normal(size=(rank, d)) if mean else C
    T = rng.normal(size=(m, d)) + rng.normal(size=d)  # CLIP's text features share a direction
    return C.astype(np.float32), T.astype(np.float32)


@pytest.mark.parametrize(
    ("n", "d", "m", "rank"),
    [
        (200, 32, 300, 32),
        (40, 64, 200, 64),
        (500, 96, 400, 96),
        (100, 48, 500, 7),
        (60, 16, 50, 1),
        (9, 24, 80, 24),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_the_literal_version(n, d, m, rank, seed):
    heads = [random_case(10 * seed + k, n, d, m, rank, mean=k) for k in range(3)]
    T = heads[0][1]
    C = torch.from_numpy(np.stack([c for c, _ in heads], 1))
    spans = textspan(C, torch.from_numpy(T), count=20)
    for k in range(3):
        expected = literal_textspan(C[:, k].numpy(), T, 20)
        picks = [p for p in spans.picks[k].tolist() if p >= 0]
        assert picks == expected
        assert spans.rank[k] <= min(rank + 1, 80)
        assert spans.picks[k, len(expected) :].eq(-1).all()


def test_truncation_at_rank_80_and_smaller():
    C, T = random_case(3, 400, 120, 300, 120, decay=0.97)
    for rank in (80, 10, 3):
        spans = textspan(torch.from_numpy(C), torch.from_numpy(T), 12, rank)
        assert [p for p in spans.picks.tolist() if p >= 0] == literal_textspan(C, T, 12, rank)
        assert spans.rank == rank


def test_moments_of_a_tower_give_the_literal_phrases(clip, images):
    """Through the whole small form: outputs, maps, running moments, against SVDs of real contributions."""
    layers = [2, 4]
    text = torch.randn(150, clip.config.embed_dim, generator=torch.Generator().manual_seed(5))
    parts = decompose(clip, images, layers)
    spans = textspan_moments(compute_moments(clip, images.split(5), layers), text, 10)
    assert spans.picks.shape == (2, 3, 10)
    for place in range(2):
        for head in range(3):
            expected = literal_textspan(parts.heads[:, place, head].numpy(), text.numpy(), 10)
            assert [p for p in spans.picks[place, head].tolist() if p >= 0] == expected
    assert spans.rank.le(8).all()  # no more than a head's width


def test_moments_merge_and_do_not_depend_on_the_batches(clip, images):
    all_images = compute_moments(clip, [images], [3, 4])
    parts = compute_moments(clip, images[:7].split(2), [3, 4]) + compute_moments(clip, [images[7:]], [3, 4])
    assert parts.count == all_images.count == 12
    torch.testing.assert_close(parts.square, all_images.square, rtol=1e-5, atol=1e-5)
    mean = decompose(clip, images, [3, 4]).heads.double().mean(0)
    torch.testing.assert_close(all_images.mean(), mean, rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError):
        all_images + compute_moments(clip, [images], [4])


def test_explained_variance_sums_to_one_when_phrases_span_everything():
    C, T = random_case(1, 300, 12, 200, 12)
    spans = textspan(torch.from_numpy(C), torch.from_numpy(T), 12)
    assert spans.explained.sum() == pytest.approx(1, abs=1e-6)
    assert (spans.explained >= 0).all()


def test_identical_images_have_no_phrases(clip, images):
    same = images[:1].expand(6, -1, -1, -1)
    spans = textspan_moments(compute_moments(clip, [same], [4]), torch.randn(30, 20), 5)
    assert spans.picks.eq(-1).all()


def test_nonsense_is_refused(clip, images):
    for n in (0, 1):
        empty = Moments(compute_moments(clip, [images], [4]).maps, [4])
        if n:
            empty.add(head_outputs(clip, images[:1], [4]).outputs)
        with pytest.raises(UsageError):
            textspan_moments(empty, torch.randn(30, 20), 5)
    with pytest.raises(UsageError):
        textspan(torch.randn(5, 4), torch.randn(0, 4))
