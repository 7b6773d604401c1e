"""Six rivals against independent versions of their published formulas: forward, loss, gradients, one step."""

from __future__ import annotations

import literal_rivals
import pytest
import torch
from tiny import images, tiny_clip

from dear.methods import Method, build_method
from dear.runs.recipe import Recipe
from dear.train.loop import optimizer_of

NAMES = ("red cat", "dog", "very old newt")
LABELS = torch.tensor([0, 2, 1, 2])
TEMPLATES = ("a photo of a {}.", "one sketch of the {}.", "{}")

# name: (options, the literal version's options, the prompts it reads)
CASES = {
    "coop": ({}, {}, "a photo of a {}."),
    "coop 16": ({"context": 16, "words": ""}, {}, "X X X X X X X X X X X X X X X X {}."),
    "maple": ({}, {}, "a photo of a {}."),
    "maple deep": ({"depth": 5, "context": 4}, {}, "a photo of a {}."),
    "maple shallow": ({"depth": 1, "context": 1}, {}, "a photo of a {}."),
    "promptsrc": ({"templates": TEMPLATES}, {"templates": TEMPLATES}, "a photo of a {}."),
    "mmrl": ({"width": 16}, {"alpha": 0.7, "weight": 1.0}, "a photo of a {}."),
    "mmrl other": (
        {"width": 9, "alpha": 0.4, "weight": 6.0, "first_layer": 2, "tokens": 3},
        {"alpha": 0.4, "weight": 6.0},
        "a photo of a {}.",
    ),
    "mmrlpp": ({"width": 16}, {"alpha": 0.7, "weight": 1.0, "beta": 0.9}, "a photo of a {}."),
    "mmrlpp other": (
        {"width": 9, "beta": 0.3, "rank": 2, "projection_rank": 5, "first_layer": 5},
        {"alpha": 0.7, "weight": 1.0, "beta": 0.3},
        "a photo of a {}.",
    ),
    "clip-lora": ({"dropout": 0.0}, {"rank": 2}, "a photo of a {}."),
    "clip-lora rank 5": ({"dropout": 0.0, "rank": 5}, {"rank": 5}, "a photo of a {}."),
}


def build(case: str, activation: str = "quick_gelu") -> Method:
    name = case.split()[0]
    method = build_method(name, tiny_clip(activation=activation), NAMES, **CASES[case][0])
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():  # away from zeros, which hide mistakes
        for p in method.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1)
    return method


def literal(method: Method, case: str, pixels: torch.Tensor):
    name = case.split()[0]
    _, options, sentence = CASES[case]
    tokenize = method.clip.tokenize
    options = dict(options)
    if "templates" in options:
        options["templates"] = [tokenize([t.replace("{}", n) for n in NAMES]) for t in options["templates"]]
    ids = tokenize([sentence.replace("{}", n) for n in NAMES])
    learned = {n: p.detach().clone().requires_grad_() for n, p in method.named_parameters()}
    run = getattr(literal_rivals, name.replace("-", "_"))
    weights = method.clip.state_dict()
    logits, loss = run(weights, method.clip.config, learned, ids, pixels, LABELS, options)
    loss.backward()
    return learned, logits, loss


@pytest.mark.parametrize("case", CASES)
def test_forward_loss_gradients_and_one_step(case: str) -> None:
    method, pixels = build(case, "gelu" if "other" in case else "quick_gelu"), images()
    learned, logits, loss = literal(method, case, pixels)
    for mode, expected in logits.items():
        torch.testing.assert_close(method.logits(pixels, mode), expected.detach(), rtol=1e-9, atol=1e-9)
    assert set(logits) == set(method.modes) - {"auto"}  # auto takes each class from one of the others
    recipe = Recipe.of(method)
    optimizer = optimizer_of(list(method.parameters()), recipe)
    ours = method.loss(pixels, LABELS)
    torch.testing.assert_close(ours.total, loss, rtol=1e-10, atol=1e-12)
    method.backward(ours, lambda x: x)
    for name, p in method.named_parameters():
        torch.testing.assert_close(p.grad, learned[name].grad, rtol=1e-7, atol=1e-11, msg=name)
    optimizer.step()
    step = literal_rivals.sgd if recipe.optimizer == "sgd" else literal_rivals.adamw
    for name, p in method.named_parameters():
        old = learned[name]
        expected = step(old.detach(), old.grad, recipe.lr, recipe.weight_decay)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-9, msg=name)


def test_promptsrc_aggregates_its_prompts_over_epochs() -> None:
    method = build("promptsrc")
    epoch_prompts, epochs = [], 5
    for epoch in range(1, epochs + 1):
        with torch.no_grad():
            for p in method.parameters():
                p.add_(1.0)
        epoch_prompts.append([p.detach().clone() for p in method.parameters()])
        method.after_epoch(epoch, epochs)
    method.finish()
    gauss = [2.718281828459045 ** (-0.5 * ((e - 3.75) / 0.25) ** 2) for e in range(1, epochs + 1)]
    for i, p in enumerate(method.parameters()):
        expected = sum(g * k[i] for g, k in zip(gauss, epoch_prompts, strict=True)) / sum(gauss)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-10, atol=1e-10)
    assert all(b.numel() == 0 for b in method.buffers())
    assert abs(sum(method.epoch_weight(e, 20) for e in range(1, 21)) - 1) < 1e-12
    assert max(range(1, 21), key=lambda e: method.epoch_weight(e, 20)) == 15
