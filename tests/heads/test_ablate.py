"""Mean-ablation, kept contributions, and images in batches."""

import pytest
import torch
from heads_oracles import tiny_clip

from dear.errors import UsageError
from dear.heads.ablate import AblationTask, layer_effects, random_heads, role_effects
from dear.heads.collect import collect_contributions
from dear.heads.contributions import decompose
from dear.heads.role import Role
from dear.heads.roles import RoleMap


def test_ablation_is_the_feature_with_the_mean_in_place(clip, images):
    parts = decompose(clip, images)
    contributions = collect_contributions(clip, images, batch_size=5)
    chosen = [(1, 0), (3, 2), (4, 1)]
    expected = parts.total().clone()
    for layer, head in chosen:
        term = parts.heads[:, layer - 1, head]
        expected += term.mean(0) - term
    torch.testing.assert_close(
        contributions.features + contributions.change(chosen), expected, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(contributions.change([]), torch.zeros_like(expected))
    with pytest.raises(UsageError, match=r"\(3, 0\)"):
        collect_contributions(clip, images, [4]).change([(3, 0)])


def test_ablating_everything_but_the_rest_leaves_only_the_rest_varying(clip, images):
    parts = decompose(clip, images)
    contributions = collect_contributions(clip, images)
    every = [(layer, head) for layer in range(1, 5) for head in range(3)]
    varying = contributions.features + contributions.change(every)
    torch.testing.assert_close(
        varying - varying.mean(0), parts.rest - parts.rest.mean(0), rtol=1e-3, atol=1e-4
    )


def planted(n=40):
    """A question that only head (4, 1) can answer: labels are the sign of its contribution along a class."""
    clip = tiny_clip(seed=3)
    pixels = torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    contributions = collect_contributions(clip, pixels)
    term = contributions.outputs[:, 3, 1] @ contributions.maps[3, 1]
    direction = torch.linalg.svd(term - term.mean(0))[2][0]
    labels = ((term - term.mean(0)) @ direction > 0).long()
    # Features without any other variation: the rest is the mean, the head's term is all that differs.
    features = term.expand_as(contributions.features).clone()
    single_head = type(contributions)(
        features - term.mean(0), contributions.outputs, contributions.maps, contributions.layers
    )
    return AblationTask(single_head, labels, torch.stack([-direction, direction])), contributions


def test_effects_show_where_the_answer_comes_from():
    task, _ = planted()
    assert task.accuracy() == 1
    assert task.accuracy([(4, 1)]) < 0.8
    table = {(layer, head): Role("mixed") for layer in (3, 4) for head in range(3)}
    table[4, 1] = Role("core", "Color")
    table[3, 0] = Role("core", "Shape")
    roles = RoleMap(table, 3)
    rows = {(row["kind"], row["concept"]): row for row in role_effects(task, roles, seeds=4)}
    assert rows["core", "Color"]["heads"] == 1
    assert rows["core", "Color"]["accuracy"] < rows["core", "Color"]["control"]
    layers = layer_effects(task)
    assert [row["layer"] for row in layers] == [1, 2, 3, 4]
    assert all(0 <= row["accuracy"] <= 1 for row in layers)


def test_random_heads_match_the_layers():
    task, _ = planted()
    heads = [(3, 0), (3, 1), (4, 2)]
    draws = random_heads(task, heads, 5)
    assert len(draws) == 5
    assert all([layer for layer, _ in draw] == [3, 3, 4] and len(set(draw)) == 3 for draw in draws)
    assert draws == random_heads(task, heads, 5)
