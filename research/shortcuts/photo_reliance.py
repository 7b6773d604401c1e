"""How much models rely on what Caltech101's own classes have: corners, frames, colors, shapes.

A model is trained on the dataset as it is. Test images of each class that the audit reports lose what it has,
where an edit can take it away (corners filled, frames cut, from images of other classes), and test images of
other classes are given it. What the edit itself does is asked of other classes: their test images get the
same pixels replaced, from images that do not have it either.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measure.script import where
from photo_repair import DEAR
from PIL import Image

import dear
from dear.data import open_data
from dear.data.images import ImageSet
from dear.shortcuts.causal import causal_test, edit_held_out
from dear.shortcuts.edits import transfer
from dear.shortcuts.find import Shortcut, find_shortcuts
from dear.shortcuts.properties import measure_properties
from dear.tasks.adapt import adapt
from dear.tasks.audit.properties import label_predictor
from dear.tasks.speed import add_rows


def reliance(args: Any) -> None:
    """A row per class that stands out."""
    for source in args.data:
        train, test = (open_data(source, split) for split in ("train", "test"))
        shortcuts = [
            one
            for one in find_shortcuts(measure_properties(train), train.labels.tolist(), train.classes)
            if one.kind
        ]
        if args.classes:  # those that stand out, and some that do not
            names = [one.class_name for one in shortcuts]
            rest = [name for name in train.classes if name not in names]
            names += random.Random(args.seeds[0]).sample(rest, max(0, args.classes - len(names)))
            train, test = train.select_classes(names), test.select_classes(names)
            shortcuts = [replace(one, label=names.index(one.class_name)) for one in shortcuts]
        recipe = dict(DEAR) if args.method == "dear" else {}
        model = adapt(
            train, None, method=args.method, backbone=dear.load(args.backbone), recipe=recipe, calibrate=False
        )
        answer = label_predictor(model, train.classes)
        accuracy = float((answer([test.image(n) for n in range(len(test))]) == test.labels.numpy()).mean())
        for one in shortcuts:
            row = {"dataset": Path(source).parent.name, "method": args.method, "classes": len(train.classes)}
            row |= {"accuracy": round(accuracy, 4), **_row(one, test, train, answer, args.others)}
            add_rows(args.out, [row | where()])
            print(row, flush=True)


def _row(one: Shortcut, test: ImageSet, train: ImageSet, answer: Any, others: int) -> dict[str, object]:
    edited = edit_held_out(one, test, train, others)
    result = causal_test(edited, answer)
    plain, truth, neutral = _neutral(one, test, train, others)
    before, after = (float((answer(images) == truth).mean()) for images in (plain, neutral))
    return {
        "class": one.class_name,
        "look": one.look,
        "own_images": int((test.labels == one.label).sum()),
        "own": "" if result.accuracy is None else round(result.accuracy, 4),
        "own_without": "" if result.accuracy_without is None else round(result.accuracy_without, 4),
        "others": result.images,
        "others_called_plain": round(result.plain, 4),
        "others_called_given": round(result.edited, 4),
        "other_accuracy": round(before, 4),
        "other_accuracy_same_pixels_replaced": round(after, 4),
    }


def _neutral(
    one: Shortcut, test: ImageSet, train: ImageSet, others: int
) -> tuple[list[Image.Image], np.ndarray, list[Image.Image]]:
    """Test images of other classes, their labels, and copies edited with donors that do not have it."""
    rng = random.Random(1)
    places = [place for place, label in enumerate(test.labels.tolist()) if label != one.label]
    places = rng.sample(places, min(others, len(places)))
    donors = [place for place, label in enumerate(train.labels.tolist()) if label != one.label]
    mask = None if one.mark is None else one.mark.mask
    plain = [test.image(place) for place in places]
    edited = [transfer(one.kind, image, train.image(rng.choice(donors)), mask, one.name) for image in plain]
    return plain, test.labels[places].numpy(), edited
