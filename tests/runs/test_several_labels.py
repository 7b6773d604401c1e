"""Several labels per image, compared with scikit-learn: learning, thresholds, metrics, and every surface."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, f1_score
from sklearn.multiclass import OneVsRestClassifier

import dear
from dear.calibration.several_labels import best_thresholds, fit_sigmoids
from dear.data.check import class_counts, describe_balance
from dear.data.images import main_labels
from dear.errors import DataError, DearError, InputError, UsageError
from dear.methods.logistic import fit_logistic
from dear.methods.tensors import unit
from dear.runs.model import Model
from dear.runs.several_labels import SeveralLabelsEvaluation, average_precision
from dear.tasks.audit.held_out import HeldOutScores, without
from dear.tasks.audit.page import audit_page
from dear.tasks.check import check_labels
from dear.tasks.explain.dataset import explain_set
from dear.tasks.explain.explainer import Explainer
from dear.tasks.explain.page import explanation_values
from dear.tasks.explain.scores import ScoreParts
from dear.tasks.run_report.several_labels import examine_sets

DATA = "world:attributes"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task as files, whose features are computed once."""
    folder = tmp_path_factory.mktemp("attributes")
    lines = ["path,labels,split"]
    for split, step in (("train", 2), ("test", 4)):
        images = dear.open_data(DATA, split)
        for place in range(0, len(images), step):
            images.image(place).save(folder / f"{split}{place}.png")
            has = images.targets[place].tolist()
            labels = ";".join(name for name, one in zip(images.classes, has, strict=True) if one)
            lines.append(f"{split}{place}.png,{labels or ';'},{split}")
    (folder / "table.csv").write_text("\n".join(lines))
    return folder / "table.csv"


@pytest.fixture(scope="module")
def training(data: Path) -> dear.ImageSet:
    return dear.open_data(data, "train")


@pytest.fixture(scope="module")
def testing(data: Path) -> dear.ImageSet:
    return dear.open_data(data, "test")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, training: dear.ImageSet) -> Path:
    folder = tmp_path_factory.mktemp("several") / "run"
    dear.adapt(training, folder, method="linear-probe", check=False)
    return folder


@pytest.fixture(scope="module")
def evaluation(run: Path, testing: dear.ImageSet) -> SeveralLabelsEvaluation:
    evaluation = dear.evaluate(run, testing)
    assert isinstance(evaluation, SeveralLabelsEvaluation)
    assert len(repr(evaluation)) < 200
    return evaluation


def test_the_world_has_several_labels() -> None:
    images = dear.open_data(DATA, "train")
    assert images.targets.shape == (len(images), len(images.classes))
    assert 1.5 < float(images.targets.sum(dim=1).float().mean()) < 3
    assert bool(images.targets.gather(1, images.labels[:, None]).all())


def test_logistic_regressions_are_those_of_scikit_learn(training: dear.ImageSet) -> None:
    model = Model(dear.methods.build_method("zeroshot", dear.load("mini"), ["red", "blue"]))
    images = training
    features = unit(model.features(images)).double()
    weight, bias = fit_logistic(features, images.targets.double(), len(images.classes), 10.0)
    oracle = OneVsRestClassifier(LogisticRegression(C=10.0, max_iter=2000, tol=1e-8))
    oracle.fit(features.numpy(), images.targets.numpy())
    ours = (features @ weight.T + bias).sigmoid().numpy()
    assert np.abs(ours - oracle.predict_proba(features.numpy())).max() < 5e-3


def test_metrics_are_those_of_scikit_learn(evaluation: SeveralLabelsEvaluation) -> None:
    truth, scores = evaluation.labels.numpy(), evaluation.confidence["default"].numpy()
    sets = evaluation.answers["default"].numpy()
    report = evaluation.to_dict()
    assert report["map"] == pytest.approx(average_precision_score(truth, scores, average="macro"))
    assert report["micro_f1"] == pytest.approx(f1_score(truth, sets, average="micro"))
    assert report["macro_f1"] == pytest.approx(f1_score(truth, sets, average="macro"))
    assert report["accuracy"] == pytest.approx((truth == sets).all(axis=1).mean())
    low, high = report["map_interval"]
    assert low < report["map"] < high
    assert high - low < 0.2
    assert report["ece"] < 0.06


