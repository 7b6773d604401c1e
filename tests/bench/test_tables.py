"""Tables and pages: arithmetic over seeds by hand, both harmonic means, formats that can be read back."""

import csv
import io
import re
import statistics
import subprocess
import sys

import msgspec
import pytest
from made_cells import make_cell

from dear.bench import plots as plots
from dear.bench.ablations import STUDIES
from dear.bench.ablations import table as ablation
from dear.bench.cells import Outcome
from dear.bench.outputs import fusion_weights, write_protocol, write_studies
from dear.bench.plan import PROTOCOLS
from dear.bench.store import Grid
from dear.bench.tables import average, latex, markdown, to_csv


def gather(results, names=None):
    results = list(results)
    return PROTOCOLS[results[0][0].protocol].gather(results, names)


def table(protocol, lines):
    return PROTOCOLS[protocol].table(lines)


def hm(base, novel):
    return statistics.harmonic_mean([base, novel])


def cell(protocol, dataset, seed, method="dear", shots=16, **setting):
    return make_cell(protocol, method, dataset, seed, shots, setting=setting)


def base_novel(dataset, seed, base, novel, method="dear"):
    row = {"base": base, "novel": novel, "hm": hm(base, novel)}
    return cell("base-to-novel", dataset, seed, method), {"modes": {"fused": row}}


@pytest.fixture
def two_sets():
    return [
        base_novel("EuroSAT", 1, 0.9, 0.4),
        base_novel("EuroSAT", 2, 0.8, 0.6),
        base_novel("world:textures", 1, 0.7, 0.5),
        base_novel("world:textures", 2, 0.6, 0.6),
    ]


def numbers(sheet, *labels):
    (row,) = [row for row in sheet.rows if row.labels == labels and not row.published]
    return row.entries


def test_mean_and_spread_over_seeds_and_both_harmonic_means(two_sets):
    sheet = table("base-to-novel", gather(two_sets))
    base, novel, each, of_means = numbers(sheet, "EuroSAT", "dear", "fused")
    assert base.mean == pytest.approx(0.85)
    assert base.std == pytest.approx(statistics.stdev([0.9, 0.8]))
    assert each.mean == pytest.approx((hm(0.9, 0.4) + hm(0.8, 0.6)) / 2)
    assert of_means == pytest.approx(hm(0.85, 0.5))
    assert each.mean < of_means
    assert novel.seeds == 2


def test_average_is_over_data_sets_seed_by_seed(two_sets):
    base, novel, each, of_means = numbers(
        table("base-to-novel", gather(two_sets)), "Average", "dear", "fused"
    )
    assert base.mean == pytest.approx((0.9 + 0.8 + 0.7 + 0.6) / 4)
    assert base.std == pytest.approx(statistics.stdev([(0.9 + 0.7) / 2, (0.8 + 0.6) / 2]))
    assert of_means == pytest.approx(hm(base.mean, novel.mean))
    assert each.mean == pytest.approx(
        statistics.mean([hm(0.9, 0.4), hm(0.8, 0.6), hm(0.7, 0.5), hm(0.6, 0.6)])
    )


def test_average_uses_only_seeds_that_every_data_set_has(two_sets):
    line = average(gather(two_sets[:3]))
    assert line.seeds("base") == {1: pytest.approx(0.8)}


def test_published_rows_stand_beside_ours_with_corrections_noted(two_sets):
    sheet = table("base-to-novel", gather(two_sets))
    published = [row for row in sheet.rows if row.published]
    assert {row.labels[0] for row in published} == {"EuroSAT"}
    text = markdown(sheet)
    assert "*92.22*" in text
    assert "*DeAR*" in text
    pets = markdown(table("base-to-novel", gather([base_novel("OxfordPets", 1, 0.9, 0.9)])))
    assert "*97.42†*" in pets
    assert "printed 96.81, corrected to 97.42" in pets


