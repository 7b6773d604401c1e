"""Attribute-conditioned retrieval: ranks by cosine in one attribute's space, and its contact sheets."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from PIL import Image
from tiny import Colors, mixed_roles, tiny_clip, token_ids

from dear.errors import DataError, UsageError
from dear.heads.roles import RoleMap
from dear.methods import DeAR, ZeroShot
from dear.tasks.retrieve import has_attribute_heads, retrieve

CLIP = tiny_clip(dtype=torch.float32)


@pytest.fixture
def model() -> DeAR:
    return DeAR(CLIP, ["a", "b", "c"], roles=mixed_roles(), ids=token_ids())


def test_ranking_is_cosine_in_the_attributes_space(model: DeAR) -> None:
    images = Colors()
    query = Colors(seed=4).image(0)
    found = {
        one.attribute: one for one in retrieve(model, query=query, gallery=images, by="features", top=12)
    }
    assert list(found) == list(model.attributes)
    gallery = torch.stack([CLIP.preprocess(images.image(i)) for i in range(12)])
    features = model.attribute_features(gallery).double().numpy()
    own = model.attribute_features(CLIP.preprocess(query)[None]).double().numpy()[0]
    for number, attribute in enumerate(model.attributes):
        a, b = features[:, number], own[number]
        cosines = a @ b / np.linalg.norm(a, axis=1) / np.linalg.norm(b)
        assert np.allclose(np.sort(cosines)[::-1], found[attribute].similarity, atol=1e-5)
        assert np.allclose(cosines[list(found[attribute].indices)], found[attribute].similarity, atol=1e-5)


def test_a_image_is_most_like_itself_and_sheets_are_written(model: DeAR, tmp_path: Path) -> None:
    images = Colors()
    folder = tmp_path / "gallery" / "some" / "where"
    folder.mkdir(parents=True)
    for i in range(len(images)):
        images.image(i).save(folder / f"{i:02d}.png")
    query = folder / "03.png"
    where = {"by": "features", "out": tmp_path / "sheets"}
    found = retrieve(model, query=query, gallery=tmp_path / "gallery", attribute="COLOR", top=3, **where)
    assert [one.attribute for one in found] == ["Color"]
    assert found[0].keys[0].endswith("03.png")
    assert found[0].similarity[0] == pytest.approx(1, abs=1e-5)
    assert [p.name for p in (tmp_path / "sheets").iterdir()] == ["color.png"]
    with Image.open(tmp_path / "sheets/color.png") as sheet:
        assert sheet.format == "PNG"
        assert sheet.width > 4 * 128


def test_what_cannot_be_retrieved_is_said(model: DeAR, tmp_path: Path) -> None:
    query = Colors().image(0)
    with pytest.raises(UsageError, match="DeAR"):
        retrieve(ZeroShot(CLIP, ["a"], ids=token_ids((1,))), query=query, gallery=Colors(), by="features")
    with pytest.raises(UsageError, match="'smell'"):
        retrieve(model, query=query, gallery=Colors(), by="features", attribute="smell")
    with pytest.raises(DataError, match=re.escape(str(tmp_path))):
        retrieve(model, query=query, gallery=tmp_path, by="features")


def poor_roles() -> RoleMap:
    """A role map that is close to chance."""
    known = mixed_roles()
    chance = {"bits": 1.2, "rotated": 1.22, "deviation": 0.04, "rotations": 8}
    return structs.replace(known, evidence={**known.evidence, "information": chance})


def test_a_run_whose_map_is_close_to_chance_states_it_once() -> None:
    images, roles = Colors(), poor_roles()
    model = DeAR(CLIP, ["a", "b", "c"], roles=roles, ids=token_ids())
    found = retrieve(model, query=images.image(0), gallery=images, top=2)
    assert found.by == "features"
    assert found.notice is not None
    assert found.notice.count(roles.caveat()) == 1


def test_attributes_that_retrieve_the_same_images_are_reported(model: DeAR) -> None:
    images = Colors()
    for top, reported in ((2, True), (len(images), False)):  # a list of all images shares them by chance
        found = retrieve(model, query=images.image(0), gallery=images, by="features", top=top)
        lists = [set(match.indices) for match in found]
        assert all(one == lists[0] for one in lists)
        assert (found.notice is not None) == reported


def test_a_map_close_to_chance_is_not_searched_by(tmp_path: Path) -> None:
    poor = poor_roles()
    with pytest.raises(UsageError) as refused:
        retrieve(query=Colors().image(0), gallery=tmp_path, backbone=CLIP, roles=poor)
    assert poor.caveat() in str(refused.value)
    assert not has_attribute_heads(CLIP, poor)
