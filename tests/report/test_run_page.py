"""The page about an adapted model: numbers against plain counting, nothing loaded, nothing unescaped."""

import re

import pytest
import torch
from tiny import Colors, mixed_roles, tiny_clip

from dear.errors import DataError
from dear.methods import DeAR, Purify, ZeroShot
from dear.report import figures
from dear.report.page import thumbnail
from dear.runs.recipe import Recipe
from dear.tasks.run_report.examine import examine
from dear.tasks.run_report.page import run_page
from dear.train.run import train

EVIL = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def clip():
    return tiny_clip(dtype=torch.float32)


@pytest.fixture(scope="module")
def test_set():
    images = Colors(classes=4, each=6, seed=3)
    images.name = f"colors {EVIL}"
    return images


@pytest.fixture(scope="module")
def model(clip):
    model = DeAR(clip, ["red", "green", "blue"], roles=mixed_roles())
    train(model, Colors(classes=3, each=8, seed=1), Recipe(epochs=4, warmup_epochs=0, batch=8))
    return model


@pytest.fixture(scope="module")
def facts(model, test_set):
    return examine(model, test_set)


def test_numbers_equal_plain_counting(model, clip, test_set, facts):
    known = [i for i in range(24) if int(test_set.labels[i]) < 3]
    batch = torch.stack([clip.preprocess(test_set.image(i)) for i in known])
    labels = [int(test_set.labels[i]) for i in known]
    now = model.logits(batch).argmax(-1).tolist()
    then = ZeroShot(clip, model.classes).logits(batch).argmax(-1).tolist()
    right = [a == b for a, b in zip(now, labels, strict=True)]
    seen = facts.trained
    assert seen.accuracies()["fused"] == pytest.approx(sum(right) / len(right))
    assert seen.accuracies()["zero-shot"] == pytest.approx(
        sum(a == b for a, b in zip(then, labels, strict=True)) / len(labels)
    )
    counted = {
        "kept": [i for i in range(18) if now[i] == labels[i] == then[i]],
        "fixed": [i for i in range(18) if now[i] == labels[i] != then[i]],
        "broken": [i for i in range(18) if then[i] == labels[i] != now[i]],
        "missed": [i for i in range(18) if now[i] != labels[i] != then[i]],
    }
    assert seen.changes() == counted
    table = seen.confusion()
    for truth in range(3):
        for answer in range(3):
            both = sum(a == answer and b == truth for a, b in zip(now, labels, strict=True))
            assert int(table[truth, answer]) == both


def test_unseen_classes_are_answered_alone_and_among_all(model, clip, test_set, facts):
    last = [i for i in range(24) if int(test_set.labels[i]) == 3]
    batch = torch.stack([clip.preprocess(test_set.image(i)) for i in last])
    assert facts.new.alone.adapted.classes == ("grey",)
    assert facts.new.alone.accuracies()["fused"] == 1.0
    every = model.with_classes(["red", "green", "blue", "grey"])
    taken = (every.logits(batch, "fused").argmax(-1) < 3).double().mean()
    assert facts.new.taken_for_trained()["fused"] == pytest.approx(float(taken))
    assert set(facts.new.taken_for_trained()) == {"zero-shot", "fused", "decoupled"}


def test_most_wrong_are_wrong_and_ordered_by_confidence(facts):
    rows = facts.trained.most_wrong(50)
    sure = facts.trained.adapted.confidence["fused"][rows].tolist()
    assert sure == sorted(sure, reverse=True)
    assert all(facts.trained.answers[row] != facts.trained.labels[row] for row in rows)
    assert len(rows) == int((facts.trained.answers != facts.trained.labels).sum())