def test_equal_scores_count_together() -> None:
    scores, truth = torch.tensor([[1.0], [1.0], [0.0], [0.0]]), torch.tensor([[1], [0], [1], [0]]).bool()
    expected = average_precision_score(truth[:, 0].numpy(), scores[:, 0].numpy())
    assert float(average_precision(scores, truth)) == pytest.approx(expected)


@pytest.mark.parametrize("method", ["linear-probe", "proker", "tip-adapter", "lp-plus-plus"])
def test_learned_sets(method: str, training: dear.ImageSet, testing: dear.ImageSet) -> None:
    """Class names are exchanged, so that texts mislead and everything right was learned."""
    learn, test = (replace(some, classes=some.classes[7:] + some.classes[:7]) for some in (training, testing))
    model = dear.adapt(learn, method=method, check=False)
    frozen, learned = model.zero_shot().evaluate(test), model.evaluate(test)
    assert isinstance(frozen, SeveralLabelsEvaluation)
    assert isinstance(learned, SeveralLabelsEvaluation)
    assert "micro_f1" not in frozen.to_dict()  # ranks only
    assert frozen.mean_precision["default"] < 0.3
    assert learned.mean_precision["default"] > 0.85
    assert learned.f1()["micro_f1"] > 0.75


def test_dear_learns_sets(tmp_path: Path, training: dear.ImageSet) -> None:
    model = dear.adapt(training.subset(range(0, 108, 3)), tmp_path / "run", epochs=1, check=False)
    images = training.subset(range(6))
    assert model.method.several
    again = Model.load(tmp_path / "run")
    assert torch.equal(model.probabilities(images), again.probabilities(images))
    assert again.answers(images)[0].labels is not None


def test_thresholds_have_the_best_f1() -> None:
    generator = torch.Generator().manual_seed(1)
    truth = torch.rand(200, 3, generator=generator) < torch.tensor([0.1, 0.3, 0.6])
    logits = 2 * truth + torch.randn(200, 3, generator=generator)
    temperature, biases = fit_sigmoids(logits, truth)
    probabilities = (logits / temperature + biases).sigmoid()
    assert torch.allclose(probabilities.mean(dim=0), truth.double().mean(dim=0), atol=0.02)
    for c, limit in enumerate(best_thresholds(probabilities, truth).tolist()):
        present, column = truth[:, c].numpy(), probabilities[:, c].numpy()
        best = max(f1_score(present, column >= value) for value in column)
        assert f1_score(present, column >= limit) == pytest.approx(best)


def test_answers_are_sets(run: Path, tmp_path: Path, testing: dear.ImageSet) -> None:
    images = testing.subset(range(12))
    model = Model.load(run)
    answers = model.answers(images, top=18)
    limits = dict(zip(model.classes, model.calibrator.label_thresholds("default").tolist(), strict=True))
    for answer in answers:
        assert answer.labels is not None
        assert set(answer.labels) == {name for name, value in answer.classes if value >= limits[name]}
    predictions = dear.predict(run, images, jsonl=tmp_path / "sets.jsonl")
    assert predictions.labels[0] == (";".join(answers[0].labels or ()) or "none of these")
    with pytest.raises(UsageError, match="reject"):
        dear.predict(run, images, reject=True)


