"""Writes docs/results/: every table of measurements, from its CSV file.

    python scripts/results.py

A table is the mean over everything that is not named in `rows` or `columns` (seeds, draws, repeats), with the number of
measurements; each names its command, machines, versions, dates, and the commit that last changed the CSV file.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from natsort import natsorted

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "results"
BENCHMARKS, RESEARCH = "benchmarks/results", "research/results"


@dataclass(frozen=True)
class Table:
    """One table: which CSV file, what its rows and columns are, and the command that measured it."""

    title: str
    file: str  #: below the repository root
    command: str
    rows: tuple[str, ...]
    values: tuple[str, ...]
    columns: str | None = None  #: a column of the file whose values become columns; needs a single value
    where: str | None = None  #: a pandas query
    note: str = ""
    recipes: bool = False  #: whether rows of DeAR name the version of their recipe
    aims: Callable[[pd.DataFrame], str] | None = None  #: which aims the whole file meets, in words


def _accuracy(title: str, name: str, command: str, *, where: str | None = None, note: str = "") -> Table:
    values = ("base", "novel", "hm")
    return Table(
        title, f"{RESEARCH}/{name}.csv", command, ("dataset", "method", "mode"), values, None, where, note
    )


SMALL = "`SMALL` is the folder of a small CLIP (ViT-S/14, 112 pixels) trained on 121,000 photos."
PRESENT_RECIPE = "run 7"
GRID = f"{RESEARCH}/grid.csv"
GRID_COMMAND = "python research/grid.py research/grid_plan*.txt --root DATA --small SMALL --device cuda --jobs 14 --out CSV"
GRID_NOTE = (
    "Percent, all classes, three seeds; photos by `small` (all heads mixed; Caltech101: 40 of 100 classes, EuroSAT: every third "
    "test image), world tasks by `mini`. Methods on frozen features ran partly on a CPU."
)
TRIALS_NOTE = (
    " Variants were measured with the recipe of run 5, `dear[variant=rate10]`, in which lambda learns more slowly: compare with "
    "that row. Those of runs 11 and 13 (`m7`, `m8`, `late`, `late-only`, `m7-late`, `m8-late`, `plain`, `pulled`, `halves`) were "
    "measured with the present recipe: compare with `dear`."
)
USUAL_MODE = "(mode in ('default', 'auto') or (mode == 'fused' and method.str.startswith('dear')))"
DEVELOPMENT = ("world:textures", "world:scenes", "DescribableTextures", "Caltech101")
SEARCH = "dear bench base-to-novel --methods dear --set dear.OPTION=VALUE"
SEARCHED = "Measured with a script of version 0.1 that also weighed class token and frozen feature; figures are of that recipe."
RECIPE_DATES = (("2026-11-16", "paper"), ("2026-11-18", "first"))  #: recipe of rows from before each date
RECIPE_NOTE = (
    "`recipe` is the version of DeAR's default: `paper`; `first`, `strong` without class directions; `run 3`, `run 5`, `run 7`, as "
    f"chosen by these runs of research/few_shot/RULES.md. The present one is `{PRESENT_RECIPE}`; "
)
UNLABELED = "python research/labels/unlabeled.py --backbone SMALL --root DATA --datasets NAMES"
TOWER = "('dear', 'mmrl', 'coop')"
POOLS = (
    "`none`: labeled images only; `rest`: with all other training images as a pool. The decision of the product "
    "counts. World tasks by `mini`, photos by a small CLIP; the columns are labels per class. Draws: probe five (three on EuroSAT and "
    "OxfordPets), ProKeR and LP++ one to three, scikit-learn, TransCLIP, and StatA one on world tasks. DTD at one label was measured "
    "after neighbors in the span of the texts had to prove themselves (LOG.md)."
)
TOWER_POOLS = (
    "Three draws, one H200. `rest, forced`: trained with the pool also where the product leaves it out. The decision is that of "
    "cross-validation of the probe on frozen features (computed afterwards with the present rule). Where DeAR loses more than a point, "
    "DeAR alone is better than the probe that labels the pool, which the probe's cross-validation cannot see. With one label per class "
    "on DTD, one draw of three has neighbors by wrong words, which was corrected later."
)
TENS = ("DTD, 10 classes", "world:scenes", "world:textures")  #: datasets with about ten classes


def pool_aims(data: pd.DataFrame) -> str:
    """Whether a pool costs a method on frozen features more than a point."""
    rest = data.query(f"labels == 'random' and method not in {TOWER}")
    return f"Aim: with a pool, no method loses more than a point: {_losses(rest, ['rest'])}"


def tower_aims(data: pd.DataFrame) -> str:
    """Whether a pool costs a method of the tower more than a point, and whether DeAR is first or within a point."""
    random = data.query("labels == 'random'")
    losses = _losses(random.query(f"method in {TOWER}"), ["rest"])
    means = (
        random.query("pool == 'rest'")
        .groupby(["dataset", "labels_per_class", "method"])["accuracy"]
        .mean()
        .unstack()
    )
    means = means[means["dear"].notna()]
    best, name_of_best = means.drop(columns="dear").max(axis=1), means.drop(columns="dear").idxmax(axis=1)
    missed = [
        f"{name} with {labels} per class ({row['dear']:.1f}; {name_of_best[name, labels]} {best[name, labels]:.1f})"
        for (name, labels), row in means.iterrows()
        if row["dear"] < best[name, labels] - 1
    ]
    return (
        f"Aims: (1) with a pool, no method loses more than a point: {losses} (2) With a pool, DeAR is first or within a point of "
        f"all methods: met in {len(means) - len(missed)} of {len(means)} cells{'; missed on ' + ', '.join(missed) if missed else ''}."
    )


def bad_pool_aims(data: pd.DataFrame) -> str:
    """Whether unbalanced pools and foreign images cost more than a point."""
    pools = ["unbalanced", "foreign"]
    random = data[data["labels"] == "random"]
    texts = [f"{pool}: {_losses(random, [pool])}" for pool in pools]
    return "Aim: with these pools, too, no method loses more than a point. " + " ".join(texts)


def chosen_aims(data: pd.DataFrame) -> str:
    """Whether chosen labels with a pool reach what more labels drawn regardless of the class reach without."""
    means = (
        data.query("labels != 'random'")
        .groupby(["labels", "pool", "labels_per_class", "dataset"])["accuracy"]
        .mean()
    )
    cells = {
        (labels, name): (means["chosen", "rest", labels, name], means["any", "none", 2 * labels, name])
        for labels in (1, 2)
        for name in means["chosen", "rest", labels].index
        if name in means["any", "none", 2 * labels]
    }
    missed = [
        f"{name} with {labels} ({chosen:.1f}, {twice:.1f})"
        for (labels, name), (chosen, twice) in cells.items()
        if chosen < twice
    ]
    tens = [name for name in TENS if name in means["chosen", "rest", 1] and name in means["any", "none", 4]]
    quarter = means["chosen", "rest", 1][tens].mean()
    four = means["any", "none", 4][tens].mean()
    return (
        "Aims: chosen labels with a pool reach what twice as many labels drawn regardless of the class reach without "
        f"one, on every dataset: {'missed on ' + ', '.join(missed) if missed else 'met'}; and what four times as many "
        f"reach, on average over datasets with about ten classes: {'met' if quarter >= four else 'missed'} "
        f"({quarter:.1f}, {four:.1f}). The rule for the first labels is the best of five on these datasets, so its "
        "figures are optimistic."
    )


def _losses(data: pd.DataFrame, pools: list[str]) -> str:
    """How often accuracy with a pool is more than a point below that without, in means of draws and single draws."""
    keys = ["dataset", "method", "labels_per_class", "draw"]
    none = data.query("pool == 'none'").groupby(keys)["accuracy"].mean()
    change = (data[data["pool"].isin(pools)].groupby(keys)["accuracy"].mean() - none).dropna()
    cells = change.groupby(keys[:3]).mean()
    lost = cells[cells < -1].sort_values()
    named = ", ".join(
        f"{method} on {name} with {labels}: {value:.1f}" for (name, method, labels), value in lost.items()
    )
    verdict = "met" if lost.empty else "missed"
    return (
        f"{verdict} in the mean of the draws ({len(lost)} of {len(cells)} cells lose more{f': {named}' if named else ''}; "
        f"{int((change < -1).sum())} of {len(change)} single draws do, the largest loss is {max(0.0, -change.min()):.1f} "
        "points)."
    )


TABLES: dict[str, tuple[str, tuple[Table, ...]]] = {
    "accuracy": (
        "Accuracy of methods",
        (
            _accuracy(
                "Base-to-novel, all methods", "fair_table",
                "python research/accuracy/fair_table.py run --out fair --data-root DATA --small SMALL",
                note=SMALL + " Rows of `strong` are in *Recipe `strong` and its variants*.",
            ),
            Table(
                "Few-shot: the paper's Figure 4", GRID, GRID_COMMAND, ("backbone", "method"), ("accuracy",), "shots",
                "protocol == 'few-shot' and not method.str.contains('[', regex=False) and " + USUAL_MODE,
                GRID_NOTE + " ![Accuracy by images per class](../images/few-shot.svg) Here the means over datasets, `small`: four of "
                "photos, `mini`: six world tasks. CLIP-LoRA, Skip Tuning, and MaPLe have one seed, the first two on development sets "
                "alone with 1, 4, and 16 images: their rows do not compare with the others.",
            ),
            Table(
                "Few-shot by dataset", GRID, GRID_COMMAND, ("dataset", "method"), ("accuracy",), "shots",
                "protocol == 'few-shot' and not method.str.contains('[', regex=False) and " + USUAL_MODE, GRID_NOTE,
            ),
            Table(
                "Base-to-novel with 16 images, means", GRID, GRID_COMMAND, ("backbone", "method"),
                ("base", "novel", "hm", "joint", "joint_novel"), None,
                "protocol == 'base-to-novel' and not method.str.contains('[', regex=False) and " + USUAL_MODE,
                GRID_NOTE + " `small`: the mean over four datasets of photos, `mini`: over six world tasks. Skip Tuning has one seed.",
            ),
            Table(
                "Base-to-novel with 16 images, by dataset", GRID, GRID_COMMAND, ("dataset", "method"),
                ("base", "novel", "hm", "joint", "joint_novel"), None,
                "protocol == 'base-to-novel' and not method.str.contains('[', regex=False) and " + USUAL_MODE, GRID_NOTE,
            ),
            Table(
                "`center` of `strong`, base-to-novel", GRID, GRID_COMMAND, ("dataset", "method"),
                ("base", "novel", "hm", "joint", "joint_novel"), None,
                "protocol == 'base-to-novel' and (method == 'dear[variant=rate10]' or method.str.contains('center', regex=False)) "
                "and " + USUAL_MODE, GRID_NOTE + TRIALS_NOTE,
            ),
            Table(
                "Variants of `strong`, few-shot on the development sets", GRID, GRID_COMMAND, ("backbone", "method"), ("accuracy",),
                "shots", "protocol == 'few-shot' and seed < 3 and dataset in @DEVELOPMENT and method.str.startswith('dear') and "
                "method not in ('dear@quick', 'dear[factors=yes]') and " + USUAL_MODE,
                GRID_NOTE + TRIALS_NOTE + " Seeds 1 and 2 of two datasets of photos (`small`) and two world tasks (`mini`); `dear` is "
                "the recipe that was chosen.",
            ),
            Table(
                "Variants of `strong`, base-to-novel on the development sets", GRID, GRID_COMMAND, ("backbone", "method"),
                ("base", "novel", "hm", "joint", "joint_novel"), None,
                "protocol == 'base-to-novel' and seed < 3 and dataset in @DEVELOPMENT and method.str.startswith('dear') and not "
                "method.str.contains('roles', regex=False) and " + USUAL_MODE, GRID_NOTE + TRIALS_NOTE,
            ),
            Table(
                "Trained tokens with other values of lambda", GRID, GRID_COMMAND, ("dataset", "mode"), ("accuracy",), "shots",
                "method == 'dear[factors=yes]' and mode != 'decoupled'",
                GRID_NOTE + TRIALS_NOTE + " `fused`: lambda as it was learned.",
            ),
            Table(
                "Few-shot by `dear bench`, an earlier recipe of DeAR", f"{RESEARCH}/few_shot_bench.csv",
                "dear bench few-shot --backbone SMALL --methods dear,mmrl,proker,tip-adapter-f,lp-plus-plus,coop,promptsrc,"
                "skip-tuning,clip-lora,linear-probe,zeroshot --datasets DTD,CALTECH --seeds 1,2,3",
                ("dataset", "method", "mode"), ("accuracy",), "shots",
                note=SMALL + " All heads mixed; Caltech101: 40 of 100 classes. CLIP-LoRA, the probe, and most of Skip "
                "Tuning are missing on Caltech101: the device time ended.", recipes=True,
            ),
            Table(
                "Few images per class", f"{RESEARCH}/few_images.csv",
                "python research/accuracy/first_hour.py --few --backbone SMALL --data DATA/oxford_pets/index.csv",
                ("dataset", "draw", "method"), ("accuracy", "seconds"),
                note="Fractions of 1; ten classes. `3 per class`: three images each, draws of three seeds; `unbalanced`: two classes with 16 "
                "images, four with 2, four with 1. DeAR's recipe is that of 2026-11-16.",
            ),
            Table(
                "Cross-dataset", f"{RESEARCH}/small_cross_dataset.csv",
                "dear bench cross-dataset --backbone SMALL --methods dear@paper,coop,maple,mmrl,promptsrc,zeroshot "
                "--datasets DATA/caltech101/index.csv --targets TABLES",
                ("method", "mode"), ("accuracy",), "dataset", note="Trained on Caltech101 with 16 images per class. `dear` is `dear@paper`.",
            ),
            Table(
                "Recipe `strong` and its variants", f"{RESEARCH}/strong_table.csv", SEARCH,
                ("variant", "dataset"), ("base", "novel", "hm", "joint"), note=SEARCHED,
            ),
            Table(
                "Search for `strong`, first rounds", f"{RESEARCH}/dear_search.csv", SEARCH,
                ("round", "variant"), ("base", "novel", "hm", "joint"), note=SEARCHED,
            ),
            Table(
                "Ablations on mini", f"{RESEARCH}/mini_ablations.csv",
                "dear ablate masks,losses,inference,threshold,concepts,shuffle,beta,first-layer,isolation",
                ("method", "changed", "roles", "mode"), ("base", "novel", "hm"), note="Every row changes `dear@paper`.",
            ),
            Table(
                "Training on a CPU: new views or a few fixed ones", f"{RESEARCH}/cpu_training.csv",
                "python research/speed/cpu_training.py", ("dataset", "views", "precision"),
                ("training_cpu_s", "accuracy_fused", "accuracy_decoupled"),
            ),
        ),
    ),
    "labels": (
        "Few labels and unlabeled images",
        (
            Table(
                "Labels drawn per class, with and without the remaining images as a pool", f"{RESEARCH}/unlabeled.csv",
                UNLABELED, ("dataset", "method", "pool"), ("accuracy",), "labels_per_class",
                f"labels == 'random' and pool in ('none', 'rest') and method not in {TOWER}", POOLS, aims=pool_aims,
            ),
            Table(
                "Methods trained through the tower, with and without the remaining images as a pool", f"{RESEARCH}/unlabeled.csv",
                UNLABELED + " --methods dear,mmrl,coop --pools none,rest --forced --device cuda --jobs 14",
                ("dataset", "method", "pool"), ("accuracy",), "labels_per_class",
                f"labels == 'random' and method in {TOWER}", TOWER_POOLS, aims=tower_aims,
            ),
            Table(
                "Unbalanced pools (60 to 2 images per class) and pools with 30 % foreign images",
                f"{RESEARCH}/unlabeled.csv", UNLABELED + " --foreign OTHER", ("dataset", "method", "pool"), ("accuracy",),
                "labels_per_class", "labels == 'random' and method in ('probe', 'proker', 'lp-plus-plus') and dataset != 'Caltech101' "
                "and not (dataset == 'OxfordPets' and method != 'probe')", POOLS, aims=bad_pool_aims,
            ),
            Table(
                "Labels chosen by `dear label next`, and as many at random", f"{RESEARCH}/unlabeled.csv",
                UNLABELED + " --choices any,chosen", ("dataset", "labels", "pool"), ("accuracy",), "labels_per_class",
                "labels != 'random'",
                "A probe; `any` are images drawn regardless of their class, the columns are the mean number of labels per class.",
                aims=chosen_aims,
            ),
            Table(
                "Base-to-novel with unlabeled images of both halves of the classes", f"{RESEARCH}/unlabeled_new_classes.csv",
                "python research/labels/unlabeled_new_classes.py --backbone SMALL --root DATA --methods zero-shot,probe",
                ("dataset", "method", "unlabeled"), ("base", "new", "harmonic_mean", "all"),
                note="New classes have names and unlabeled images (the setting of PromptKD): not comparable with "
                "base-to-novel tables elsewhere.",
            ),
            Table(
                "Whether forecasts of the labeling page come true", f"{RESEARCH}/label_forecast.csv",
                "python research/labels/label_forecast.py --backbone SMALL --root DATA", ("dataset", "labels"),
                ("held_out", "accuracy", "test_accuracy", "gain", "test_gain", "accuracy_inside", "gain_inside"),
                note="`inside`: percentage of draws whose test accuracy, or gain of 50 more labels, lies in the stated "
                "90 % interval. EuroSAT took no part in choosing them.",
            ),
            Table(
                "Time and memory as the pool grows", f"{RESEARCH}/unlabeled_scale.csv",
                "python research/labels/unlabeled_scale.py", ("device", "threads", "images", "stage"),
                ("seconds", "processor_seconds", "more_mib"),
                note="One thread. The probe of 100,000 images ran on a busy machine: its processor seconds count.",
            ),
        ),
    ),
    "domains": (
        "Head Purification and unseen domains",
        (
            Table(
                "PACS, small CLIP", f"{RESEARCH}/small_pacs.csv",
                "dear bench leave-one-domain-out --backbone SMALL --methods purify@paper,zeroshot --datasets PACS --set purify.OPTION=VALUE",
                ("method", "changed", "mode"), ("target",), "held_out", note="`purify` is `purify@paper`.",
            ),
            Table(
                "world:domains, mini", f"{RESEARCH}/mini_domains.csv",
                "dear bench leave-one-domain-out --methods purify@paper,zeroshot --datasets world:domains --set purify.OPTION=VALUE",
                ("method", "changed", "mode"), ("target",), "held_out", note="`purify` is `purify@paper`.",
            ),
            Table(
                "Purification and its rivals, three seeds", f"{RESEARCH}/lodo_rivals.csv",
                "dear bench leave-one-domain-out --backbone SMALL --methods purify,mmrl,skip-tuning,dear,proker,clip-lora,"
                "linear-probe,promptsrc,coop,zeroshot --datasets PACS --seeds 1,2,3",
                ("dataset", "method", "changed", "mode"), ("target",), "held_out",
                note="world:domains: zero-shot and ProKeR have all four unseen domains on a CPU, other rivals one (the device time "
                "ended); purification has one seed on a CPU and two domains, without the comparison with `gates=False`.", recipes=True,
            ),
            Table(
                "world:domains and PACS, three seeds", GRID, GRID_COMMAND, ("dataset", "method"), ("target",), "held_out",
                "protocol == 'leave-one-domain-out' and " + USUAL_MODE,
                "Percent. `purify` has head dropout 0.3 and 40 epochs. On PACS, other rivals than MMRL are in the table above; the mean over"
                " both datasets' unseen domains is on the [page of purification](../purification.md).",
            ),
            Table(
                "Style centroids, and the most that removing heads can gain", f"{RESEARCH}/style_centroids.csv",
                "python research/domains/style_centroids.py", ("dataset", "way"), ("zero_shot", "probe", "removed"),
            ),
            Table(
                "Recipe `strong` of purification", f"{RESEARCH}/lodo_strong.csv",
                "dear bench leave-one-domain-out --methods purify,dear,mmrl,linear-probe,zeroshot --datasets world:domains",
                ("dataset", "method", "changed"), ("target", "validation"), recipes=True,
            ),
            Table(
                "Search for purification", f"{RESEARCH}/purify_search.csv",
                "dear bench leave-one-domain-out --methods purify --datasets world:domains --set purify.OPTION=VALUE",
                ("dataset", "stage", "changes"), ("target", "validation", "gate_sd"),
            ),
        ),
    ),
    "answers": (
        "Calibration, rejection, and choice of methods",
        (
            Table(
                "Calibration error, trained and new classes", f"{RESEARCH}/answers.csv",
                "python research/answers/answers.py run --data-root DATA --small SMALL", ("dataset", "method", "mode"),
                ("trained_accuracy", "ece_trained_before", "ece_trained_after", "ece_trained_floor",
                 "ece_new_before", "ece_new_after"),
                note="`floor` is the error that a perfectly calibrated model shows on as many images.",
            ),
            Table(
                "Calibration error of methods inside the tower, 4 and 16 images per class",
                f"{RESEARCH}/calibration.csv",
                "python research/answers/calibration.py run --keep kept --backbone SMALL --shots 4,16",
                ("method", "mode", "shots"), ("accuracy", "ece_before", "ece", "ece_perfect"),
                note="Seven datasets (Caltech101, DTD, OxfordPets, EuroSAT, PACS, world:textures, world:scenes), "
                "at most 20 classes and 400 test images each. `ece_perfect` is the error that a perfectly "
                "calibrated model shows on the same images.",
            ),
            Table(
                "The same by dataset", f"{RESEARCH}/calibration.csv",
                "python research/answers/calibration.py rows --keep kept", ("task", "shots"),
                ("accuracy", "ece_before", "ece", "ece_perfect"),
            ),
            Table(
                "Share of draws whose refused images lie in the stated interval",
                f"{RESEARCH}/refusal_coverage.csv",
                "python research/answers/refusal_coverage.py run --keep draws.csv --draws 200", ("task", "method", "shots"),
                ("draws", "refused_mean", "low", "high", "inside", "above", "below", "p_below_5", "p_below_1"),
                note="`drift` trains nothing: its share is that of far images where nothing changed, and "
                "`p_below_5` and `p_below_1` are the shares of its p-values below 5 % and 1 %.",
            ),
            Table(
                "Rejection", f"{RESEARCH}/unknown_images.csv", "python research/answers/unknown_images.py --backbone SMALL",
                ("backbone", "task", "method"),
                ("refused", "low", "high", "near_auroc", "near_accepted", "far_auroc", "far_accepted"),
            ),
            Table(
                "What `dear choose` recommends", f"{RESEARCH}/answers_choose.csv", "python research/answers/answers.py choose",
                ("dataset", "method"), ("cross_validated", "effort"),
            ),
            Table(
                "Wrong labels", f"{RESEARCH}/wrong_labels.csv", "python research/data/wrong_labels.py --backbone SMALL",
                ("data", "ranking"), ("average_precision", "auroc", "suspected", "found"),
            ),
        ),
    ),
    "data": (
        "Several labels, several texts, class trees, new classes",
        (
            Table(
                "Several labels per image", f"{RESEARCH}/several_labels.csv", "python research/data/formats.py labels",
                ("task", "shots", "method"), ("map", "micro_f1", "macro_f1", "accuracy", "ece", "seconds"),
                note="mini, world:attributes (18 labels). scikit-learn: one logistic regression per label on the same "
                "features, C by cross-validation, labels from a probability of 1/2 on. `exchanged`: class names are "
                "exchanged, so that texts mislead. `accuracy` is the share of exact sets; seconds are user time "
                "with calibration, without features.",
            ),
            Table(
                "Several texts per class", f"{RESEARCH}/several_texts.csv", "python research/data/formats.py texts",
                ("dataset", "method", "shots"), ("accuracy",), "texts", note=SMALL + " The class name and two sentences.",
            ),
            Table(
                "Class trees: answers with nodes compared with plain rejection", f"{RESEARCH}/class_trees.csv",
                "python research/data/formats.py trees", ("reject", "answers", "certain", "part"),
                ("coverage", "accuracy", "exact", "bits", "unknown_answered"),
                note=SMALL + " 40 classes of Caltech101 in a tree of up to three levels; ProKeR and linear probe, 4 and 16 "
                "images. `certain` is --certain; `part` of the rejected share is answered with \"none of these\". `exact`: "
                "images answered with their class; `bits`: information of right answers per image (5.32 at most).",
            ),
            Table(
                "A new class from five photos", f"{RESEARCH}/extend.csv", "python research/data/formats.py extend",
                ("dataset", "method", "way"), ("accuracy", "old", "added", "seconds"),
                note="Half of the classes are trained on 8 images each. Seconds are user time.",
            ),
        ),
    ),
    "shortcuts": (
        "Shortcuts: found and removed",
        (
            Table(
                "Marks planted on all images of one class, and findings on clean images",
                f"{RESEARCH}/planted_marks.csv", "python research/shortcuts/planted_marks.py --data DATA/pacs/index.csv",
                ("mark", "dataset"), ("planted", "found", "findings_elsewhere"),
                note="The limits of tint, vignette, and spots were chosen on Caltech101, DTD, OxfordPets, and "
                "EuroSAT; PACS took no part in it.",
            ),
            Table(
                "Concepts planted in one class, and findings on clean images",
                f"{RESEARCH}/planted_concepts.csv",
                "python research/shortcuts/planted_concepts.py --backbone mini", ("backbone", "data", "plant"),
                ("planted", "found", "found_without_rule", "elsewhere", "elsewhere_without_rule"),
                note="`without_rule`: if a value of one class were not compared with random directions.",
            ),
            Table(
                "Worst group on planted shortcuts, mini", f"{RESEARCH}/shortcuts.csv",
                "python research/shortcuts/world.py repair", ("shortcut", "correlation", "method"), ("worst_group",), "way",
                note="Fractions of 1. Correlation 1: every training image of a class shows its place, color, …; the test images show all. "
                "`dear@strong` and `dear@quick` are the recipes of 2026-11-16; `dear@strong[center=1]` is the present `strong`.",
            ),
            Table(
                "Audit of planted shortcuts", f"{RESEARCH}/shortcuts_audit.csv", "python research/shortcuts/world.py audit",
                ("data", "planted", "verdict"), ("others_suspected",),
            ),
            Table(
                "Marks planted in photos", f"{RESEARCH}/shortcuts_photos.csv", "python research/shortcuts/photos.py find",
                ("dataset", "mark"), ("score", "findings"),
            ),
            Table(
                "Repair of marks in photos", f"{RESEARCH}/shortcuts_photos_repair.csv",
                "python research/shortcuts/photos.py repair", ("dataset", "mark", "chosen"),
                ("nothing_accuracy", "nothing_marked", "copies_accuracy", "copies_marked", "directions_accuracy",
                 "directions_marked", "random_marked", "clean_accuracy", "clean_marked"),
            ),
            Table(
                "Objects on textures and domains, small CLIP", f"{RESEARCH}/shortcuts_real.csv",
                "python research/shortcuts/real.py", ("task", "share", "way"), ("accuracy", "worst_group"),
            ),
        ),
    ),
    "heads": (
        "Roles, focus, explanations, retrieval",
        (
            Table(
                "Rules for roles against the known factors of mini", f"{RESEARCH}/roles_trials.csv",
                "python research/heads/roles_trials.py", ("trial",), ("named", "right", "core", "core_right"),
            ),
            Table(
                "Measured, mixed, and shuffled roles, base-to-novel", GRID, GRID_COMMAND, ("backbone", "method"),
                ("base", "novel", "hm", "joint"), None,
                "protocol == 'base-to-novel' and (dataset.str.startswith('world') or dataset == 'DescribableTextures') and "
                "(method == 'dear[variant=rate10]' or method.str.contains('roles', regex=False)) and " + USUAL_MODE,
                "Percent, 16 images, three seeds. `mini`: six world tasks, `dear[variant=rate10]` has the measured roles. `small`: DTD, "
                "`dear[variant=rate10]` has all heads mixed, `roles=measured` those found from its weights.",
            ),
            Table(
                "Focus on the heads of a role, mini", f"{RESEARCH}/focus.csv", "python research/heads/focus.py",
                ("task", "focus", "images"), ("whole", "role", "role_alone", "random", "other_roles"),
            ),
            Table(
                "Focus chosen by cross-validation", f"{RESEARCH}/focus_auto.csv", "python research/heads/focus.py auto",
                ("backbone", "task", "map", "images"), ("whole", "chosen"),
            ),
            Table(
                "Focus chosen by cross-validation, small CLIP", f"{RESEARCH}/focus_small.csv",
                "python research/heads/focus.py auto --backbone SMALL --roles roles.json --data NAME=TABLE",
                ("task", "map", "images"), ("whole", "chosen"),
            ),
            Table(
                "Focus with DeAR, base-to-novel on mini", f"{RESEARCH}/focus_dear.csv",
                "python research/heads/focus.py dear --shots 4 --seeds 1,2,3 --maps none,own --centers 1,0",
                ("task", "focus", "center", "map"), ("base", "novel", "hm", "joint"),
                note="Four images per class. `map`: none, the heads of the task's role, or as many by a shuffled map. Rows without "
                "`center`: the recipe of 2026-11-16, one seed.",
            ),
            Table(
                "Explanations of planted shortcuts", f"{RESEARCH}/explain_shortcuts.csv",
                "python research/heads/explain.py shortcuts", ("shortcut",), ("accuracy", "named_first", "named_by_heads"),
            ),
            Table(
                "Regions: masks of known objects", f"{RESEARCH}/explain_masks.csv", "python research/heads/explain.py masks",
                ("question", "method"), ("auc", "energy", "pointing"),
            ),
            Table(
                "Regions: deletion and insertion on photos", f"{RESEARCH}/explain_photos.csv",
                "python research/heads/explain.py photos --backbone SMALL", ("data", "method"), ("deletion", "insertion"),
            ),
            Table(
                "Retrieval by attribute", f"{RESEARCH}/retrieval.csv", "python research/heads/retrieval.py",
                ("attribute",), ("by_heads", "whole_feature", "random_heads", "true_heads", "chance"),
            ),
        ),
    ),
    "speed": (
        "Speed",
        (
            Table(
                "Training step, ms", f"{BENCHMARKS}/step.csv", "python benchmarks/step.py compare --device cuda --mmrl MMRL",
                ("machine", "batch", "classes"), ("ms",), "step",
                note="ViT-B/16, random weights; MMRL++ float16 with a scaler, the literal step bfloat16 autocast, dear bfloat16 matrices. "
                "Launching was slow in this run: the columns of MMRL++ and of the literal step are upper bounds. Two other runs gave the "
                "literal step 34 and 43 ms at batch 16 and 50 classes (`benchmarks/results/step_log.csv`). For MMRL++ this is our only "
                "run; 44, 44, 62, and 73 ms at 10, 50, 100, and 500 classes have been reported to us for the same code on an H200 with "
                "PyTorch 2.11 (`benchmarks/results/mmrl_reported.csv`, not our measurement).",
            ),
            Table(
                "Training step, measured again", f"{BENCHMARKS}/step_again.csv", "python benchmarks/step.py compare --device cuda",
                ("batch", "classes"), ("ms",), "step",
            ),
            Table(
                "This version compared with 0.1.0 on a GPU", f"{BENCHMARKS}/against.csv",
                "python benchmarks/against.py --base build/base --device cuda",
                ("shape", "work", "batch", "classes"), ("ms", "base_ms", "ratio"), where="machine.str.contains('NVIDIA')",
                note="A step of DeAR (preset `paper`) and its answers to a batch.",
            ),
            Table(
                "This version compared with 0.1.0 on a CPU", f"{BENCHMARKS}/against.csv",
                "OMP_NUM_THREADS=1 python benchmarks/against.py --base build/base --device cpu --shape mini --classes 10",
                ("shape", "work", "batch", "classes"), ("ms", "base_ms", "ratio"), where="not machine.str.contains('NVIDIA')",
                note="Processor time of a step of DeAR and of its answers to a batch; 0.1.0 used private operations of PyTorch.",
            ),
            Table(
                "Mechanisms on a GPU, each switched off alone", f"{BENCHMARKS}/mechanisms.csv",
                "python benchmarks/mechanisms.py --device cuda --compiled --repeats 5",
                ("work", "batch", "classes", "without"), ("ms", "gain"), where="machine.str.contains('NVIDIA')",
                note="`gain`: the time without the mechanism divided by that with all of them. What each is: "
                "[performance](../performance.md#where-the-speed-comes-from).",
            ),
            Table(
                "Mechanisms on a CPU, each switched off alone", f"{BENCHMARKS}/mechanisms.csv",
                "OMP_NUM_THREADS=1 python benchmarks/mechanisms.py --device cpu --files 128",
                ("work", "batch", "classes", "without"), ("ms", "gain"), where="not machine.str.contains('NVIDIA')",
            ),
            Table(
                "Training step on a CPU, ms", f"{BENCHMARKS}/step_cpu.csv",
                "OMP_NUM_THREADS=2 python benchmarks/step.py compare --device cpu --batch 16 --classes 10 --precision float32",
                ("step", "precision"), ("ms",),
                note="Two idle cores. The literal step is float32 in both runs; it took 8,705 ms beside dear in float32 and 8,350 ms "
                "beside dear in bfloat16.",
            ),
            Table(
                "Losses of 50 steps, literal and ours", f"{BENCHMARKS}/losses.csv", "python benchmarks/step.py losses --device cuda",
                ("precision",), ("literal", "ours", "relative_difference"),
                note="Means over the steps. The largest relative difference is 2.9e-7 in float32 and 7.8e-4 in bfloat16.",
            ),
            Table(
                "How a training step grows on a CPU", f"{BENCHMARKS}/growth.csv",
                "OMP_NUM_THREADS=2 python benchmarks/step.py growth --device cpu --repeats 1",
                ("batch", "classes", "pixels"), ("ms", "teraoperations"),
                note="Float32. Batch, classes, and resolution grow one at a time from 16, 50, and 224.",
            ),
            Table(
                "Cost of `strong` on a CPU", f"{RESEARCH}/strong_cost.csv",
                "OMP_NUM_THREADS=1 python research/speed/strong_cost.py --backbone SMALL",
                ("backbone", "classes", "batch", "precision"),
                ("strong_step_ms", "mmrl_step_ms", "step_to_mmrl", "strong_answers_ms", "quick_answers_ms", "rate_to_quick"),
                note="CPU milliseconds of a training step after the frozen stage, and of answers to 16 images from pixels; works "
                "take turns in one run. Goals: `step_to_mmrl` at most 1, `rate_to_quick` at least 0.85.",
            ),
            Table(
                "Whole trainings of `strong`, `quick`, and MMRL on a CPU", f"{RESEARCH}/strong_training.csv",
                "OMP_NUM_THREADS=1 python research/speed/strong_cost.py --backbone SMALL --epochs 10 --images 160",
                ("backbone", "images", "classes", "epochs", "turns"), ("strong_cpu_s", "quick_cpu_s", "mmrl_cpu_s", "strong_to_mmrl"),
                note="CPU seconds with the frozen part of all images, on busy cores; medians of the turns. Goal: `strong_to_mmrl` at "
                "most 1; missed.",
            ),
            Table(
                "CPU seconds of a training by stage", f"{RESEARCH}/training_stages.csv",
                "OMP_NUM_THREADS=1 python research/speed/training_stages.py --backbone SMALL", ("backbone", "method"),
                ("frozen_views_s", "evaluation_features_s", "directions_s", "images_s", "texts_s", "losses_s", "backward_s", "optimizer_s",
                 "rest_s", "total_s"),
                note="160 images, 160 steps of 4 images, four views per image; medians of three turns. `images`, `texts`, and `losses` are "
                "the forward pass of the learned part.",
            ),
            Table(
                "Step of the presets, ms", f"{BENCHMARKS}/preset_step.csv", "python benchmarks/step.py presets --device cuda",
                ("shape", "batch", "classes"), ("paper_ms", "quick_ms", "strong_ms"),
            ),
            Table(
                "Inference, images per second", f"{BENCHMARKS}/inference.csv", "python benchmarks/inference.py",
                ("machine", "shape", "model"), ("images_per_s",), "batch",
                note="\"Recorded\" replays a recording, as `predict` does for batches up to 64 that come again; \"as the service\": every "
                "image may have its own adapter, here all have the same. Batch 1024 and compiled timm were measured in another call on "
                "the same day, between which the same models differ by up to 5 %.",
            ),
            Table(
                "Inference, measured again", f"{BENCHMARKS}/inference_again.csv",
                "python benchmarks/inference.py --device cuda --batch 1 32 256 --compile --repeats 5", ("model",), ("images_per_s",),
                "batch", note="Launching was faster than in the first run.",
            ),
            Table(
                "Images in", f"{BENCHMARKS}/images.csv", "python benchmarks/images.py",
                ("machine", "work", "way", "unit"), ("value",),
            ),
            Table(
                "Files to training views, images per second", f"{BENCHMARKS}/feed.csv",
                "python benchmarks/images.py feed --device cuda --images 256", ("machine", "way", "images"), ("images_per_s",), "epoch",
                note="A first look: few images, and both ways took turns epoch by epoch (now the epochs of one way follow each other). "
                "Why dear's later epochs differ so much between the two runs on the H200 was not found out.",
            ),
            Table(
                "Role discovery, seconds", f"{BENCHMARKS}/roles.csv",
                "python benchmarks/roles.py --device cuda --images 5000 --phrases 3500 --literal-images 500 --literal-heads 4",
                ("model", "images", "phrases"),
                ("ours_text_s", "ours_images_s", "ours_textspan_s", "ours_s", "literal_text_s", "literal_images_s",
                 "literal_textspan_s", "literal_s"),
                note="Float32, layers 9 to 12. The literal procedure was timed on 500 of the images and on 4 of the 48 heads, and the time "
                "of those stages multiplied; the four phrase lists are the same, phrase for phrase.",
            ),
            Table(
                "Decoding processes of the service compared with `pebble.ProcessPool`", f"{RESEARCH}/decoding_pool.csv",
                "python research/speed/decoding_pool.py", ("what", "workers"), ("images_per_s", "service_us", "all_us"),
                note="Microseconds of processor time per image: of the service's process, and of all processes.",
            ),
            Table(
                "TorchCodec's image decoders, one thread, processor time", f"{RESEARCH}/torchcodec_cpu.csv",
                "python research/speed/torchcodec_cpu.py PHOTOS --files 24 --cases 200", ("format", "way"),
                ("files_per_second", "within_1_of_pillow", "largest_difference", "answers", "errors", "crashes"),
                note="Answers, errors, and crashes count 200 damaged files per row.",
            ),
            Table(
                "JPEG decoders on a GPU: TorchCodec, nvImageCodec, and simplejpeg", f"{RESEARCH}/torchcodec_gpu.csv",
                "python research/speed/torchcodec_gpu.py PHOTOS --cases 60", ("megapixels", "measure"), ("value",), "way",
                note="48 photos of each size. `damaged files` counts 50 damaged ones: answers, clear errors, crashes of the process.",
            ),
            Table(
                "Exported int8 compared with float32, processor time", f"{BENCHMARKS}/onnx_precision.csv",
                "python benchmarks/onnx_precision.py --full FULL --small INT8", ("dataset", "backbone", "method", "batch"),
                ("times_faster", "accuracy_float32", "points_lost", "same_answers", "mb_float32", "mb"),
                note="4 images per class, seed 1, two threads.",
            ),
            Table("Whole tasks", f"{BENCHMARKS}/tasks.csv", "python benchmarks/tasks.py --device cuda",
                  ("task",), ("base_classes", "training_images", "steps", "test_images", "train_s", "test_s", "run_s"),
                  note="16 shots, ten epochs, batch 16, random images of 500 x 375 pixels in memory; training includes shrinking them "
                  "once. For the whole benchmark see [scaling](../scaling.md)."),
            Table("Steps of every method, eager and recorded, ms", f"{RESEARCH}/recorded_steps.csv",
                  "python research/speed/recorded_steps.py", ("method",), ("eager_ms", "step_ms")),
        ),
    ),
    "service": (
        "Service",
        (
            Table(
                "On a GPU", f"{BENCHMARKS}/serve_gpu.csv", "python benchmarks/serve_gpu.py",
                ("what", "server", "batch", "images", "in_flight"),
                ("images_per_s", "requests_per_s", "p50_ms", "of_engine"), where="images_per_s > 0",
            ),
            Table(
                "HTTP on two cores", f"{BENCHMARKS}/serve_http_turns.csv",
                "python benchmarks/serve.py http --backbone mini --requests 240 --loads 1 8 32 --adapters 1 --threads 1 --rounds 2",
                ("server", "in_flight"), ("requests_per_s", "p50_ms", "p99_ms", "processor_ms"),
                note="Requests of one image; both servers run and are asked in turn, on idle cores; `processor_ms` is the "
                "processor time of a request with its decoding.",
            ),
            Table(
                "Overhead of a request of one image, two cores", f"{BENCHMARKS}/serve_parts.csv",
                'python benchmarks/serve_overhead.py http --images 1 --requests 3600 --rounds 2 --instead "Starlette\'s forms"',
                ("version", "instead"), ("us", "loop_us", "compute_us", "requests_per_s", "load"),
                note="Microseconds of the process, of its event loop, and of its computing thread; the tower and the "
                "decoders are replaced by ready results. All rows were measured in turns, with priority. 1d02102 is the commit "
                "before the service was built on standard parts; medians of its requests per second and of today's: 4,083 "
                "and 3,849. `instead` names a standard part in the place of a hand-written one, or an option: "
                "`--loop asyncio`, `--http h11`, `--no-freeze`, `--switch 0.005`. The short switch interval costs time here, "
                "where nothing is computed; it is for kernels, which otherwise wait 5 ms for the event loop.",
            ),
            Table(
                "Granian compared with uvicorn, two cores", f"{BENCHMARKS}/serve_overhead.csv",
                "python benchmarks/serve_overhead.py http --images 1", ("server",),
                ("us", "loop_us", "compute_us", "requests_per_s", "load"), where="commit == 'fdf4313c'",
                note="As above. Granian saves time of the event loop, but not of the process; the bound on pipelining is made "
                "for uvicorn, so it stays.",
            ),
            Table(
                "Waits of others under attack", f"{BENCHMARKS}/serve_attacks.csv",
                "nice -n -15 python benchmarks/serve_attacks.py --csv FILE", ("attack", "proxy", "priority"),
                ("live_s", "victim_s", "failed", "attack_s", "loop_cpu_s"),
                note="Longest waits in seconds of `/health/live` and of a one-image request of another key, while the "
                "attack runs; `loop_cpu_s` is the processor time of the event loop. Other programs used the two cores (load "
                "average 15 to 18); with priority -15 service, proxy, attackers and clients were in a session of their own, "
                "which comes close to idle cores. Uploads, metrics, and bundles made nobody wait and have no rows.",
            ),
            Table(
                "Soak with class lists, thirty minutes", f"{BENCHMARKS}/serve_soak_lists.csv",
                "OMP_NUM_THREADS=1 python benchmarks/serve_soak.py --minutes 34 --clients 4 --rate 8 --first --csv FILE",
                ("minute",),
                ("megabytes", "load", "share_of_processors", "p50_s", "own_classes_p50_s", "own_classes_longest_s",
                 "longest_s", "status 200", "wrong_late_or_lost"),
                note="9,934 answers, two thirds of them for lists of classes (half of these new): none was wrong, lost, or later "
                "than 2 s; the longest took 1.88 s, the 99th percentile is 0.46 s. Medians of memory by thirds: 623, 631, 671 "
                "MB; 649 MB at the end. SIGTERM took 0.9 s. The cores were shared with other programs; the soak had priority. "
                "With two computing threads on these two cores, 9 of the first 900 answers were late (up to 5.1 s): on a machine "
                "that other programs use, `--threads` should leave them a core. That run charged a text like an image, too.",
            ),
            Table("Memory", f"{BENCHMARKS}/serve_memory.csv", "python benchmarks/serve.py memory",
                  ("backbone", "corrected", "adapters"), ("megabytes",)),
        ),
    ),
}  # fmt: skip


def render(table: Table) -> str:
    """The section of one table."""
    data = pd.read_csv(ROOT / table.file)
    names, note = list(table.rows), table.note
    if table.aims is not None:
        note = f"{note} {table.aims(data)}"
    if table.where is not None:
        data = data.query(table.where, engine="python", local_dict={"DEVELOPMENT": DEVELOPMENT})
    if table.recipes:
        data = data.assign(recipe=_recipes(data))
        names.insert(names.index("method") + 1 if "method" in names else 0, "recipe")
        present = int((data["recipe"] == PRESENT_RECIPE).sum())
        note = f"{note} {RECIPE_NOTE}{present or 'no'} rows here are of it.".strip()
    keys = [name for name in names if name in data]
    data[keys] = data[keys].astype("string").fillna("")
    values = [name for name in table.values if name in data]
    if table.columns is None:
        cells = data.groupby(keys, sort=False)[values].mean(numeric_only=True)
        cells["n"] = data.groupby(keys, sort=False).size()
    else:
        cells = data.pivot_table(values[0], keys, table.columns, "mean", sort=False)
        cells = cells[natsorted(cells.columns, key=str)]
        cells.columns = [str(name) for name in cells.columns]
    frame = cells.reset_index()
    for name in frame.columns:
        if name not in keys:
            frame[name] = frame[name].map(_number)
    command = table.command.replace("python research/", "PYTHONPATH=benchmarks python research/")
    parts = [f"## {table.title}", "", f"    {command}", ""]
    parts += [note, ""] if note else []
    return "\n".join(
        [*parts, frame.to_markdown(index=False, disable_numparse=True), "", _source(table, data), ""]
    )


def _recipes(data: pd.DataFrame) -> list[str]:
    """The version of DeAR's default recipe that each row was measured with; empty for other methods and presets."""
    versions = []
    for row in data.to_dict("records"):
        known = str(row.get("recipe") or "")
        if row["method"] not in ("dear", "dear@strong"):
            known = ""
        elif known in ("", "nan"):
            known = next((name for date, name in RECIPE_DATES if str(row["date"]) < date), "run 3")
        versions.append(known)
    return versions