def test_methods_without_novel_classes_have_a_dash():
    row = {"base": 0.5, "novel": None, "hm": None}
    lines = gather([(cell("base-to-novel", "d", 1, "linear-probe"), {"modes": {"default": row}})])
    assert "| d | linear-probe | default | 50.00 | – | – | – |" in markdown(table("base-to-novel", lines))


def test_transfer_averages_targets_only_and_shows_the_papers_table():
    targets = ["ImageNetV2", "ImageNetSketch", "ImageNetA", "ImageNetR"]
    modes = {"decoupled": {"ImageNet": 0.7} | dict(zip(targets, (0.6, 0.5, 0.4, 0.3), strict=True))}
    results = [(cell("domain-shift", "ImageNet", 1, targets=targets), {"modes": modes})]
    sheet = table("domain-shift", gather(results))
    source, mean, *rest = numbers(sheet, "dear", "decoupled")
    assert source.mean == 0.7
    assert mean.mean == pytest.approx(0.45)
    assert [entry.mean for entry in rest] == [0.6, 0.5, 0.4, 0.3]
    assert any(row.published and row.entries[1].value == 61.25 for row in sheet.rows)


def test_domains_are_averaged_with_the_validation_beside():
    results = [
        (
            cell("leave-one-domain-out", "PACS", 1, held_out=name),
            {"modes": {"default": {"target": t, "validation": v}}},
        )
        for name, t, v in (("art", 0.5, 0.9), ("photo", 0.7, 0.8))
    ]
    sheet = table("leave-one-domain-out", gather(results))
    target, validation = numbers(sheet, "PACS", "Average", "dear", "default")
    assert (target.mean, validation.mean) == (pytest.approx(0.6), pytest.approx(0.85))
    assert numbers(sheet, "PACS", "photo", "dear", "default")[0].mean == 0.7
    assert any(row.published and row.entries[0].value == 98.1 for row in sheet.rows)


def test_few_shot_columns_are_shots():
    results = [
        (cell("few-shot", "d", 1, shots=shots), {"modes": {"fused": {"accuracy": shots / 20}}})
        for shots in (1, 16)
    ]
    sheet = table("few-shot", gather(results))
    assert sheet.columns == ("1 shot", "16 shots")
    assert [entry.mean for entry in numbers(sheet, "d", "dear", "fused")] == [0.05, 0.8]


def test_ablation_takes_each_variants_mode_and_the_papers_rows(two_sets):
    _, result = two_sets[0]
    row = result["modes"]["fused"]
    both = {"modes": {"fused": row, "decoupled": {"base": 0.5, "novel": 0.5, "hm": 0.5}}}
    lines = []
    for name in ("decoupled", "fused"):
        one = cell("base-to-novel", "d", 1)
        lines += gather([(one, both)], {one.key: name})
    sheet = ablation(STUDIES["inference"], lines)
    assert numbers(sheet, "d", "decoupled")[0].mean == 0.5
    assert numbers(sheet, "d", "fused")[0].mean == 0.9
    assert [row.entries[3].value for row in sheet.rows if row.published] == [82.05, 82.72]


def test_csv_gives_back_exact_fractions(two_sets):
    rows = list(csv.DictReader(io.StringIO(to_csv(table("base-to-novel", gather(two_sets))))))
    ours = next(row for row in rows if row["Dataset"] == "EuroSAT" and row["published"] == "0")
    assert float(ours["Base"]) == (0.9 + 0.8) / 2
    assert ours["Base seeds"] == "2"
    paper = next(row for row in rows if row["Method"] == "DeAR")
    assert float(paper["Base"]) == 0.97


def test_hostile_names_break_no_format():
    name = "=cmd|'x'_&%<script>"
    lines = gather([base_novel(name, 1, 0.5, 0.5)])
    sheet = table("base-to-novel", lines)
    assert next(csv.reader(io.StringIO(to_csv(sheet).splitlines()[1])))[0].startswith("'=")
    assert r"\_\&\%" in latex(sheet)
    row = next(line for line in markdown(sheet).splitlines() if "cmd" in line)
    assert row.replace("\\|", "").count("|") == 8
    assert "<script>" not in row


