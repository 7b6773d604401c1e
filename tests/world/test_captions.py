"""Captions: tensors equal tokenized sentences, and truth equals a plain reading of the scene."""

from __future__ import annotations

import pytest
import torch

from dear import world
from dear.utils.byte_pairs import encode
from dear.world import factors as F
from dear.world.captions import BOT, EOT, LENGTH
from dear.world.tasks import TASKS
from dear.world.templates import SLOTS, TEMPLATES, WORDS


@pytest.fixture(scope="module")
def table() -> world.CaptionTable:
    return world.CaptionTable.build()


@pytest.fixture(scope="module")
def batch(table: world.CaptionTable) -> tuple[world.Scenes, world.Captions]:
    generator = torch.Generator().manual_seed(5)
    scenes = world.sample(3000, generator)
    return scenes, table.captions(scenes, generator)


def test_ids_are_those_of_the_sentence(
    table: world.CaptionTable, batch: tuple[world.Scenes, world.Captions]
) -> None:
    _, captions = batch
    for row in range(len(captions.ids)):
        ids = [BOT, *encode(table.text(captions, row)), EOT]
        assert captions.ids[row].tolist() == ids + [0] * (LENGTH - len(ids))


def spoken(template_row: int, values: list[int]) -> set[str]:
    """Every sentence a template may give for a scene, put together from strings alone."""
    sentences = [""]
    parts = TEMPLATES[template_row].parts
    for part in reversed(parts):  # from the end, so that an article knows what follows
        if part == "{a}":
            sentences = [("an " if s[0] in "aeiou" else "a ") + s for s in sentences]
        else:
            slot = part.strip("{}")
            options = WORDS[slot][values[SLOTS[slot]]] if part.startswith("{") else (part,)
            sentences = [f"{option} {s}" for option in options for s in sentences]
    return {s.strip().replace(" .", ".") for s in sentences}


def test_sentences_say_what_the_scene_is(
    table: world.CaptionTable, batch: tuple[world.Scenes, world.Captions]
) -> None:
    scenes, captions = batch
    values = scenes.factors()
    for row in range(400):
        template = int(captions.template[row])
        assert table.text(captions, row) in spoken(template, values[row].tolist())
        named = [f in TEMPLATES[template].factors for f in range(len(F.FACTORS))]
        assert captions.mask[row].tolist() == named


def test_true_of_is_a_plain_comparison(batch: tuple[world.Scenes, world.Captions]) -> None:
    scenes, captions = batch
    values, mask = scenes.factors()[:80], captions.mask[:80]
    table = world.matching_captions(values, values, mask)
    for image in range(80):
        for caption in range(80):
            expected = all(
                values[image, f] == values[caption, f] for f in range(len(F.FACTORS)) if mask[caption, f]
            )
            assert bool(table[image, caption]) == expected
    everything = scenes.factors()
    assert world.matching_captions(everything, everything, captions.mask).diagonal().all()


def test_no_caption_names_what_cannot_be_seen(batch: tuple[world.Scenes, world.Captions]) -> None:
    scenes, captions = batch
    assert not (captions.mask & (scenes.factors() < 0)).any()


def test_every_factor_is_named_alone_often(batch: tuple[world.Scenes, world.Captions]) -> None:
    _, captions = batch
    alone = captions.mask & (captions.mask.sum(1, keepdim=True) == 1)
    share = dict(zip(F.FACTORS, alone.float().mean(0).tolist(), strict=True))
    assert min(share[name] for name in ("color", "place", "style")) > 0.03
    assert share["subject"] > 0.1
    assert share["texture"] > 0.1
    assert share["count"] > 0.003


def test_canonical_words_and_synonyms_are_both_used(
    table: world.CaptionTable, batch: tuple[world.Scenes, world.Captions]
) -> None:
    _, captions = batch
    texts = " ".join(table.text(captions, row) for row in range(len(captions.ids))).split()
    assert texts.count("striped") > 2 * texts.count("banded") > 0
    assert texts.count("red") > texts.count("crimson") > 0


def test_same_generator_same_captions(table: world.CaptionTable) -> None:
    scenes = world.sample(64, torch.Generator().manual_seed(0))
    one = table.captions(scenes, torch.Generator().manual_seed(1))
    two = table.captions(scenes, torch.Generator().manual_seed(1))
    assert torch.equal(one.ids, two.ids)


def test_captions_teach_every_word_of_the_tasks(table: world.CaptionTable) -> None:
    taught = set(table.ids.unique().tolist())
    for task in TASKS.values():
        for name in task.classes:
            assert set(encode(task.template.replace("{}", name))) <= taught


def test_held_out_compositions_are_never_drawn_and_about_one_in_ten() -> None:
    scenes = world.sample(20_000, torch.Generator().manual_seed(9), kinds=(F.SHAPE,))
    assert not world.is_held_out(scenes).any()
    free = world.sample(20_000, torch.Generator().manual_seed(9), kinds=(F.SHAPE,), avoid_held_out=False)
    assert 0.08 < world.is_held_out(free).float().mean() < 0.12
    other = world.sample(
        5_000, torch.Generator().manual_seed(9), kinds=(F.OBJECT, F.FACE), avoid_held_out=False
    )
    assert not world.is_held_out(other).any()
    # Every single value is shown, and the sampler can always find an allowed place.
    for factor, size in (("color", 12), ("texture", 12), ("place", 12)):
        assert len(getattr(scenes, factor).unique()) == size


def test_held_out_is_a_rule_not_a_lottery() -> None:
    grid = torch.cartesian_prod(*(torch.arange(12) for _ in range(4)))
    one = torch.ones(len(grid), dtype=torch.long)
    scenes = world.Scenes(*grid.T, one, one - 1, torch.zeros(len(grid), 1))
    held = world.is_held_out(scenes)
    key = [((s * 16 + c) * 16 + t) * 16 + p for s, c, t, p in grid.tolist()]
    mixed = [(k * 40503 + 12345) % 1048573 for k in key]
    assert held.tolist() == [((m * m + 7919 * m) % 1048573) % 10 == 0 for m in mixed]
    assert not held.view(12 * 12 * 12, 12).all(1).any()