def _number(value: float) -> str:
    if pd.isna(value):
        return ""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.4g}"


def _source(table: Table, data: pd.DataFrame) -> str:
    machine = next((name for name in ("machine", "hardware") if name in data), None)
    facts = []
    for label, name in (("machine", machine), ("PyTorch", "torch"), ("dear", "dear"), ("date", "date")):
        if name is not None and name in data:
            values = sorted(
                {str(value)[:10] if name == "date" else str(value) for value in data[name].dropna()}
            )
            shown = values if len(values) <= 3 else [values[0], "…", values[-1]]
            facts.append(f"{label}: {', '.join(shown)}")
    commit = subprocess.run(
        ["git", "log", "--follow", "--diff-filter=AM", "-1", "--format=%h", "--", table.file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    where = f"`{table.file}`{f' at {commit}' if commit else ''}"
    return f"*{'; '.join([where, f'{len(data)} measurements', *facts])}.*"


def main() -> None:
    """Write all pages."""
    PAGES.mkdir(parents=True, exist_ok=True)
    index = [
        "# Results",
        "",
        "Tables of measurements, generated from the CSV files by `python scripts/results.py`. Each names its command, its file, and where it",
        "was measured; cells are means, `n` is the number of measurements behind one. Accuracies are fractions of 1 in files of `dear bench`, and",
        "percent where a table says so. `SMALL` is the folder of a small CLIP and `DATA` that of the datasets",
        "([backbones](../reproducing.md#backbones-of-the-figures)).",
        "",
    ]
    for name, (title, tables) in TABLES.items():
        body = "\n".join(render(table) for table in tables)
        (PAGES / f"{name}.md").write_text(f"# {title}\n\n{body}", encoding="utf-8")
        index.append(f"- [{title}]({name}.md)")
    (PAGES / "index.md").write_text("\n".join([*index, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