def test_pages_are_whole_and_need_no_network(tmp_path, two_sets):
    grid, weights = Grid(tmp_path), {"class": 0.5, "<b>Color": 0.5}
    for one, result in two_sets:
        grid.store(Outcome(one, {**result, "facts": {"fusion_weights": weights}}))
    cells = [one for one, _ in two_sets]
    assert fusion_weights([(one, grid.read(one)) for one in cells])["EuroSAT"]["class"] == 0.5
    *_, page = write_protocol(grid, "base-to-novel", cells, "dear bench <x>", {"a cell": "it <failed>"})
    html = page.read_text()
    without_script = html[: html.index("<script")] + html[html.rindex("</script>") :]
    assert "dear bench &lt;x&gt;" in without_script
    assert "it &lt;failed&gt;" in without_script
    assert '<script src="' not in html
    # Sources of published figures are named as text; nothing is loaded. (Plotly's program names map servers
    # that only its map plots would request.)
    assert not re.search(r"""(src|href)\s*=\s*["']?https?:|url\(\s*["']?https?:|@import""", without_script)
    assert "92.22" in without_script
    variants = STUDIES["inference"].variants
    both = {"modes": {m: {"base": 0.5, "novel": 0.5, "hm": 0.5} for m in ("fused", "decoupled")}}
    grid.store(Outcome(cells[0], both))
    planned = [(variant, cells[:1]) for variant in variants]
    *_, page = write_studies(grid, [(STUDIES["inference"], planned)])
    assert "Inference strategy" in page.read_text()


def test_figures_show_the_numbers(two_sets):
    lines = gather(two_sets)
    bars = plots.bars(lines, "hm")
    assert list(bars.data[0].x) == ["EuroSAT", "textures"]
    assert bars.data[0].y[1] == pytest.approx(100 * (hm(0.7, 0.5) + hm(0.6, 0.6)) / 2)
    scatter = plots.base_novel_scatter(lines)
    assert list(scatter.data[-1].x) == pytest.approx([85, 65])
    for curve in scatter.data[:-1]:  # curves of equal HM
        value = 2 / (1 / curve.x[3] + 1 / curve.y[3])
        assert value == pytest.approx(round(value / 10) * 10)
    heat = plots.fusion_heat_map({"d": {"class": 0.4, "Color": 0.6}})
    assert list(heat.data[0].z[0]) == [0.4, 0.6]


def test_tables_of_equal_file_names_stay_apart():
    sets = [f"/data/{name}/index.csv" for name in ("pets", "birds")]
    results = [base_novel(path, 1, base, 0.5) for path, base in zip(sets, (0.9, 0.3), strict=True)]
    weighed = [(one, {**r, "facts": {"fusion_weights": {"class": 1.0}}}) for one, r in results]
    assert list(plots.bars(gather(results), "hm").data[0].x) == ["pets", "birds"]
    assert list(fusion_weights(weighed)) == ["pets", "birds"]


def changed(cell, **changes):
    return msgspec.structs.replace(cell, spec=cell.spec.changed(**changes))


def test_configurations_of_one_method_are_rows_of_their_own():
    one, result = base_novel("EuroSAT", 1, 0.9, 0.5)
    other = changed(one, options={"beta": 0.1})
    again = changed(one, options={"beta": 0.9})
    lines = gather([(other, result), (again, result)])
    assert [line.method for line in lines] == ["dear (beta=0.1)", "dear (beta=0.9)"]


