"""How steady a role map is: bootstrap over images, chance, warnings, and the same after an interruption."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import Colors, tiny_clip

from dear.data.batches import over_pixels
from dear.data.images import unlabeled_images
from dear.errors import DearError, RoleError
from dear.heads.contributions import head_maps, head_outputs
from dear.heads.corpus import Corpus
from dear.heads.corpus.load import Phrase
from dear.heads.discover import discover_roles
from dear.heads.moments import Moments, SavedMoments
from dear.heads.role import Role
from dear.heads.roles import RoleMap
from dear.heads.stability import BLOCKS, BlockMoments, bootstrap, measure_stability, role_map_warnings

MAPS = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))


def outputs(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 2, 3, 4, generator=torch.Generator().manual_seed(seed))


def blocks(*sizes: int) -> BlockMoments:
    moments = BlockMoments(MAPS, (1, 2))
    for seed, size in enumerate(sizes):
        moments.add(outputs(size, seed))
    return moments


def test_images_are_dealt_to_blocks_whatever_the_batches() -> None:
    one = BlockMoments(MAPS, (1, 2))
    everything = torch.cat([outputs(7, 0), outputs(16, 1)])
    one.add(everything)
    two = blocks(7, 16)
    for number in range(BLOCKS):
        rows = everything[number::BLOCKS].double()
        for block in (one.blocks[number], two.blocks[number]):
            assert block.count == len(rows)
            torch.testing.assert_close(block.total, rows.sum(0))
            torch.testing.assert_close(block.square, torch.einsum("blhi,blhj->lhij", rows, rows))
    torch.testing.assert_close(two.total, everything.double().sum(0))


def test_a_replicate_is_a_sum_of_blocks() -> None:
    import random

    moments = blocks(40)
    drawn = random.Random(3).choices(range(BLOCKS), k=BLOCKS)
    rows = torch.cat([outputs(40)[number::BLOCKS] for number in drawn]).double()
    replicate = moments.replicate(3)
    assert replicate.count == len(rows)
    torch.testing.assert_close(replicate.total, rows.sum(0))


def test_agreement_and_chance_by_hand() -> None:
    base = {
        (1, 0): Role("core", "Color"),
        (1, 1): Role("core", "Shape"),
        (1, 2): Role("mixed"),
        (1, 3): Role("mixed"),
    }
    other = {**base, (1, 0): Role("core", "Shape"), (1, 3): Role("generalization", "Style")}
    stability = measure_stability(base, [base, other])
    assert stability.heads == {(1, 0): 0.5, (1, 1): 1.0, (1, 2): 1.0, (1, 3): 0.5}
    assert stability.share == 0.75
    # base against base: (1 + 1 + 4) / 16; base against other: Color 1x0, Shape 1x2, mixed 2x1 -> 4 / 16
    assert stability.chance == pytest.approx((6 / 16 + 4 / 16) / 2)


def test_a_rule_that_looks_at_nothing_is_steady_and_one_of_noise_is_not() -> None:
    import random

    seen = blocks(60)
    fixed = {(1, h): Role("core", "Color") for h in range(3)}
    assert bootstrap(seen, lambda moments: fixed, fixed).share == 1.0
    rng = random.Random(0)
    names = ("Color", "Shape", "Texture", "Object", "Location")

    def noise(moments: Moments) -> dict[tuple[int, int], Role]:
        return {(1, h): Role("core", rng.choice(names)) for h in range(3)}

    stability = bootstrap(seen, noise, noise(seen), replicates=200)
    assert abs(stability.share - stability.chance) < 0.12
    assert bootstrap(blocks(5), lambda moments: fixed, fixed) is None


def test_warnings() -> None:
    def roles(kinds: list[str], **evidence: object) -> RoleMap:
        table = {(1, h): Role(kind, "Color" if kind == "core" else None) for h, kind in enumerate(kinds)}
        return RoleMap(table, len(kinds), evidence=evidence)

    good = {"share": 0.9, "chance": 0.3}
    assert role_map_warnings(roles(["core", "generalization"], stability=good, image_count=5000)) == []
    assert len(role_map_warnings(roles(["core", "mixed"], stability=good))) == 1
    assert len(role_map_warnings(roles(["mixed", "mixed"], stability=good))) == 2
    information = {"bits": 0.4, "rotated": 0.39, "deviation": 0.02, "rotations": 8}
    poor = roles(["core", "generalization"], information=information, stability=good, image_count=5000)
    assert role_map_warnings(poor) == [poor.caveat()]
    clear = roles(["core", "generalization"], information=information | {"bits": 0.46}, stability=good)
    assert (clear.is_informative(), clear.caveat(), role_map_warnings(clear)) == (True, "", [])
    few = role_map_warnings(roles(["core", "generalization"], stability={"share": 0.35}, image_count=160))
    assert "160 images" in few[0]
    shaky = role_map_warnings(roles(["core", "generalization"], stability={"share": 0.6, "chance": 0.3}))
    assert "60%" in shaky[0]


def test_discovery_skips_damaged_images_also_when_it_resumes(tmp_path: Path) -> None:
    clip = tiny_clip(dtype=torch.float32)
    files = [tmp_path / f"{number}.png" for number in range(12)]
    for number, file in enumerate(files):
        noise = np.random.default_rng(number).integers(0, 256, (30, 40, 3), np.uint8)
        Image.fromarray(noise).save(file)
    words = Corpus("few", (Phrase("red", "Color"), Phrase("blue sea", "Location"), Phrase("round", "Shape")))
    settings = {"corpus": words, "concepts": "tags", "phrases": 2, "batch_size": 4}
    uninterrupted = discover_roles(clip, unlabeled_images([*files[:2], *files[3:]]), **settings)
    files[2].write_bytes(b"no image")
    with pytest.raises(DearError, match=r"2\.png"):
        discover_roles(clip, unlabeled_images(files), **settings)
    skipped = discover_roles(clip, unlabeled_images(files), **settings, unreadable="skip")
    assert skipped.evidence["image_count"] == 11
    assert skipped.evidence["unreadable_images"] == 1
    assert skipped.table.keys() == uninterrupted.table.keys()
    # The third image, which is damaged, is done: the rest begins at the fifth.
    images, layers = unlabeled_images(files), clip.config.vision.last_third
    saved = SavedMoments(tmp_path / "k", clip, images, layers, 4)
    moments = BlockMoments(head_maps(clip, layers), layers)
    pixels, _ = over_pixels(images, lambda batch: batch, clip, unreadable="skip", batch=4)
    moments.add(head_outputs(clip, pixels[0], layers).outputs)
    saved.save(moments, 4)
    again = discover_roles(clip, images, **settings, unreadable="skip", keep=tmp_path / "k")
    assert again.evidence == skipped.evidence


def test_discovery_reports_stability_and_resumes_to_the_same(tmp_path: Path) -> None:
    clip, images = tiny_clip(dtype=torch.float32), Colors(each=10)
    tagged = {"red": "Color", "a green thing": "Color", "blue sea": "Location", "round": "Shape"}
    words = Corpus("few", tuple(Phrase(text, concept) for text, concept in tagged.items()))
    settings = {"corpus": words, "concepts": "tags", "phrases": 2, "batch_size": 7}
    uninterrupted = discover_roles(clip, images, **settings)
    stability = uninterrupted.evidence["stability"]
    assert 0 <= stability["share"] <= 1
    assert stability["replicates"] == 10
    assert "stability" not in discover_roles(clip, images, **settings, replicates=0).evidence
    with pytest.raises(RoleError, match="replicates"):
        discover_roles(clip, images, **settings, replicates=-1)
    saved = SavedMoments(tmp_path / "k", clip, images, clip.config.vision.last_third, 7)
    layers = clip.config.vision.last_third
    half = BlockMoments(head_maps(clip, layers), layers)
    over_pixels(
        images.subset(range(14)),
        lambda batch: half.add(head_outputs(clip, batch, layers).outputs),
        clip,
        batch=7,
    )
    saved.save(half, 14)
    again = discover_roles(clip, images, **settings, keep=tmp_path / "k")
    assert again.evidence == uninterrupted.evidence
    assert not (tmp_path / "k").exists()
