"""alpha and beta of Tip-Adapter, chosen by classifying each training image by the keys of the others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from tiny import images, tiny_clip

from dear.errors import UsageError
from dear.methods import build_method
from dear.methods.frozen import Batch
from dear.methods.tip_adapter import ALPHAS, BETAS, TipAdapterConfig, choose_votes

NAMES = ["cat", "dog", "newt"]


def training(count: int = 10) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys that say something about the labels [n], and texts that say something else."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(count) % 3
    keys = torch.eye(3, 8).double()[labels] + 0.6 * torch.randn(count, 8, generator=generator).double()
    return F.normalize(keys, dim=1), labels, torch.randn(count, 3, generator=generator).double()


@pytest.mark.parametrize("rows", [range(10), [*range(10), 0, 0, 4]], ids=["distinct", "copies"])
def test_the_choice_is_the_best_by_leaving_each_image_out(rows: Sequence[int]) -> None:
    """In plain loops; ten images, four of the first class, and copies of them."""
    keys, labels, zero_shot = (tensor[list(rows)] for tensor in training())
    best = None
    for beta in BETAS:
        for share in ALPHAS:
            right, loss = 0, 0.0
            for i in range(len(rows)):
                logits = zero_shot[i].clone()
                for c in range(3):
                    others = [j for j, row in enumerate(rows) if row != rows[i] and int(labels[j]) == c]
                    votes = sum(float(torch.exp(-beta * (1 - keys[i] @ keys[j]))) for j in others)
                    images_of_class = int((labels == c).sum())
                    logits[c] += 50.0 * share * votes * images_of_class / len(others)
                right += int(logits.argmax()) == int(labels[i])
                loss += float(F.cross_entropy(logits[None], labels[i : i + 1]))
            if best is None or (right, -loss) > best[0]:
                best = ((right, -loss), 50.0 * share, beta)
    assert choose_votes(keys, labels, zero_shot, 50.0, TipAdapterConfig()) == pytest.approx(best[1:])


def test_an_image_whose_others_are_copies_is_left_out() -> None:
    keys, labels, zero_shot = (tensor[[0, 1, 2, 0, 1, 2]] for tensor in training())
    assert choose_votes(keys, labels, zero_shot, 50.0, TipAdapterConfig()) == (50.0, 1.0)


def test_values_that_are_set_are_used_as_they_are() -> None:
    keys, labels, zero_shot = training()
    assert choose_votes(keys, labels, zero_shot, 50.0, TipAdapterConfig(alpha=3.0))[0] == 3.0
    assert choose_votes(keys, labels, zero_shot, 50.0, TipAdapterConfig(beta=0.5))[1] == 0.5
    assert choose_votes(keys, labels, zero_shot, 50.0, TipAdapterConfig(alpha=0.0, beta=7.0)) == (0.0, 7.0)


def test_one_image_per_class_takes_fixed_values() -> None:
    keys, labels, zero_shot = (tensor[:3] for tensor in training())
    assert choose_votes(keys, labels, zero_shot, 50.0, TipAdapterConfig()) == (50.0, 1.0)
    assert choose_votes(keys, labels, zero_shot, 50.0, TipAdapterConfig(beta=4.0)) == (50.0, 4.0)


@pytest.mark.parametrize("name", ["tip-adapter", "tip-adapter-f"])
def test_the_choice_is_saved_and_settled(name: str) -> None:
    method = build_method(name, tiny_clip(), NAMES, views=0)
    assert method.settled_config() == method.config
    labels = torch.tensor([2, 0, 1, 1, 0, 2])
    method.prepare(lambda augment: iter([Batch(images(6, seed=3), labels)]))
    facts = method.learned_values()
    assert facts["alpha"] > 0
    assert facts["beta"] in BETAS
    settled = method.settled_config()
    assert (settled.alpha, settled.beta) == (facts["alpha"], facts["beta"])
    again = method.untrained_copy()
    again.load_adapter_state(method.adapter_state())
    assert again.learned_values() == facts
    assert torch.equal(again.logits(images()), method.logits(images()))


@pytest.mark.parametrize("option", ["alpha", "beta"])
def test_negative_values_are_refused(option: str) -> None:
    with pytest.raises(UsageError) as refusal:
        build_method("tip-adapter", tiny_clip(), NAMES, **{option: -1.0})
    assert option in str(refusal.value)
    assert "-1" in str(refusal.value)


@pytest.mark.parametrize("name", ["tip-adapter", "tip-adapter-f"])
def test_a_fold_votes_as_strongly_as_all_images(name: str) -> None:
    method = build_method(name, tiny_clip(), NAMES, views=0)
    pixels, labels = images(6, seed=3), torch.tensor([2, 0, 1, 1, 0, 2])
    method.prepare(lambda augment: iter([Batch(pixels, labels)]))
    fold = method.untrained_copy(config=method.settled_config())
    fold.prepare(lambda augment: iter([Batch(pixels[:3], labels[:3])]))
    assert float(fold.alpha) == pytest.approx(2 * float(method.alpha))
    assert fold.settled_config() == method.settled_config()
    explicit = build_method(name, tiny_clip(), NAMES, views=0, alpha=3.0, beta=1.0, images=4.0)
    explicit.prepare(lambda augment: iter([Batch(pixels, labels)]))
    assert float(explicit.alpha) == pytest.approx(6.0)