def test_an_indicator_matrix_as_in_scikit_learn(
    tmp_path: Path, training: dear.ImageSet, testing: dear.ImageSet
) -> None:
    images, test = training.subset(range(0, 108, 2)), testing.subset(range(0, 90, 3))
    pictures = [images.image(place) for place in range(len(images))]
    matrix = images.targets.numpy().astype(int)
    clf = dear.Classifier(method="linear-probe").fit(pictures, matrix, class_names=images.classes)
    assert clf.predict_proba(pictures[:3]).shape == (3, 18)
    sets = clf.predict(pictures)
    assert sets.shape == matrix.shape
    assert set(np.unique(sets)) <= {0, 1}
    assert clf.score(pictures, matrix) == pytest.approx((sets == matrix).all(axis=1).mean())
    assert 0 <= clf.score(test) <= 1
    clf.save(tmp_path / "run")
    assert (dear.Classifier.load(tmp_path / "run").predict(pictures[:5]) == sets[:5]).all()
    with pytest.raises(InputError, match="2"):
        clf.fit(pictures, matrix * 2, class_names=images.classes)


def test_exported_models_answer_the_same(run: Path, tmp_path: Path, testing: dear.ImageSet) -> None:
    pytest.importorskip("onnxruntime")
    dear.export_run(run, onnx=tmp_path / "model.onnx")
    from dear.export.runtime import OnnxModel

    pictures = [testing.image(place) for place in range(4)]
    exported = OnnxModel(tmp_path / "model.onnx").predict(pictures)
    answers = Model.load(run).answers(pictures)
    for one, two in zip(exported, answers, strict=True):
        assert one.labels == two.labels
        assert one.classes[0][1] == pytest.approx(two.classes[0][1], abs=1e-3)


@pytest.mark.parametrize(
    "call",
    [
        lambda run: dear.adapt(DATA, method="coop"),
        lambda run: dear.adapt(DATA, method="proker", focus="color"),
        lambda run: dear.adapt(DATA, method="proker", without="location"),
        lambda run: dear.adapt(DATA, method="proker", shots=2, unlabeled="rest"),
        lambda run: dear.explain(run, [Image.new("RGB", (64, 64))], against="red"),
        lambda run: dear.choose(DATA),
        lambda run: dear.evaluate(run, DATA, unknown="world:textures"),
    ],
)  # fmt: skip
def test_what_needs_one_label_says_so(run: Path, call: object) -> None:
    with pytest.raises(DearError, match="label"):
        call(run)  # type: ignore[operator]


def test_a_report_shows_the_figures(run: Path, testing: dear.ImageSet, tmp_path: Path) -> None:
    facts = examine_sets(Model.load(run), testing)
    figures = facts.adapted.to_dict()
    worst = min(figures["per_class"], key=figures["per_class"].__getitem__)
    assert facts.worst[0] == worst
    missed, wrong = facts.mistakes(missed=True), facts.mistakes(missed=False)
    differ = facts.adapted.labels != facts.adapted.answers["default"]
    assert {*missed, *wrong} == {tuple(place) for place in differ.nonzero().tolist()}
    dear.report_run(run, tmp_path / "page.html", data=testing)
    page = (tmp_path / "page.html").read_text()
    low, high = figures["intervals"][worst]
    shown = (figures["map"], figures["micro_f1"], figures["accuracy"], figures["per_class"][worst], low, high)
    for value in shown:
        assert f"{value:.1%}" in page


