"""Retrieval by heads: against the world's truth and beside random heads; the query left out; sentences."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dear
from dear import world
from dear.cli import build_app
from dear.data.world_images import world_task
from dear.errors import UsageError
from dear.heads.collect import collect_contributions
from dear.heads.contributions import decompose
from dear.heads.focus import attribute_heads
from dear.heads.known_roles import known_roles
from dear.heads.neighbors import head_space, mean_overlap, precision_at
from dear.tasks.retrieve import retrieve
from dear.world import factors as F


def test_precision_on_the_worlds_truth_beside_random_heads() -> None:
    clip = dear.load("mini")
    roles = known_roles(clip)
    assert roles is not None
    scenes = world.sample(150, torch.Generator().manual_seed(5), kinds=(F.SHAPE, F.ANIMAL, F.OBJECT))
    from dear.images.views import normalize

    pixels = normalize(world.render(scenes), clip.config.mean, clip.config.std)
    contributions = collect_contributions(clip, pixels, roles.layers)
    heads = attribute_heads(roles)["Location"]
    space, _ = head_space(contributions, heads)
    by_heads = precision_at(space, scenes.place)
    by_feature = precision_at(torch.nn.functional.normalize(contributions.features, dim=1), scenes.place)
    keys = [key for key, _ in roles if key not in heads]
    other = precision_at(
        head_space(contributions, random.Random(1).sample(keys, len(heads)))[0], scenes.place
    )
    assert by_heads > 0.9
    assert by_heads > by_feature + 0.2
    assert by_heads > other + 0.2
    # The rows are the contributions of the heads, centered, at unit length.
    parts = decompose(clip, pixels[:3], roles.layers)
    rows = torch.cat([parts.heads[:, roles.layers.index(layer), head] for layer, head in heads], dim=1)
    center = head_space(contributions, heads)[1]
    assert torch.allclose(torch.nn.functional.normalize(rows - center, dim=1), space[:3], atol=1e-4)


def test_the_query_is_left_out_and_lists_differ(tmp_path: Path) -> None:
    images = world_task("shortcut-none", "test").subset(range(0, 720, 10))
    for index in range(len(images)):
        images.image(index).save(tmp_path / f"{index:03d}.png")
    query = str(tmp_path / "007.png")
    matches = retrieve(query=query, gallery=tmp_path, backbone="mini", top=5)
    assert {one.attribute for one in matches} >= {"Location", "Color"}
    for one in matches:
        assert len(one.keys) == 5
        assert not any(key.endswith("007.png") for key in one.keys)
    place = next(one for one in matches if one.attribute == "Location")
    assert images.groups is not None
    assert sum(images.groups[index] == images.groups[7] for index in place.indices) >= 4
    assert matches.notice is None
    words = ["retrieve", "--backbone", "mini", "--query", query, "--gallery", str(tmp_path), "--top", "5"]
    result = CliRunner().invoke(build_app(), [*words, "--attribute", "location", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed["by"] == "heads"
    assert [row["image"] for row in printed["attributes"]["Location"]] == list(place.keys)
    with pytest.raises(UsageError, match="'smell'"):
        retrieve(query=query, gallery=tmp_path, backbone="mini", attribute="smell")
    error = CliRunner().invoke(build_app(), ["retrieve", *words[3:]]).exception
    assert isinstance(error, UsageError)
    assert error.hint == "backbone"


def test_lists_that_share_images() -> None:
    assert mean_overlap({"a": [1, 2], "b": [1, 2], "c": [3, 4]}) == pytest.approx(1 / 3)
    assert mean_overlap({"a": [1]}) == 0.0