def test_the_page_loads_nothing_and_escapes_everything(clip, test_set):
    names = ("red", EVIL, 'q"uote & <b>bold</b>')
    hostile = test_set.subset(range(24))
    hostile.classes = (*names, "grey")
    model = DeAR(clip, names, roles=mixed_roles())
    page = run_page(examine(model, hostile), log=[{"step": 1, "loss": 2.0, EVIL: 1.0}], notes={EVIL: EVIL})
    own = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.S)  # plotly's program and figures
    assert "alert(" not in re.sub(r"&lt;script&gt;alert\(", "", own)
    assert "<b>bold" not in page.split("<main>")[1].split("<script")[0]
    for script in re.findall(r"Plotly\.newPlot\(.*?</script>", page, flags=re.S):
        assert "<b>bold" not in script
        assert "<script>alert" not in script
    assert "default-src 'none'" in page
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="(?!data:)', own)
    assert page.count("plotly.js v") <= 2
    assert 'lang="en"' in page
    assert all('alt="' in tag for tag in re.findall(r"<img[^>]*>", own))


def test_sections_are_there_and_say_the_numbers(facts):
    page = run_page(facts, log=[{"step": 1, "loss": 2.0}])
    for heading in (
        "Accuracy of each class",
        "Which mode to use",
        "What got better and what got worse",
        "New classes",
        "Which classes are confused",
        "Wrong answers with the highest confidence",
        "Weights of the decision",
        "Training",
    ):
        assert f"<h2>{heading}</h2>" in page
    assert f"{100 * facts.trained.accuracies()['fused']:.1f}%" in page


def test_without_unseen_classes_the_page_says_so(model):
    facts = examine(model, Colors(classes=3, each=2, seed=8))
    assert facts.new is None
    page = run_page(facts)
    assert facts.why_no_new in page
    assert "<h2>New classes</h2>" not in page


def test_another_set_can_stand_for_the_unseen(model):
    other = Colors(classes=2, each=3, seed=4)
    other.classes = ("pink", "teal")
    facts = examine(model, Colors(classes=3, each=2, seed=8), other=other)
    assert facts.new.alone.adapted.classes == ("pink", "teal")
    assert facts.new.trained == 3


def test_images_of_other_classes_are_refused(model):
    other = Colors(classes=2, each=2)
    other.classes = ("pink", "teal")
    with pytest.raises(DataError, match="classes"):
        examine(model, other)


def test_progress_reaches_its_end_once(model, test_set):
    told = []
    examine(model, test_set, progress=lambda stage, done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1]


def test_many_classes_stay_readable():
    names = [f"class number {n} with a rather long name that goes on" for n in range(300)]
    values = {name: (n % 100) / 100 for n, name in enumerate(names)}
    figure = figures.class_accuracy(dict.fromkeys(names, 0.5), values)
    assert figure.layout.height < 1500
    rows = figure.data[-1].y
    assert len(set(rows)) == len(rows) == 40
    table = torch.eye(300, dtype=torch.long) * 5
    table[7, 3] = 4
    shown = figures.confusion(table, names).data[0]
    assert len(shown.x) == 30
    assert any("number 7 " in row for row in shown.y)


def test_thumbnails_are_small_whatever_the_image():
    from PIL import Image

    assert len(thumbnail(Image.new("RGB", (4000, 3000), (10, 200, 30)))) < 20_000
    assert thumbnail(Image.new("LA", (3, 2))).startswith("data:image/jpeg;base64,")


def test_purified_heads_get_their_image(clip, test_set):
    purified = Purify(clip, ["red", "green", "blue"])
    train(purified, Colors(classes=3, each=4, domains=2), Recipe(epochs=2, batch=6))
    page = run_page(examine(purified, test_set))
    assert "Which heads were strengthened" in page
    assert "head 3" in page
    assert "epoch " in page


def test_a_frozen_model_has_no_trained_classes(clip, test_set):
    frozen = ZeroShot(clip, ["red", "green", "blue"])
    page = run_page(examine(frozen, test_set))
    assert "trained class" not in page
    assert "Nothing was trained" in page
    assert "decoupled" not in page


def test_only_modes_of_the_method_are_explained(facts):
    page = run_page(facts)
    assert "<dt>decoupled</dt>" in page
    assert "<dt>auto</dt>" not in page
