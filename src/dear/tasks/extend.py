"""Add classes to a run from a few photos, without training: `dear adapt --extend RUN`.

A new class c has a text feature t_c and k photos with unit features, copies counted once, whose mean is m_c.
With m the mean of the run's training images, the class is compared with `t_c + w (m_c - m)` at unit length,
w = k / (k + 2). The difference of two means of images is on the scale on which texts differ, so that new and
trained classes stay comparable; it counts more the more photos there are. Nothing learned changes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from dear.calibration.reference import Reference
from dear.clip.model import Clip
from dear.data.duplicates import find_duplicates
from dear.data.images import ImageSet, ListedImages, require_one_label
from dear.data.names import readable
from dear.data.open import open_data
from dear.data.texts import read_texts, resolve_texts
from dear.data.unreadable import check_images
from dear.errors import InputError, UsageError
from dear.images.names import find_images
from dear.methods.tensors import unit
from dear.methods.texts import ClassTexts
from dear.runs.class_lists import combine_classes
from dear.runs.folder import check_folder
from dear.runs.model import Model, Run
from dear.tasks.load import load_model
from dear.utils.files import PathLike
from dear.utils.notices import warn

# Measured with five photos (docs/results/data.md): 0.5 to 2 differ by at most 2 points; 8 loses up to 3
# with zero-shot and gains 2 with DeAR on one set.
HALF = 2.0  #: photos with which the direction from photos counts half
SAME = 2e-3  #: distance of unit features up to which a photo is a training image, kept in half precision


def extend(
    run: Run,
    data: PathLike | ImageSet,
    out: PathLike | None = None,
    *,
    texts: PathLike | Mapping[str, Any] | None = None,
    backbone: PathLike | Clip | None = None,
    device: str = "auto",
    unreadable: str = "stop",
    data_root: PathLike | None = None,
    margin: float = 0.0,
) -> Model:
    """Add classes to a run, from a few photos each, without training.

    Args:
        run: run folder, archive, `hf://owner/name`, or model, of a method that can name new classes.
        data: photos of the new classes: what `open_data` takes, all of whose images are used; or a folder of
            images, whose name is the class.
        out: run folder of the extended run; None keeps it in memory.
        texts: several texts per new class; see `dear.adapt`.
        backbone: for a run whose backbone moved.
        device: "auto", "cpu", "cuda", …
        unreadable: "stop" refuses images that cannot be read, "skip" leaves them out.
        data_root: folder that the paths of a table start from.
        margin: added to every box of the data on each side, as a fraction of the box.

    Raises:
        UsageError: the method cannot name new classes, the run was not calibrated, or a class is not new.

    Example:
        >>> extend("run", "new/zebra", "run-with-zebra").classes[-1]     # doctest: +SKIP
        'zebra'
    """
    model = load_model(run, backbone, device)
    model.require_one_label("extend")
    if model.spec is None or model.reference is None:
        raise UsageError(
            "extend needs a calibrated run, which stores features of its training images; train it with "
            "calibration",
            hint="calibrate",
        )
    if out is not None:
        check_folder(out, resume=False)
    images = check_images(
        data if isinstance(data, ImageSet) else _open(data, data_root, margin), unreadable
    ).kept
    require_one_label(images, "extend")
    images = images.subset(
        find_duplicates(images).distinct(images.labels.tolist())
    )  # a copy shows nothing new
    known = next((name for name in images.classes if name in model.classes), None)
    if known is not None:
        raise UsageError(f"{images.name}: the class {known!r} is trained already; name only new classes")
    names = combine_classes(images.classes, model.classes, add=True)
    listed = getattr(images, "texts", None) if texts is None else read_texts(texts)
    class_texts = resolve_texts(listed, images.classes, model.template) if listed else {}
    features = unit(model.features(images).float())
    _warn_of_training_images(model, images, features)
    method = model.method.with_classes(names, texts=_with_photos(model, images, features, class_texts))
    spec = msgspec.structs.replace(
        model.spec,
        classes=names,
        texts={name: tuple(some) for name, some in method.prompts.texts.sentences.items()},
        extended={**model.spec.extended, **_counts(images)},
    )
    extended = Model(
        method,
        model.calibration,
        reference=_reference(model.reference, features, images, len(model.classes)),
        spec=spec,
        metrics=dict(model.metrics),
        lines=list(model.lines),
        precision=model.precision,
    )
    if out is not None:
        extended.save(out)
        extended.path = Path(out)
    return extended


def _open(data: PathLike, root: PathLike | None, margin: float) -> ImageSet:
    """The photos of the new classes; images directly in a folder are of the class that it names."""
    if os.path.isdir(data) and not any(entry.is_dir() for entry in Path(data).iterdir()):
        files = find_images([os.fspath(data)])
        name = readable(Path(data).resolve().name)
        return ListedImages(tuple(files), torch.zeros(len(files), dtype=torch.int64), (name,), name=name)
    return open_data(data, "all", root=root, margin=margin)


def _counts(images: ImageSet) -> dict[str, int]:
    counts = torch.bincount(images.labels, minlength=len(images.classes)).tolist()
    empty = next((name for name, count in zip(images.classes, counts, strict=True) if not count), None)
    if empty is not None:
        raise InputError(f"{images.name}: the class {empty!r} has no images; add some or remove the class")
    return dict(zip(images.classes, counts, strict=True))


def _warn_of_training_images(model: Model, images: ImageSet, features: Tensor) -> None:
    """Warn of photos of new classes whose unit features [n, E] are those of training images of the run."""
    assert model.reference is not None
    others = model.reference.unit
    shared = [
        (place, model.classes[int(model.reference.labels[row])])
        for place, row in enumerate((features @ others.T).argmax(dim=1).tolist())
        if float((features[place] - others[row]).norm()) < SAME
    ]
    if shared:
        place, other = shared[0]
        warn(
            f"{len(shared)} of {len(images)} photos are training images of the run: {images.key(place)} is "
            f"{other!r} there and {images.classes[int(images.labels[place])]!r} here; correct one of them"
        )


def _with_photos(
    model: Model, images: ImageSet, features: Tensor, texts: Mapping[str, tuple[str, ...]]
) -> ClassTexts:
    """The run's texts, and for each new class the mean of its texts moved toward its photos."""
    assert model.reference is not None
    before, template, clip = model.method.prompts.texts, model.template, model.clip
    sentences = {name: texts.get(name) or before.of(name, template) for name in images.classes}
    added = ClassTexts(sentences)
    rows = added.features(clip, images.classes, template)
    features = features.to(clip.device)
    center = class_means(model.reference.unit, model.reference.labels).mean(dim=0).to(features)
    means: dict[str, Tensor] = {}
    for label, (name, count) in enumerate(_counts(images).items()):
        direction = features[images.labels.to(features.device) == label].mean(dim=0) - center
        means[name] = unit(rows[name].to(features) + count / (count + HALF) * direction)
    known = before.features(clip, before.sentences, template)
    return ClassTexts({**before.sentences, **sentences}, {**known, **means})


def class_means(features: Tensor, labels: Tensor) -> Tensor:
    """Mean feature [C, E] of each class of features [n, E] with labels [n]."""
    return torch.stack([features[labels == label].mean(dim=0) for label in labels.unique()])


def _reference(reference: Reference, features: Tensor, images: ImageSet, first: int) -> Reference:
    """The training features with those of the new photos, whose labels count on from `first`."""
    return Reference(
        torch.cat([reference.features, features.half().cpu()]),
        torch.cat([reference.labels, images.labels.cpu() + first]),
    )
