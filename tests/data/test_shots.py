"""Few-shot draws and splits depend on names alone, and can be handed on."""

import hashlib
import json
import random
from pathlib import Path

import pytest
import torch

from dear.data import FileImages, draw_shots, few_shot, halves, read_draw
from dear.data.shots import hold_out
from dear.errors import DataError


def images(order=None, name="set", classes=("cat", "dog", "emu"), each=12):
    rows = [(f"{c}/{n}.png", label) for label, c in enumerate(classes) for n in range(each)]
    if order is not None:
        random.Random(order).shuffle(rows)
    return FileImages(
        name, classes, "a {}.", Path("nowhere"), tuple(p for p, _ in rows), torch.tensor([x for _, x in rows])
    )


def keys(data, shots, seed):
    return [data.key(index) for index in draw_shots(data, shots, seed)]


def test_a_draw_is_frozen():
    """The draw of a name and seed must never change: results of others depend on it."""
    expected = []
    for name in ("cat", "dog", "emu"):
        ranked = sorted(
            (hashlib.sha256(f"shots\0set\0{name}\x001\0{name}/{n}.png".encode()).digest(), f"{name}/{n}.png")
            for n in range(12)
        )
        expected += [key for _, key in ranked[:2]]
    assert keys(images(), 2, 1) == expected
    assert expected[:3] == ["cat/9.png", "cat/3.png", "dog/11.png"]


def test_a_draw_does_not_depend_on_order_or_other_classes():
    expected = keys(images(), 4, 1)
    assert len(expected) == len(set(expected)) == 12
    assert keys(images(order=5), 4, 1) == expected
    assert keys(images(classes=("cat",)), 4, 1) == expected[:4]


def test_fewer_shots_are_a_part_of_more():
    for seed in (1, 2, 3):
        more = keys(images(), 8, seed)
        for shots in (1, 2, 4):
            assert set(keys(images(), shots, seed)) < set(more)


def test_seed_and_name_change_the_draw():
    draws = {tuple(keys(images(), 4, seed)) for seed in range(10)}
    assert len(draws) == 10
    assert keys(images(name="other"), 4, 1) != keys(images(), 4, 1)


def test_every_image_is_equally_likely():
    count = dict.fromkeys(range(12), 0)
    data = images(classes=("cat",))
    for seed in range(600):
        for index in draw_shots(data, 3, seed):
            count[index] += 1
    assert all(100 < times < 200 for times in count.values())  # 150 expected, deviation about 10.6


def test_a_class_with_fewer_gives_all_and_one_with_none_is_refused():
    assert len(draw_shots(images(each=3), 16, 1)) == 9
    assert few_shot(images(), 2, 1).labels.tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(DataError, match="'emu'"):
        draw_shots(images().subset(range(24)), 1, 1)
    with pytest.raises(DataError, match=r"\b0\b"):
        draw_shots(images(), 0, 1)


def test_draws_are_read(tmp_path):
    data = images()
    drawn = draw_shots(data, 2, 7)
    lines = [{"path": data.key(i), "class": data.classes[int(data.labels[i])]} for i in drawn]
    (tmp_path / "draw.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_draw(tmp_path / "draw.jsonl", data) == drawn
    shuffled = images(order=1)
    assert [shuffled.key(i) for i in read_draw(tmp_path / "draw.jsonl", shuffled)] == [
        data.key(i) for i in drawn
    ]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"path": "cat/99.png"}', "line 1: .*'cat/99.png'"),
        ('{"path": "cat/1.png"}\n{"path": "cat/1.png"}', "line 2: .*'cat/1.png'"),
        ('{"path": "cat/1.png", "class": "dog"}', "'cat'.*'dog'"),
        ('["cat/1.png"]', "line 1"),
        ("nonsense", "line 1"),
        ("", r"draw\.jsonl"),
    ],
)
def test_draws_that_do_not_fit_are_refused(tmp_path, text, match):
    (tmp_path / "draw.jsonl").write_text(text)
    with pytest.raises(DataError, match=match):
        read_draw(tmp_path / "draw.jsonl", images())
    with pytest.raises(DataError, match=r"absent\.jsonl"):
        read_draw(tmp_path / "absent.jsonl", images())


def test_halves():
    assert halves(range(7)) == ((0, 1, 2, 3), (4, 5, 6))
    assert halves(["a"]) == (("a",), ())


def test_holding_out_is_stable_and_never_empties_a_group():
    names = [f"cat/{n}.jpg" for n in range(50)]
    held = hold_out(names, ["cat"] * 50)
    assert sum(held) == 10
    reversed_held = hold_out(names[::-1], ["cat"] * 50)
    assert reversed_held == held[::-1]
    for count in (2, 3, 4, 5, 6):
        assert 1 <= sum(hold_out(names[:count], [0] * count)) < count
    assert hold_out(["x"], [0]) == [False]
    assert hold_out(["cafe\u0301/1", "cafe/2"], [0, 0]) == hold_out(["caf\u00e9/1", "cafe/2"], [0, 0])
