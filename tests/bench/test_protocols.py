"""Protocols on a tiny backbone and real files: what is trained on, what is tested on, and the numbers."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import dear
from dear.bench.ablations import STUDIES, study
from dear.bench.cells import Environment
from dear.bench.engines import Local, compute
from dear.bench.plan import Request, plan, plan_study
from dear.bench.protocols import held_out
from dear.bench.session import Session
from dear.bench.store import Grid
from dear.bench.tables import variant_names
from dear.data.open import open_data
from dear.errors import DataError, RoleError, RunError, UsageError
from dear.heads.roles import RoleMap
from dear.methods import Preset, find_method

FAST = {"epochs": 2, "batch": 8}


@pytest.fixture(scope="module")
def make_request(backbone, table, roles_file):
    clip = dear.load(backbone)

    def make(**changes):
        fields = {
            "backbone": "tiny",
            "identity": clip.identity,
            "roles": RoleMap.load(roles_file),
            "methods": ["zeroshot", "dear"],
            "datasets": [table],
            "seeds": [1],
            "shots": [4],
            "recipe": FAST,
        }
        return Request(**(fields | changes))

    return make


@pytest.fixture
def place(backbone, roles_file):
    return Environment(backbone, roles_file=roles_file)


def run(cell, place):
    return compute(cell.document(), place.plain())


def frozen_accuracy(backbone, images):
    """Zero-shot accuracy the obvious way: one image after the other, straight from the towers."""
    clip = dear.load(backbone)
    texts = clip.encode_text([images.template.replace("{}", name) for name in images.classes])
    texts = torch.nn.functional.normalize(texts, dim=-1)
    hits = 0
    for index, label in enumerate(images.labels.tolist()):
        feature = clip.encode_image(clip.preprocess(images.image(index))[None])[0]
        hits += int((texts @ feature).argmax()) == label
    return hits / len(images)


def test_base_to_novel_halves_and_harmonic_mean(backbone, table, place, make_request):
    (cell,) = plan("base-to-novel", make_request(methods=["zeroshot"]))
    result = run(cell, place)
    test = open_data(table, "test")
    names = test.classes
    base = frozen_accuracy(backbone, test.select_classes(names[:3]))  # 5 classes: 3 base, 2 novel
    novel = frozen_accuracy(backbone, test.select_classes(names[3:]))
    row = result["modes"]["default"]
    assert row["base"] == pytest.approx(base)
    assert row["novel"] == pytest.approx(novel)
    assert row["hm"] == pytest.approx(2 / (1 / base + 1 / novel) if base * novel else 0)
    assert result["classes"] == {"base": 3, "novel": 2}
    assert result["tested"] == {test.name: len(test)}
    drawn = [json.loads(line) for line in result["draw"]["jsonl"].splitlines()]
    assert {line["class"] for line in drawn} == set(names[:3])
    assert len(drawn) == 12


def test_dear_reports_every_mode_its_size_and_its_fusion_weights(place, make_request):
    (cell,) = plan("base-to-novel", make_request(methods=["dear@paper"]))
    result = run(cell, place)
    assert set(result["modes"]) == {"fused", "decoupled"}
    assert result["trainable_parameters"] == 5 * 24 + 5 * 16 + 24 * 12 + 6
    assert result["adapter_bytes"] > 4 * result["trainable_parameters"]
    assert sum(result["facts"]["fusion_weights"].values()) == pytest.approx(1)
    assert result["steps"] == 2 * -(-12 // 8)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_same_numbers_again_and_whatever_ran_before(place, make_request):
    cells = plan("base-to-novel", make_request(methods=["dear"], seeds=[1, 2]))
    forward = [run(cell, place) for cell in cells]
    backward = [run(cell, place) for cell in reversed(cells)][::-1]
    for a, b in zip(forward, backward, strict=True):
        assert {k: a[k] for k in a if k != "seconds"} == {k: b[k] for k in b if k != "seconds"}
    assert forward[0]["draw"] != forward[1]["draw"]


def test_few_shot_plans_five_shots_and_tests_all_classes(backbone, table, place, make_request):
    cells = plan("few-shot", make_request(methods=["zeroshot"], shots=None))
    assert [cell.shots for cell in cells] == [1, 2, 4, 8, 16]
    result = run(cells[1], place)
    assert result["draw"]["images"] == 10
    assert result["modes"]["default"]["accuracy"] == pytest.approx(
        frozen_accuracy(backbone, open_data(table, "test"))
    )
    smaller = run(cells[0], place)["draw"]["jsonl"].splitlines()
    assert set(smaller) < set(result["draw"]["jsonl"].splitlines())


def test_transfer_answers_among_the_targets_own_classes(backbone, table, place, make_request, tmp_path):
    test = open_data(table, "test")
    few = tmp_path / "subset.csv"
    rows = [
        f"{test.path(i)},{test.classes[y]},test\n"
        for i, y in enumerate(test.labels.tolist())
        if test.classes[y] in ("blue", "grey")
    ]
    few.write_text("path,label,split\n" + "".join(row.replace(f"{test.root}/", "") for row in rows))
    place = Environment(place.backbone, roles_file=place.roles_file, data_root=str(test.root))
    for protocol in ("cross-dataset", "domain-shift"):
        (cell,) = plan(protocol, make_request(methods=["dear"], targets=[str(few)]))
        result = run(cell, place)
        assert set(result["modes"]["decoupled"]) == {table, str(few)}
    (cell,) = plan("domain-shift", make_request(methods=["zeroshot"], targets=[str(few)]))
    expected = frozen_accuracy(backbone, test.select_classes(["blue", "grey"]))
    assert run(cell, place)["modes"]["default"][str(few)] == pytest.approx(expected)


def test_protocols_that_train_on_all_classes_share_their_adapters(table, place, make_request, tmp_path):
    place = replace(place, adapters=str(tmp_path))
    (few,) = plan("few-shot", make_request(methods=["dear"]))
    (cross,) = plan("cross-dataset", make_request(methods=["dear"], targets=[__file__]))
    assert few.spec.key == cross.spec.key
    assert few.spec.key != plan("few-shot", make_request(methods=["dear"], shots=[2]))[0].spec.key
    fresh = run(few, place)
    (file,) = tmp_path.iterdir()
    taken = run(few, place)
    assert taken["trained_before"]
    assert "trained_before" not in fresh
    for part in ("modes", "facts", "steps", "trainable_parameters", "adapter_bytes"):
        assert taken[part] == fresh[part]
    file.write_bytes(file.read_bytes()[:100])
    assert "trained_before" not in run(few, place)
    assert run(few, place)["modes"] == fresh["modes"]


def test_another_template_is_another_training(table, place, make_request, tmp_path):
    """An adapter that was trained with other prompts is not taken."""
    place = replace(place, adapters=str(tmp_path))
    one, two = (
        plan("few-shot", make_request(methods=["coop"], templates={table: template}))[0]
        for template in ("a photo of a {}.", "{}")
    )
    assert one.spec.key != two.spec.key
    run(one, place)
    assert "trained_before" not in run(two, place)


def test_changed_images_are_another_cell(table, make_request, tmp_path):
    """An image that was replaced, of the training or of the test split, changes the key."""
    folder = tmp_path / "copy"
    shutil.copytree(Path(table).parent, folder)
    copy = str(folder / "colors.csv")

    def key():
        return plan("few-shot", make_request(methods=["zeroshot"], datasets=[copy], shots=[8]))[0].key

    keys = [key(), key()]
    for split in ("train", "test"):
        Image.new("RGB", (9, 9)).save(folder / f"{split}-day-red-0.png")
        keys.append(key())
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_leave_one_domain_out_never_sees_the_target(table, place, make_request, monkeypatch):
    cells = plan("leave-one-domain-out", make_request(methods=["zeroshot"], shots=None))
    assert [cell.setting["held_out"] for cell in cells] == ["day", "dusk", "night"]
    seen = {}
    fit, test = Session.fit, Session.test

    def spy_fit(self, pool, keep=False):
        seen["train"] = self.draw(pool)
        return fit(self, pool, keep)

    def spy_test(self, method, images):
        seen.setdefault("tests", []).append(images)
        return test(self, method, images)

    monkeypatch.setattr(Session, "fit", spy_fit)
    monkeypatch.setattr(Session, "test", spy_test)
    result = run(cells[1], place)
    validation, target = seen["tests"]
    keys = [{p.key(i) for i in range(len(p))} for p in (seen["train"], validation, target)]
    assert {d for p in (seen["train"], validation) for d in p.domains} == {"day", "night"}
    assert set(target.domains) == {"dusk"}
    assert not keys[0] & keys[1]
    assert len(keys[1]) == 2 * 5 * 2  # a fifth of 8 images of each class of each source, rounded
    assert len(keys[0]) == 2 * 5 * 8 - len(keys[1])
    assert all(key.startswith("test-") for key in keys[2])
    assert set(result["modes"]["default"]) == {"target", "validation"}


def test_validation_changes_with_the_seed(table):
    images = open_data(table, "train")
    parts = [held_out.split_sources(images, seed)[1] for seed in (1, 1, 2)]
    keys = [{part.key(i) for i in range(len(part))} for part in parts]
    assert keys[0] == keys[1] != keys[2]


def test_imported_draws_are_used_and_bind_the_cell(table, place, make_request, tmp_path):
    (cell,) = plan("few-shot", make_request(methods=["zeroshot"], shots=[2]))
    drawn = run(cell, place)["draw"]["jsonl"].splitlines()
    other = sorted(open_data(table, "train").key(i) for i in range(3))
    file = tmp_path / f"{table.replace('/', '-')}-2shot-seed1.jsonl"
    file.write_text("".join(json.dumps({"path": key}) + "\n" for key in other))
    (bound,) = plan("few-shot", make_request(methods=["zeroshot"], shots=[2], draws=str(tmp_path)))
    assert bound.key != cell.key
    where = Environment(place.backbone, roles_file=place.roles_file, draws=str(tmp_path))
    used = [json.loads(line)["path"] for line in run(bound, where)["draw"]["jsonl"].splitlines()]
    assert sorted(used) == other
    assert drawn != used
    file.write_text(json.dumps({"path": other[0]}) + "\n")
    with pytest.raises(dear.errors.RunError, match=re.escape(table)):
        run(bound, where)


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_every_study_plans_distinct_variants_that_run(name, place, make_request):
    planned_cells = plan_study(study(name, layers=6), make_request(recipe={"epochs": 1, "batch": 12}))
    distinct = {cells[0].key for _, cells in planned_cells}
    assert len(distinct) == (1 if name == "inference" else len(planned_cells))
    variant, (cell,) = planned_cells[0]
    row = run(cell, place)["modes"][variant.mode or "fused"]
    assert 0 <= row["hm"] <= 1


def test_studies_share_the_papers_cell(make_request):
    usual = plan("base-to-novel", make_request(methods=["dear@paper"]))[0].key
    for name, which in (("masks", "dear"), ("losses", "ce+reg+fusion"), ("beta", "beta = 0.9")):
        cells = {variant.name: cells[0].key for variant, cells in plan_study(study(name), make_request())}
        assert cells[which] == usual
    for name, which in (("first-layer", "J = 5"), ("concepts", "5"), ("isolation", "bidirectional")):
        cells = {variant.name: cells[0].key for variant, cells in plan_study(study(name, 6), make_request())}
        assert cells[which] == usual


def test_real_cells_on_several_processes_agree_with_one(tmp_path, place, make_request):
    cells = plan("base-to-novel", make_request(seeds=[1, 2]))
    numbers = []
    for name, engine in (("one", Local(compute)), ("two", Local(compute, workers=2))):
        summary = Grid(tmp_path / name).run(cells, place, engine)
        assert summary.failed == {}
        numbers.append([Grid(tmp_path / name).read(cell)["modes"] for cell in cells])
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(
    ("protocol", "changes", "error", "message"),
    [
        ("zero-shot", {}, UsageError, "'zero-shot'"),
        ("base-to-novel", {"methods": ["dera"]}, UsageError, "dera"),
        ("base-to-novel", {"datasets": []}, UsageError, "datasets"),
        ("base-to-novel", {"targets": ["x"]}, UsageError, "targets"),
        ("base-to-novel", {"seeds": []}, UsageError, "seeds"),
        ("cross-dataset", {"datasets": ["a", "b"]}, UsageError, "a, b"),
        ("cross-dataset", {"datasets": ["a"], "targets": ["a"]}, UsageError, "targets"),
        ("base-to-novel", {"roles": None}, RoleError, "tiny"),
        ("base-to-novel", {"options": {"dear": {"betta": 1}}}, UsageError, "betta"),
        ("base-to-novel", {"recipe": {"epoch": 1}}, UsageError, "epoch"),
        ("base-to-novel", {"recipe": {"seed": 7}}, UsageError, "seed"),
        ("base-to-novel", {"options": {"dera": {"beta": 1}}}, UsageError, "'dera'"),
        ("base-to-novel", {"options": {"coop": {"context": 4}}}, UsageError, "'coop'"),
        ("base-to-novel", {"templates": {"elsewhere": "a {}."}}, UsageError, "'elsewhere'"),
        ("base-to-novel", {"draws": "nowhere"}, RunError, "nowhere"),
        ("base-to-novel", {"draws": "nowhere", "shots": [0]}, UsageError, "draws"),
    ],
)
def test_wrong_requests_are_refused_before_anything_runs(make_request, protocol, changes, error, message):
    with pytest.raises(error, match=message):
        plan(protocol, make_request(**changes))


def test_names_of_methods_are_the_same_in_upper_and_lower_case(make_request):
    """`DeAR.beta=0.1` was ignored: the options were looked up under `dear`."""
    cells = [
        plan("base-to-novel", make_request(methods=[f"{m}@paper"], options={m: {"beta": 0.1}}))[0]
        for m in ("dear", "DeAR")
    ]
    assert [cell.spec.options["beta"] for cell in cells] == [0.1, 0.1]
    (study_cell,) = plan_study(study("inference"), make_request(options={"DEAR": {"beta": 0.1}}))[0][1]
    assert study_cell.key == cells[0].key


def test_presets_of_a_method_are_planned_and_named(make_request, monkeypatch):
    presets = {
        "paper": Preset("as published", {}, {"batch": 16}),
        "quick": Preset("for a test", {"beta": 0.5}, {"batch": 4}),
    }
    monkeypatch.setattr(find_method("dear"), "presets", presets, raising=False)
    cells = plan("base-to-novel", make_request(methods=["dear@paper", "dear@quick"], recipe={}))
    assert [(cell.spec.options["beta"], cell.spec.recipe["batch"]) for cell in cells] == [(0.1, 16), (0.5, 4)]
    assert list(variant_names(cells).values()) == ["dear@paper", "dear@quick"]
    (changed,) = plan("base-to-novel", make_request(methods=["dear@quick"], options={"dear": {"beta": 0.2}}))
    assert changed.spec.options["beta"] == 0.2
    with pytest.raises(UsageError, match=r"'slow'.*paper"):
        plan("base-to-novel", make_request(methods=["dear@slow"]))
    with pytest.raises(UsageError, match="'slow'"):
        plan("base-to-novel", make_request(methods=["coop@slow"]))


def test_a_cell_that_two_studies_share_is_computed_once(make_request, tmp_path):
    """`masks` asks for the roles as they are, `concepts` for five concepts of a map that has five."""
    planned_cells = [plan_study(study(name, 6), make_request()) for name in ("masks", "concepts")]
    cells = [cell for planned in planned_cells for _, with_template in planned for cell in with_template]
    seen = []

    def work(cell, place):
        seen.append(cell["roles"])
        return {"modes": {"fused": {"base": 0.5, "novel": 0.5, "hm": 0.5}}}

    Grid(tmp_path).run(cells, Environment("none"), Local(work))
    assert len(cells) == 7
    assert len(seen) == 6
    assert len({cell.key for cell in cells}) == 6


def test_a_study_compares_at_one_number_of_shots(make_request):
    with pytest.raises(UsageError, match="shots"):
        plan_study(study("masks"), make_request(shots=[1, 2]))


def test_a_template_is_part_of_the_cell_and_of_its_answers(backbone, table, place, make_request):
    template = "{}"
    (plain,) = plan("few-shot", make_request(methods=["zeroshot"]))
    (with_template,) = plan("few-shot", make_request(methods=["zeroshot"], templates={table: template}))
    assert plain.key != with_template.key
    assert "template" not in plain.setting
    test = open_data(table, "test", template=template)
    assert run(with_template, place)["modes"]["default"]["accuracy"] == pytest.approx(
        frozen_accuracy(backbone, test)
    )


def test_joint_accuracy_and_calibration_the_obvious_way(backbone, table, place, make_request):
    """Zero-shot CLIP, image by image: answers among all five classes, and 15 bins filled by hand."""
    (cell,) = plan("base-to-novel", make_request(methods=["zeroshot"]))
    row = run(cell, place)["modes"]["default"]
    test, clip = open_data(table, "test"), dear.load(backbone)
    texts = clip.encode_text([test.template.replace("{}", name) for name in test.classes])
    texts = torch.nn.functional.normalize(texts, dim=-1)
    right = {"base": [], "novel": []}
    bins = [[0.0, 0.0, 0] for _ in range(15)]
    for index, label in enumerate(test.labels.tolist()):
        feature = clip.encode_image(clip.preprocess(test.image(index))[None])[0]
        feature = feature / feature.norm()
        chances = (clip.log_scale.exp() * texts @ feature).softmax(0)
        answer = int(chances.argmax())
        right["base" if label < 3 else "novel"].append(answer == label)
        sure = float(chances[answer])
        place_of = next(b for b in range(15) if sure <= (b + 1) / 15)
        bins[place_of][0] += answer == label
        bins[place_of][1] += sure
        bins[place_of][2] += 1
    base, novel = (sum(right[half]) / len(right[half]) for half in ("base", "novel"))
    assert row["joint_base"] == pytest.approx(base)
    assert row["joint_novel"] == pytest.approx(novel)
    assert row["joint"] == pytest.approx((sum(right["base"]) + sum(right["novel"])) / len(test))
    assert row["joint_hm"] == pytest.approx(2 / (1 / base + 1 / novel) if base * novel else 0)
    error = sum(abs(hits / n - sure / n) * n / len(test) for hits, sure, n in bins if n)
    assert row["ece_joint"] == pytest.approx(error, abs=1e-4)


def test_data_without_domains_is_refused(tmp_path):
    with pytest.raises(DataError, match="plain"):
        held_out.domains_of(type("Set", (), {"domains": None, "name": "plain"})())