def test_options_and_recipe_of_one_name_are_told_apart():
    """clip-lora's option `scale` was hidden by the recipe's `scale`, and two variants became one row."""
    one, result = base_novel("EuroSAT", 1, 0.9, 0.5, method="clip-lora")
    cells = [changed(one, options={"scale": scale}, recipe={"scale": [0.5, 1.0]}) for scale in (1, 2)]
    lines = gather([(cell, result) for cell in cells])
    assert [line.method for line in lines] == ["clip-lora (scale=1)", "clip-lora (scale=2)"]
    both = [cells[0], changed(cells[1], recipe={"scale": [0.1, 1.0]})]
    names = [line.method for line in gather([(cell, result) for cell in both])]
    assert names == [
        "clip-lora (scale=1, recipe scale=[0.5, 1.0])",
        "clip-lora (scale=2, recipe scale=[0.1, 1.0])",
    ]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"identity": "sha256:2"}, "backbone=2"),
        ({"template": "a {}."}, "template=a {}."),
        ({"data_digest": "abc"}, "images=abc"),
        ({"shots": 4}, "4 shots"),
    ],
)
def test_no_two_experiments_share_a_row(change, word):
    one, result = base_novel("EuroSAT", 1, 0.9, 0.5)
    other = changed(one, **change)
    lines = gather([(one, result), (other, result)])
    assert len(lines) == 2
    assert word in lines[1].method


def test_a_template_for_each_dataset_is_no_variant():
    pairs = [base_novel(name, 1, 0.9, 0.5) for name in ("EuroSAT", "DescribableTextures")]
    results = [(changed(cell, template=f"{cell.dataset} {{}}."), result) for cell, result in pairs]
    assert {line.method for line in gather(results)} == {"dear"}


def test_fusion_weights_of_other_attributes_are_rows_of_their_own():
    """Two cells of one dataset with other attributes raised a KeyError."""
    one, result = base_novel("EuroSAT", 1, 0.9, 0.5)
    other = changed(one, options={"attributes": ["Color"]})
    results = [
        (one, {**result, "facts": {"fusion_weights": {"class": 0.6, "Color": 0.2, "Shape": 0.2}}}),
        (other, {**result, "facts": {"fusion_weights": {"class": 0.5, "Color": 0.5}}}),
    ]
    weights = fusion_weights(results)
    assert list(weights.values()) == [
        {"class": 0.6, "Color": 0.2, "Shape": 0.2},
        {"class": 0.5, "Color": 0.5},
    ]
    assert all(name.startswith("EuroSAT, dear (attributes=") for name in weights)


def test_columns_that_only_later_versions_have_are_shown_where_they_are_there(two_sets):
    old = table("base-to-novel", gather(two_sets))
    assert old.columns == ("Base", "Novel", "HM (each seed, averaged)", "HM of means")
    one, result = base_novel("EuroSAT", 3, 0.9, 0.4)
    row = {**result["modes"]["fused"], "joint": 0.6, "joint_hm": 0.5, "ece_base": 0.1}
    auto = {"base": 0.9, "novel": 0.7, "hm": hm(0.9, 0.7), "joint": 0.8}
    sheet = table("base-to-novel", gather([*two_sets, (one, {"modes": {"fused": row, "auto": auto}})]))
    assert sheet.columns[4:] == ("Joint", "Joint HM", "ECE base")
    fused = numbers(sheet, "EuroSAT", "dear", "fused")
    assert fused[0].seeds == 3
    assert (fused[4].mean, fused[4].seeds) == (0.6, 1)
    assert numbers(sheet, "EuroSAT", "dear", "auto")[1].mean == 0.7
    assert all(len(row.entries) == len(sheet.columns) for row in sheet.rows)
    assert "expected calibration error" in markdown(sheet)


def test_a_study_whose_variant_failed_shows_the_others(tmp_path):
    study = STUDIES["losses"]
    grid = Grid(tmp_path)
    planned = []
    for number, variant in enumerate(study.variants):
        one = changed(cell("base-to-novel", "d", 1), options={"number": number})
        if number:
            grid.store(Outcome(one, {"modes": {"fused": {"base": 0.5, "novel": 0.5, "hm": 0.5}}}))
        planned.append((variant, [one]))
    first, *_ = write_studies(grid, [(study, planned)], failed={"ce": "it failed"})
    assert "ce+reg+fusion" in first.read_text()


def test_help_needs_neither_torch_nor_plotly():
    code = (
        "import sys; from dear.cli import build_app; assert not {'torch', 'plotly', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
