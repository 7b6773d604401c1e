"""Removing a concept: each way against plain numpy, the tower against the formula, folding, LEACE."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dear.clip.config import ClipConfig, TextConfig, VisionConfig
from dear.clip.correction import Correction
from dear.clip.model import Clip
from dear.errors import UsageError
from dear.heads.collect import HeadContributions, collect_contributions
from dear.heads.contributions import decompose
from dear.shortcuts.removal import combine, leace_map, remove_examples, remove_heads, remove_span

HEADS = ((2, 1), (3, 0), (3, 2))


@pytest.fixture(scope="module")
def clip() -> Clip:
    torch.manual_seed(3)
    vision = VisionConfig(width=24, layers=3, heads=3, mlp=48, image_size=16, patch_size=8)
    clip = Clip(ClipConfig(vision, TextConfig(width=16, layers=2, heads=2, mlp=32, vocab=49408), 12))
    with torch.no_grad():  # weights of a norm are never all 1 in a trained model
        clip.visual.ln_post.weight.uniform_(0.5, 2)
        clip.visual.ln_post.bias.normal_()
    return clip


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def images(clip: Clip, pixels: Tensor) -> HeadContributions:
    return collect_contributions(clip, pixels)


def _plain_span(features: np.ndarray, mean: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """f - (f - mean) B^T B with B by Gram-Schmidt, one image after another."""
    basis: list[np.ndarray] = []
    for start in rows - rows.mean(0):
        row = start.copy()
        for axis in basis:
            row -= (row @ axis) * axis
        if np.linalg.norm(row) > 1e-6:
            basis.append(row / np.linalg.norm(row))
    result = features.copy()
    for number, feature in enumerate(features):
        for axis in basis:
            result[number] -= ((feature - mean) @ axis) * axis
    return result


def test_by_heads_is_the_formula(clip: Clip, pixels: Tensor, images: HeadContributions) -> None:
    repair = remove_heads(images, HEADS, "Location")
    parts = decompose(clip, pixels)
    expected = parts.total().numpy().astype(np.float64)
    for layer, head in HEADS:
        contribution = parts.heads[:, layer - 1, head].numpy().astype(np.float64)
        expected += contribution.mean(0) - contribution
    assert np.abs(repair.apply(images).numpy() - expected).max() < 2e-5
    assert repair.title == "Location by heads (3 heads)"


def test_by_words_and_examples_are_the_formula(images: HeadContributions) -> None:
    generator = torch.Generator().manual_seed(2)
    words = torch.randn(4, 12, generator=generator)
    features = images.features.numpy().astype(np.float64)
    repair = remove_span(images, words, "Color")
    expected = _plain_span(features, features.mean(0), words.numpy().astype(np.float64))
    assert np.abs(repair.apply(images).numpy() - expected).max() < 2e-5
    assert repair.rank == 3
    examples, values = torch.randn(20, 12, generator=generator), torch.arange(20) % 5
    means = np.stack([examples.numpy()[values.numpy() == value].mean(0) for value in range(5)])
    expected = _plain_span(features, features.mean(0), means.astype(np.float64))
    features = remove_examples(images, examples, values, "lighting").apply(images).numpy()
    assert np.abs(features - expected).max() < 2e-5


@pytest.mark.parametrize("ways", ["heads", "words", "heads+words", "leace", "heads+leace", "words+leace"])
def test_a_corrected_tower_gives_the_repaired_features(
    clip: Clip, pixels: Tensor, images: HeadContributions, ways: str
) -> None:
    generator = torch.Generator().manual_seed(4)
    words, examples = torch.randn(4, 12, generator=generator), torch.randn(30, 12, generator=generator)
    parts = {
        "heads": remove_heads(images, HEADS, "A"),
        "words": remove_span(images, words, "B"),
        "leace": remove_examples(images, examples, torch.arange(30) % 3, "C", leace=True),
    }
    repair = combine(*(parts[way] for way in ways.split("+")))
    expected = repair.apply(images)
    fixed = clip.with_correction(repair.correction())
    assert (fixed.encode_image(pixels) - expected).abs().max() < 5e-5
    assert (clip.encode_image(pixels) - images.features).abs().max() < 1e-5, "the plain backbone stays"
    assert fixed.fingerprint == clip.fingerprint
    assert set(fixed.state_dict()) == set(clip.state_dict())
    assert fixed.with_correction(None).correction is None
    other = fixed.copy()
    assert torch.equal(other.encode_image(pixels), fixed.encode_image(pixels)), "a copy keeps the correction"
    assert other.visual.positions.data_ptr() != clip.visual.positions.data_ptr()
    if "heads" in ways:
        with pytest.raises(UsageError, match="heads"):
            fixed.fold_correction()
        with pytest.raises(UsageError, match="layer 2"):
            fixed.visual.final_rows(fixed.visual.run(fixed.visual.embed(pixels), last=2), first=3)
    else:
        plain = fixed.fold_correction()
        assert plain.correction is None
        assert (plain.encode_image(pixels) - expected).abs().max() < 1e-4
        assert plain.fingerprint != clip.fingerprint


def test_what_is_removed_is_gone(images: HeadContributions) -> None:
    words = torch.randn(4, 12, generator=torch.Generator().manual_seed(5))
    repaired = remove_span(images, words, "Color").apply(images)
    along = (repaired - repaired.mean(0)) @ (words - words.mean(0)).T
    assert along.abs().max() < 1e-4 < (images.features @ (words - words.mean(0)).T).std()
    # Twice removed is once removed.
    again = HeadContributions(repaired, images.outputs, images.maps, images.layers)
    assert torch.allclose(remove_span(again, words, "Color").apply(again), repaired, atol=1e-5)


def test_leace_leaves_no_linear_trace_and_changes_least() -> None:
    rng = np.random.default_rng(0)
    values = torch.arange(300) % 3
    mixing = torch.from_numpy(rng.normal(size=(8, 8)))
    features = torch.from_numpy(rng.normal(size=(300, 8))) @ mixing
    features[:, 0] += 2.0 * (values == 1)
    features[:, 3] -= 1.0 * (values == 2)
    removed, rank = leace_map(features, values, shrinkage=0.0)
    assert rank == 2
    centered = features - features.mean(0)
    erased = centered - centered @ removed
    onehot = torch.nn.functional.one_hot(values).double()
    assert (erased.T @ (onehot - onehot.mean(0)) / 300).abs().max() < 1e-9
    means = torch.stack([features[values == value].mean(0) for value in range(3)])
    other = torch.from_numpy(_plain_span(centered.numpy(), np.zeros(8), means.numpy()))
    assert (erased - centered).norm() < (other - centered).norm()


def test_leace_is_the_published_closed_form() -> None:
    concept_erasure = pytest.importorskip("concept_erasure")
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(400, 10, generator=generator, dtype=torch.float64)
    features = features @ torch.randn(10, 10, generator=generator, dtype=torch.float64)
    values = torch.randint(0, 4, (400,), generator=generator)
    features[:, 2] += values
    fitter = concept_erasure.LeaceFitter(10, 4, dtype=torch.float64, affine=True, shrinkage=False)
    fitter.update(features, torch.nn.functional.one_hot(values, 4))
    removed, _ = leace_map(features, values, shrinkage=0.0)
    center = features.mean(0)
    ours = features - (features - center) @ removed
    assert (ours - fitter.eraser(features)).abs().max() < 1e-6


def test_wrong_uses_are_refused(clip: Clip, images: HeadContributions) -> None:
    with pytest.raises(UsageError, match="'Emotion'"):
        remove_heads(images, (), "Emotion")
    with pytest.raises(UsageError, match=r"\(9, 0\)"):
        remove_heads(images, ((9, 0),))
    with pytest.raises(UsageError, match=r"\b1\b.*\b3\b"):
        remove_span(images, torch.ones(3, 12), "Color")
    with pytest.raises(UsageError, match="Color"):
        remove_examples(images, torch.randn(4, 12), torch.zeros(4).long(), "Color")
    with pytest.raises(UsageError, match=r"12.*\b5"):
        clip.with_correction(Correction(torch.eye(5), torch.zeros(5)))
    with pytest.raises(UsageError, match=r"7.*2"):
        clip.with_correction(Correction(torch.eye(12), torch.zeros(12), ((2, 7),)))
    with pytest.raises(UsageError, match="finite"):
        Correction(torch.eye(5) * float("nan"), torch.zeros(5))
