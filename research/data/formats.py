r"""What several labels, several texts, class trees, and `--extend` gain, each compared with doing without.

    python research/data/formats.py labels --csv results/several_labels.csv
    python research/data/formats.py texts --data-root DATA --small SMALL --csv results/several_texts.csv
    python research/data/formats.py trees --data-root DATA --small SMALL --csv results/class_trees.csv
    python research/data/formats.py extend --data-root DATA --small SMALL --csv results/extend.csv

labels: methods compared with scikit-learn's one-vs-rest logistic regression (C by cross-validation, labels
from a probability of 1/2 on) on the same features of the attribute world. In "exchanged" the names of the
classes are exchanged, so that texts mislead and labels must be learned from the images.
texts: accuracy with the one prompt of the dataset, and with the class name and two sentences per class.
trees: answers with a tree of 40 classes of Caltech101 and without it, for images of these classes and of the
60 others. `accuracy` is the share of answers that are the class or a node above it, `coverage` the share of
images that are answered.
extend: half of the classes are trained; the others are added by name, from five photos, or by training again.
ProKeR and probes learn their classes themselves and cannot be extended.
Times are user seconds of the process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure.script import add_options, parser_of
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, f1_score
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.multiclass import OneVsRestClassifier

import dear
from dear.data.images import ImageSet
from dear.data.shots import few_shot
from dear.methods.tensors import unit
from dear.runs import ranking
from dear.runs.model import Model
from dear.runs.tree import Tree
from dear.tasks import extend as extending
from dear.tasks.speed import add_rows, machine

SETS = ("linear-probe", "proker", "tip-adapter", "lp-plus-plus")
TREE = {
    "mammal": {
        "big cat": ["leopard", "cougar body", "cougar face", "wild cat"],
        "hoofed animal": ["elephant", "gerenuk", "llama", "okapi", "rhino"],
        "small mammal": ["beaver", "hedgehog", "platypus", "kangaroo"],
    },
    "bird": ["emu", "flamingo", "ibis", "pigeon", "rooster"],
    "water animal": ["crab", "crayfish", "lobster", "octopus", "starfish", "sea horse"],
    "insect": ["ant", "butterfly", "dragonfly", "mayfly", "tick"],
    "instrument": ["accordion", "electric guitar", "grand piano", "mandolin", "saxophone"],
    "vehicle": {
        "boat": ["ferry", "ketch", "schooner"],
        "aircraft": ["airplane", "helicopter"],
        "motorbike": [],
    },
}
TEXTS = {
    "banded": ("Broad bands of different colors lie next to each other.", "Rock in parallel bands."),
    "blotchy": ("Irregular spots and stains of color on a surface.", "Skin with uneven patches of color."),
    "braided": ("Strands that are woven over and under each other.", "A thick rope or hair in a braid."),
    "bubbly": ("Many round bubbles in a liquid.", "White foam with small bubbles."),
    "bumpy": ("A rough surface with many small bumps.", "A surface with raised knobs."),
    "chequered": ("Squares of two colors like a chess board.", "A cloth with a pattern of squares."),
    "cobwebbed": ("Thin threads of a spider web.", "A net of fine silk between branches."),
    "cracked": ("Dry ground with deep cracks.", "Old paint that is split by cracks."),
    "crosshatched": ("A drawing shaded with crossing lines.", "Fine pen strokes that cross each other."),
    "crystalline": ("Clear crystals with flat faces.", "Frost and ice crystals."),
    "accordion": ("A musical instrument with bellows and keys.", "A squeezebox with buttons on both sides."),
    "beaver": ("A brown rodent with a flat tail near the water.", "A furry animal with large front teeth."),
    "crab": ("An animal with claws and a hard shell.", "A red animal with eight legs on sand."),
    "dolphin": ("A gray animal that jumps out of the sea.", "A sea animal with a long snout and fins."),
    "emu": ("A tall brown bird that cannot fly.", "A large bird with a long neck and shaggy feathers."),
    "ferry": ("A large white ship for passengers and cars.", "A ship with several decks at a pier."),
    "gramophone": ("An old record player with a large horn.", "A wooden box with a brass horn."),
    "ketch": ("A sailing boat with two masts.", "A yacht with white sails on the sea."),
    "mandolin": ("A small guitar with a round body.", "A string instrument with eight strings."),
    "okapi": ("A brown animal with striped legs.", "An animal like a giraffe with stripes of a zebra."),
    "pagoda": ("A tower with many curved roofs.", "An Asian temple with several stories."),
    "schooner": ("A large sailing ship with several masts.", "An old ship with many sails."),
}  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("action", choices=("labels", "texts", "trees", "extend"))
    add_options(parser, data_root="data", small="small", csv=Path, seeds=(2, "draws of training images"))
    args = parser.parse_args()
    rows = {"labels": labels, "texts": texts, "trees": trees, "extend": extend}[args.action](args)
    facts = machine(torch.device("cpu"))
    for row in rows:
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        print(rounded, flush=True)
        add_rows(args.csv, [{**rounded, **facts}])


# -- several labels ---------------------------------------------------------------------------------


def labels(args: Any) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:  # files, so that features are cached
        for task in ("attributes", "exchanged"):
            table = write_table(Path(folder), task == "exchanged")
            train, test = (dear.open_data(table, split) for split in ("train", "test"))
            for shots in (2, 4, 12):
                for seed in range(1, args.seeds + 1):
                    some = few_shot(train, shots, seed)
                    cell = {"task": task, "shots": shots, "seed": seed, "images": len(some)}
                    yield cell | {"method": "zeroshot"} | set_figures(zero_shot(some, test), 0.0)
                    yield cell | {"method": "scikit-learn one-vs-rest"} | one_vs_rest(some, test)
                    for method in SETS:
                        start = time.process_time()
                        model = dear.adapt(some, method=method, seed=seed, check=False)
                        seconds = time.process_time() - start
                        yield cell | {"method": method} | set_figures(model.evaluate(test).to_dict(), seconds)


def write_table(folder: Path, exchanged: bool) -> Path:
    """The images of world:attributes as files, with a table of their labels."""
    lines = ["path,labels,split"]
    for split in ("train", "test"):
        images: Any = dear.open_data("world:attributes", split)
        names = images.classes[7:] + images.classes[:7] if exchanged else images.classes
        for place in range(len(images)):
            path = folder / f"{split}-{place}.png"
            if not path.exists():
                images.image(place).save(path)
            labels_of_image = [
                name for name, has in zip(names, images.targets[place].tolist(), strict=True) if has
            ]
            lines.append(f"{path.name},{';'.join(labels_of_image) or ';'},{split}")
    table = folder / f"{'exchanged' if exchanged else 'attributes'}.csv"
    table.write_text("\n".join(lines))
    return table


def zero_shot(some: ImageSet, test: ImageSet) -> dict[str, Any]:
    method = dear.methods.build_method(
        "zeroshot", dear.load("mini"), some.classes, template="a photo of something {}.", several=True
    )
    return Model(method).evaluate(test).to_dict()


def set_figures(report: dict[str, Any], seconds: float) -> dict[str, Any]:
    names = ("map", "micro_f1", "macro_f1", "accuracy", "ece")
    figures = {name: report.get(name) for name in names}
    return {**{name: "" if value is None else value for name, value in figures.items()}, "seconds": seconds}


def one_vs_rest(some: Any, test: Any) -> dict[str, Any]:
    frozen = Model(dear.methods.build_method("zeroshot", dear.load("mini"), ("a", "b")))
    x, x_test = (unit(frozen.features(images)).double().numpy() for images in (some, test))
    truth = test.targets.numpy()
    start = time.process_time()
    grid = {"estimator__C": [1.0, 10.0, 100.0, 1000.0]}

    def precision(model: Any, x: Any, y: Any) -> float:
        return float(average_precision_score(y, model.predict_proba(x), average="micro"))

    probe = OneVsRestClassifier(LogisticRegression(max_iter=2000))
    search = GridSearchCV(probe, grid, scoring=precision, cv=KFold(4, shuffle=True, random_state=0))
    search.fit(x, some.targets.numpy())
    seconds = time.process_time() - start
    scores = search.predict_proba(x_test)
    sets = scores >= 0.5
    report = {
        "map": float(average_precision_score(truth, scores, average="macro")),
        "micro_f1": float(f1_score(truth, sets, average="micro")),
        "macro_f1": float(f1_score(truth, sets, average="macro", zero_division=0)),
        "accuracy": float(np.mean((truth == sets).all(axis=1))),
    }
    return set_figures(report, seconds)


# -- several texts ----------------------------------------------------------------------------------


def texts(args: Any) -> Iterator[dict[str, Any]]:
    clip = dear.load(args.small)
    for name in ("DescribableTextures", "Caltech101"):
        train, test = (dear.open_data(name, split, root=args.data_root) for split in ("train", "test"))
        classes = [each for each in train.classes if each in TEXTS]
        train, test = train.select_classes(classes), test.select_classes(classes)
        written = {each: [each, *TEXTS[each]] for each in classes}
        for method, shots in (
            ("zeroshot", 1),
            ("proker", 1),
            ("proker", 4),
            ("lp-plus-plus", 1),
            ("lp-plus-plus", 4),
        ):
            for seed in range(1, (1 if method == "zeroshot" else 3) + 1):
                for kind, used in (("one prompt", None), ("three texts", written)):
                    model = dear.adapt(
                        few_shot(train, shots, seed), method=method, backbone=clip, seed=seed, texts=used,
                        check=False, calibrate=False,
                    )  # fmt: skip
                    accuracy = model.evaluate(test).accuracy["default"]
                    yield {
                        "dataset": name, "classes": len(classes), "method": method,
                        "shots": 0 if method == "zeroshot" else shots, "seed": seed, "texts": kind,
                        "test": len(test), "accuracy": accuracy,
                    }  # fmt: skip


# -- class trees ------------------------------------------------------------------------------------


def trees(args: Any) -> Iterator[dict[str, Any]]:
    clip = dear.load(args.small)
    train, test = (dear.open_data("Caltech101", split, root=args.data_root) for split in ("train", "test"))
    parents = dear.data.tree.read_tree(TREE)
    classes = [name for name in train.classes if name in parents and name not in parents.values()]
    others = test.select_classes([name for name in test.classes if name not in classes])
    known = test.select_classes(classes)
    for method, shots in (("proker", 4), ("proker", 16), ("linear-probe", 4), ("linear-probe", 16)):
        for seed in range(1, args.seeds + 1):
            some = few_shot(train.select_classes(classes), shots, seed)
            model = dear.adapt(some, method=method, backbone=clip, seed=seed, tree=TREE, check=False)
            cell = {
                "method": method,
                "shots": shots,
                "seed": seed,
                "known": len(known),
                "unknown": len(others),
            }
            for row in tree_rows(model, known, others):
                yield cell | row


def tree_rows(model: Model, known: ImageSet, others: ImageSet) -> Iterator[dict[str, Any]]:
    tree = model.tree
    assert tree is not None
    plain = model._on(model.method)
    plain.spec = None
    for reject in (0.0, 0.05, 0.2):
        share = reject or None
        yield answer_figures(tree, plain, known, others, share, None) | {"certain": "", "part": ""}
        for certain in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
            yield answer_figures(tree, model, known, others, share, certain) | {
                "certain": certain,
                "part": ranking.REJECTED,
            }
        for part in (0.05, 0.5, 1.0) if reject else ():
            kept, ranking.REJECTED = ranking.REJECTED, part
            yield answer_figures(tree, model, known, others, share, 0.8) | {"certain": 0.8, "part": part}
            ranking.REJECTED = kept


def answer_figures(
    tree: Tree, model: Model, known: ImageSet, others: ImageSet, reject: float | None, certain: float | None
) -> dict[str, Any]:
    leaves = {node: sum(node in tree.path(name) for name in tree.classes) for node in tree.nodes}
    right, exact, bits, answered = 0, 0, 0.0, 0
    for place, answer in enumerate(model.answers(known, top=1, reject=reject, certain=certain)):
        if answer.rejected:
            continue
        node = answer.classes[0][0] if answer.node is None else answer.node[0]
        answered += 1
        if node in tree.path(known.classes[int(known.labels[place])]):
            right += 1
            exact += node in tree.classes
            bits += float(np.log2(len(tree.classes) / leaves[node]))
    wrong = sum(
        not answer.rejected for answer in model.answers(others, top=1, reject=reject, certain=certain)
    )
    return {
        "answers": "classes" if certain is None else "nodes of the tree",
        "reject": reject or 0.0,
        "coverage": answered / len(known),
        "accuracy": right / max(1, answered),
        "exact": exact / len(known),
        "bits": bits / len(known),
        "unknown_answered": wrong / len(others),
    }


# -- a new class from five photos -------------------------------------------------------------------


def extend(args: Any) -> Iterator[dict[str, Any]]:
    for name, backbone, methods in (
        ("world:textures", "mini", ("zeroshot", "clip-adapter", "prolip", "dear")),
        ("world:scenes", "mini", ("zeroshot", "dear")),
        ("DescribableTextures", args.small, ("zeroshot", "prolip")),
        ("Caltech101", args.small, ("zeroshot", "prolip")),
    ):
        train, test = (dear.open_data(name, split, root=args.data_root) for split in ("train", "test"))
        classes = train.classes[:24]
        train, test = train.select_classes(classes), few_shot(test.select_classes(classes), 15, 1)
        clip = dear.load(backbone)
        old, new = classes[::2], classes[1::2]
        for method in methods:
            for seed in range(1, (1 if method == "dear" else args.seeds) + 1):
                photos = few_shot(train.select_classes(new), 5, seed)
                start = time.process_time()
                model = train_on(few_shot(train.select_classes(old), 8, seed), clip, method, seed)
                before = time.process_time() - start
                cell = {"dataset": name, "method": method, "seed": seed, "classes": len(old), "new": len(new)}
                yield cell | new_figures("names only", model.with_classes(new, add=True), test, old, 0.0)
                for half in (0.5, 1.0, 2.0, 4.0, 8.0):
                    kept, extending.HALF = extending.HALF, half
                    start = time.process_time()
                    more = dear.extend(model, photos)
                    seconds = time.process_time() - start
                    extending.HALF = kept
                    yield cell | new_figures(
                        f"five photos, half weight at {half:g}", more, test, old, seconds
                    )
                start = time.process_time()
                again = train_on(mixed(train, old, new, seed), clip, method, seed)
                seconds = max(time.process_time() - start, before)
                yield cell | new_figures("trained again", again, test, old, seconds)


def train_on(images: ImageSet, clip: Any, method: str, seed: int) -> Model:
    recipe = "quick" if method == "dear" else None
    return dear.adapt(images, method=method, backbone=clip, seed=seed, check=False, recipe=recipe)


def mixed(train: ImageSet, old: tuple[str, ...], new: tuple[str, ...], seed: int) -> ImageSet:
    """Eight images of each old class and five of each new one."""
    rows: list[int] = []
    for names, shots in ((old, 8), (new, 5)):
        chosen = few_shot(train.select_classes(names), shots, seed)
        keys = {chosen.key(place) for place in range(len(chosen))}
        rows += [place for place in range(len(train)) if train.key(place) in keys]
    return train.subset(sorted(rows))


def new_figures(
    way: str, model: Model, test: ImageSet, old: tuple[str, ...], seconds: float
) -> dict[str, Any]:
    result = model.evaluate(test)
    answers = result.answers[model.pick_mode(None)]
    right = answers == result.labels
    trained = torch.tensor([name in old for name in result.classes])[result.labels]
    parts = (torch.ones_like(right), trained, ~trained)
    values = [float(right[part].double().mean()) for part in parts]
    return {"way": way, **dict(zip(("accuracy", "old", "added"), values, strict=True)), "seconds": seconds}


if __name__ == "__main__":
    main()