def test_explanations_add_up_to_the_lead_over_the_threshold(
    run: Path, training: dear.ImageSet, testing: dear.ImageSet
) -> None:
    model, images = Model.load(run), testing.subset([0, 1])
    scaled = model.calibrator.calibrate(model.logits(images)["default"], "default").double()
    limits = model.calibrator.label_thresholds("default").double().logit()
    result = Explainer(ScoreParts(model, training.subset(range(4)))).explain(images)
    answered = [(one.image, label) for one in model.answers(images) for label in one.labels or ()]
    assert [(one.image, one.answer) for one in result] == answered
    for one in result:
        row, label = [images.key(0), images.key(1)].index(one.image), model.classes.index(one.answer)
        lead = float(scaled[row, label] - limits[label])
        shown = explanation_values(one)
        columns = [[float(bar["texts"][k]) for bar in shown["bars"]] for k in (0, 1)]
        assert sum(columns[0]) - sum(columns[1]) == pytest.approx(lead, abs=0.01 * len(columns[0]))
        assert one.lead == pytest.approx(lead, abs=1e-4)
        for name, values in one.maps.items():
            if name:
                bar = next(bar for bar in one.bars if bar.name == name)
                assert float(values[0].sum()) == pytest.approx(bar.answer, abs=1e-4)
        for other in (*one.without_heads, *one.without_concepts):
            has = one.lead - other.lead_drop >= 0
            assert other.answer == (one.answer if has else f"not {one.answer}")
    nothing = Explainer(ScoreParts(model)).explain(images, answer="beach")
    assert {one.answer for one in nothing} == {"beach"}
    every = explain_set(Explainer(ScoreParts(model)), images)
    assert len(every.labels) == int(images.targets.sum())
    right = sum(one.labels is not None and name in one.labels for one, row in
                zip(model.answers(images), images.targets.tolist(), strict=True)
                for name, has in zip(images.classes, row, strict=True) if has)  # fmt: skip
    assert every.to_dict()["accuracy"] == pytest.approx(right / len(every.labels))


def test_the_studio_shows_sets(run: Path, testing: dear.ImageSet, tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    from dear.studio.classify import classify, notices, verdicts_html
    from dear.studio.state import StudioState

    model = Model.load(run)
    state = StudioState(model.clip, None, testing, tmp_path, model)
    names = [(testing.key(place), testing.image(place)) for place in range(4)]
    verdicts = classify(state, names, model.classes, model.template)
    for verdict, answer in zip(verdicts, model.answers([image for _, image in names], top=18), strict=True):
        assert verdict.labels == answer.labels
        assert [name for name, _ in verdict.answers["default"]] == [name for name, _ in answer.classes]
        html = verdicts_html([verdict], notices(model, model.classes, 0.05))
        for name in answer.labels or ():
            assert f"<span>{name}</span><span>{dict(answer.classes)[name]:.1%}</span>" in html


def test_wrong_and_missing_labels_are_found(testing: dear.ImageSet) -> None:
    generator = torch.Generator().manual_seed(1)
    flipped = torch.rand(testing.targets.shape, generator=generator) < 0.02
    suspects = check_labels(replace(testing, targets=testing.targets ^ flipped), dear.load("mini")).suspects
    planted = {(place, testing.classes[label]) for place, label in flipped.nonzero().tolist()}
    named = [(each.index, each.label.removeprefix("not ")) for each in suspects]
    assert sum(place in planted for place in named) > 0.5 * len(planted)
    assert sum(place not in planted for place in named) < 0.1 * len(planted)
    for each in suspects:
        name = each.label.removeprefix("not ")
        column = testing.classes.index(name)
        has = bool(testing.targets[each.index, column] ^ flipped[each.index, column])
        assert has == (each.label == name)


def test_an_audit_compares_each_label_with_its_absence(
    training: dear.ImageSet, testing: dear.ImageSet
) -> None:
    """The label "beach" is called "fox": a label that the place decides although its name does not say so."""
    names = tuple("fox" if name == "beach" else name for name in training.classes)
    learn, test = (replace(some, classes=names) for some in (training, testing.subset(range(0, 90, 2))))
    model = dear.adapt(learn, method="linear-probe", check=False)
    result = dear.audit(model, learn, held_out=test, concept="location", properties=False)
    verdicts = {one.name: one.verdict for one in result.concepts}
    assert verdicts.pop("fox: Location") == "shortcut"
    assert set(verdicts.values()) <= {"class-defining"}
    assert {"forest: Location", "city: Location"} <= set(verdicts)
    finding = next(one for one in result.concepts if one.name == "fox: Location")
    changed = result.changed_places(finding)
    assert changed
    column = model.classes.index("fox")
    removed = without(model, result.removals[finding.name]).answers(test)
    for place, (answer, other) in enumerate(zip(model.answers(test), removed, strict=True)):
        differ = ("fox" in (answer.labels or ())) != ("fox" in (other.labels or ()))
        assert differ == (place in changed)
    assert result.to_dict()["suspected"] == ["fox: Location"]
    assert not replace(result, run="run").next_steps  # training without a concept needs one label per image
    rows = result.to_frame(per_image=True)
    assert set(rows[rows["issue"] == "answer changes without"]["image"]) == {test.key(p) for p in changed}
    assert finding.association.table[0].sum() == learn.targets[:, column].sum()
    assert "fox: Location" in audit_page(result)
    with pytest.raises(DataError, match="textures"):
        dear.audit(model, dear.open_data("world:textures", "train").subset(range(20)))


def table(folder: Path, lines: list[str], header: str = "path,labels") -> Path:
    for number in range(6):
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(folder / f"{number}.png")
    (folder / "t.csv").write_text("\n".join([header, *lines]))
    return folder / "t.csv"


def test_a_column_of_labels(tmp_path: Path) -> None:
    images = dear.open_data(table(tmp_path, ["0.png,a;b", "1.png,b", "2.png,;", "3.png,"]), "all")
    assert images.classes == ("a", "b")
    assert images.targets.tolist() == [[True, True], [False, True], [False, False]]
    assert images.labels.tolist() == main_labels(images.targets).tolist()
    assert images.select_classes(["a"]).targets.tolist() == [[True]]


def test_mixed_labels_name_the_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"label.*labels"):
        dear.open_data(table(tmp_path, ["0.png,a,a;b"], "path,label,labels"), "all")
    (tmp_path / "t.jsonl").write_text('{"path": "0.png", "labels": ["a"]}\n{"path": "1.png", "label": "a"}')
    with pytest.raises(DataError, match=r"row 2.*'labels'"):
        dear.open_data(tmp_path / "t.jsonl", "all")
    with pytest.raises(DataError, match=r"row 3, column label.*'a;b'"):
        dear.open_data(table(tmp_path, ["0.png,a", "1.png,a;b"], "path,label"), "all")
    (tmp_path / "t.jsonl").write_text('{"path": "0.png", "labels": ["a", 2.5]}')
    with pytest.raises(DataError, match=r"row 1: labels.*2\.5"):
        dear.open_data(tmp_path / "t.jsonl", "all")


