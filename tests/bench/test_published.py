"""The stored tables against their own arithmetic: every disagreement is a listed slip, every slip is real."""

import pytest

from dear.bench import published
from dear.errors import UsageError

HALF = 0.005  # a number printed with two decimals stands for an interval of this half width


def _band(base, novel):
    """Least and largest HM of columns that round to `base` and `novel`."""
    low, high = ((base - HALF, novel - HALF), (base + HALF, novel + HALF))
    return tuple(2 / (1 / b + 1 / n) for b, n in (low, high))


def _printed_columns(table):
    for row in table.rows:
        for dataset in dict.fromkeys(name for name, _ in row.cells):
            yield row, dataset, {c: row.cells[dataset, c] for c in table.columns}


def test_hm_of_every_row_follows_from_its_columns_except_the_listed_slips():
    disagreeing = set()
    for table in published.tables():
        if table.columns != ("base", "novel", "hm"):
            continue
        for row, dataset, number in _printed_columns(table):
            low, high = _band(number["base"].printed, number["novel"].printed)
            if not low - HALF - 1e-9 <= number["hm"].printed <= high + HALF + 1e-9:
                disagreeing.add((table.name, row.label, dataset))
    listed = {
        (slip["table"], slip["row"], slip["dataset"])
        for slip in published.slips()
        if not (slip["row"] == "ProVP" and slip["dataset"] == "Average")  # wrong means of consistent HM
    }
    assert disagreeing == listed


def test_corrected_numbers_agree_everywhere():
    for table in published.tables():
        if table.columns != ("base", "novel", "hm"):
            continue
        for row, dataset, number in _printed_columns(table):
            low, high = _band(number["base"].value, number["novel"].value)
            assert low - HALF - 1e-9 <= number["hm"].value <= high + HALF + 1e-9, (
                table.name,
                row.label,
                dataset,
            )


def test_averages_are_means_of_their_columns_after_correction():
    for name, excluded in (("main-2", ()), ("main-3", ("ImageNet",)), ("main-4", ("ImageNet",))):
        table = published.table(name)
        for row in table.rows:
            for column in set(table.columns) - {"hm"}:
                values = [
                    number.value
                    for (dataset, c), number in row.cells.items()
                    if c == column and dataset not in ("Average", *excluded)
                ]
                mean = sum(values) / len(values)
                assert row.cells["Average", column].value == pytest.approx(mean, abs=2 * HALF + 1e-9), (
                    name,
                    row.label,
                    column,
                )


def test_the_slips_of_the_method_page_are_listed_with_their_true_values():
    dear = published.table("main-2").row("DeAR")
    expected = {
        "Caltech101": (96.95, 97.37),
        "OxfordPets": (96.81, 97.42),
        "Food101": (90.93, 90.99),
        "DescribableTextures": (79.62, 79.53),
    }
    for dataset, (printed, corrected) in expected.items():
        number = dear.number(dataset, "hm")
        assert (number.printed, number.value) == (printed, corrected)
        assert number.note
    assert {claim["value"] for claim in published.claims()} == {2.57, 0.67, 0.88}


def test_shape_of_the_tables():
    main = published.table("main-2")
    assert len(main.rows) == 13
    assert all(len(row.cells) == 12 * 3 for row in main.rows)
    assert main.row("DeAR").method == "dear"
    assert published.for_protocol("domain-shift").name == "main-4"
    assert published.for_study("masks").row("All-Mixed").number("Average", "hm").value == 80.93
    with pytest.raises(UsageError, match="main-9"):
        published.table("main-9")


def test_reruns_follow_their_row_with_their_source_and_their_own_arithmetic():
    main = published.table("main-2")
    for rerun in main.reruns:
        assert rerun.source.startswith("https://")
        assert main.row(rerun.label).number("EuroSAT", "hm").value > rerun.number("EuroSAT", "hm").value
    (prompts,) = main.reruns_of("PromptSRC")
    low, high = _band(prompts.number("Average", "base").value, prompts.number("Average", "novel").value)
    assert low - HALF <= prompts.number("Average", "hm").value <= high + HALF
    sets = [
        number
        for (dataset, column), number in prompts.cells.items()
        if (dataset == "Average") < (column == "base")
    ]
    assert sum(number.value for number in sets) / len(sets) == pytest.approx(84.24, abs=2 * HALF)
    assert prompts.title == "PromptSRC, rerun by others"


def test_rows_with_unlabeled_images_of_new_classes_are_marked():
    main = published.table("main-2")
    assert [row.label for row in main.rows if row.unlabeled] == ["PromptKD"]
    assert "unlabeled" in main.row("PromptKD").title
    assert "unlabeled" not in main.row("DeAR").title