def test_embed_writes_sets(run: Path, data: Path, testing: dear.ImageSet) -> None:
    table = dear.embed(data, run=run).to_frame()
    assert list(table.columns) == ["path", "label", "split", "embedding", "answer", "probability", "error"]
    table = table[table["split"] == "test"]
    predictions = dear.predict(run, list(table["path"]))
    assert list(table["answer"]) == predictions.labels
    written = {frozenset(label.split(";")) for label in table["label"]}
    assert any(len(labels) > 1 for labels in written)


def test_embed_keeps_the_labels_of_a_set(testing: dear.ImageSet) -> None:
    few = testing.subset(range(4))
    labels = dear.embed(few).columns["label"]
    assert [set(label.split(";")) for label in labels] == [
        {name for name, one in zip(few.classes, row, strict=True) if one} for row in few.targets.tolist()
    ]


def test_data_check_counts_every_label(data: Path, training: dear.ImageSet) -> None:
    counts = class_counts(training)
    assert counts == dict(zip(training.classes, training.targets.sum(dim=0).tolist(), strict=True))
    assert describe_balance(counts, len(training)).startswith(f"{len(training)} images")


def test_an_audit_tests_no_label_that_no_held_out_image_has(run: Path, testing: dear.ImageSet) -> None:
    model = dear.load(run)
    assert isinstance(model, Model)
    tested = HeldOutScores.of(model, testing.subset(range(2)), [1], None, lambda *_: None)
    relevant = {name: bool(tested.relevant(name).any()) for name in model.classes}
    assert not all(relevant.values())
    assert any(relevant.values())
