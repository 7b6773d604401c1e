"""Which images to label next: `dear label next`."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.model import Clip
from dear.data.images import TEMPLATE, ImageSet, require_one_label
from dear.data.open import open_data
from dear.data.unlabeled import open_unlabeled
from dear.data.unreadable import find_unreadable
from dear.errors import DataError, InputError
from dear.images.open import ImageLike
from dear.runs.feature_cache import FeatureCache
from dear.runs.model import Model, Run
from dear.tasks.load import load_backbone, load_model
from dear.unlabeled import (
    UNLABELED,
    choose_next,
    choose_typical,
    fit_semi_supervised_probe,
    margins,
    typicality,
)
from dear.utils.files import PathLike, check_output, write_atomic
from dear.utils.progress import Progress
from dear.utils.text import fill_template

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Choice:
    """An image to label, with what the model takes it for."""

    path: str  #: relative to the folder of the images
    guess: str = ""  #: the likeliest class; "" where no class is known
    confidence: float = 0.0  #: its probability


@dataclass(frozen=True)
class NextLabels:
    """Images to label, the most useful first; every prefix is a good choice."""

    choices: tuple[Choice, ...]
    classes: tuple[str, ...]
    unreadable: tuple[str, ...]  #: why images were left out

    def __repr__(self) -> str:
        first = f", the first {self.choices[0].path!r}" if self.choices else ""
        return f"<NextLabels: {len(self.choices)} images{first}>"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        choices = [asdict(choice) for choice in self.choices]
        return {"images": len(choices), "classes": list(self.classes), "choices": choices}

    def to_frame(self) -> pd.DataFrame:
        """One row per image, the most useful first: path, guess, confidence."""
        import pandas as pd

        return pd.DataFrame([asdict(choice) for choice in self.choices])

    def _repr_html_(self) -> str:
        html: str = self.to_frame().to_html(index=False)
        return html


def label_next(
    pool: PathLike | ImageSet | Sequence[ImageLike],
    *,
    count: int = 50,
    data: PathLike | ImageSet | None = None,
    data_root: PathLike | None = None,
    classes: Sequence[str] | None = None,
    run: Run | None = None,
    backbone: PathLike | Clip = "mini",
    device: str = "auto",
    template: str | None = None,
    out: PathLike | None = None,
    tasks: PathLike | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> NextLabels:
    """Choose the images of a pool to label next.

    Without labels they are typical images of clusters. With labels, clusters without a label come first, and
    in each the image that is most typical and of which the model is least certain. Near duplicates of a
    chosen or labeled image are never chosen.

    Args:
        pool: a folder, a table with a column `path`, a dataset, an image set, or a list of images.
        count: images to choose; fewer are returned where the others are labeled or duplicates.
        data: labeled images: what `open_data` takes, or an image set.
        data_root: the folder that the paths of the table `data` start from.
        classes: class names, for guesses; None: those of the data or the run.
        run: run folder or trained model whose uncertainty counts, instead of that of a probe.
        backbone: what `dear.load` takes, or a loaded backbone; a run has its own.
        device: "auto", "cpu", "cuda", …
        template: prompt with `{}`; None: that of the data, or "a photo of a {}.".
        out: CSV file to write: path, an empty label to fill in, guess, confidence.
        tasks: .json file to write Label Studio tasks with predictions to.
        seed: of the clusters.
        progress: called with (stage, done, total).

    Raises:
        InputError: count is below 1.
        DataError: the pool holds no readable image.
    """
    if count < 1:
        raise InputError(f"count must be at least 1, got {count}")
    for name, path, suffix in (("out", out, ".csv"), ("tasks", tasks, ".json")):
        if path is not None and Path(path).suffix.lower() != suffix:
            raise InputError(f"{name} must end in {suffix}, got {os.fspath(path)!r}")
        check_output(path)
    model = None if run is None else load_model(run, None, device)
    clip = load_backbone(backbone, device) if model is None else model.clip
    images, unreadable = open_readable(pool)
    labeled = None
    if data is not None and isinstance(data, ImageSet):
        labeled = data
    elif data is not None:
        labeled = open_data(data, "all", root=data_root, template=template)
    if labeled is not None:
        require_one_label(labeled, "labeling")
    names = _class_names(classes, labeled, model)
    prompt = template or (labeled.template if labeled is not None else TEMPLATE)
    cache = FeatureCache()
    features = F.normalize(cache.image_features(clip, images, progress), dim=1)
    labels = torch.full((len(images),), UNLABELED, dtype=torch.int64)
    if labeled is not None:
        column = torch.tensor([names.index(name) if name in names else UNLABELED for name in labeled.classes])
        features = torch.cat([features, F.normalize(cache.image_features(clip, labeled), dim=1)])
        labels = torch.cat([labels, column[labeled.labels]])
    texts = text_features(clip, names, prompt)
    exclude = torch.arange(len(features)) >= len(images)
    known = bool((labels != UNLABELED).any())
    guesses: Tensor | None = None
    if model is not None:
        guesses = model.probabilities(images)
        scores = torch.zeros(len(features))
        scores[: len(images)] = 1 - margins(guesses)
        unit = F.normalize(features - features.mean(dim=0), dim=1)
        scores = scores * (typicality(unit) + 1)
        rows = choose_typical(
            unit,
            count,
            labeled=labels != UNLABELED,
            classes=len(names),
            scores=scores,
            exclude=exclude,
            seed=seed,
        )
    else:
        rows = choose_next(
            features, count, labels=labels if known else None, texts=texts, exclude=exclude, seed=seed
        )
        guesses = guess(features, labels, texts)[: len(images)] if texts is not None else None
    choices = []
    for row in rows.tolist():
        if guesses is None:
            choices.append(Choice(images.key(row)))
            continue
        confidence, best = guesses[row].max(dim=0)
        choices.append(Choice(images.key(row), names[int(best)], float(confidence)))
    result = NextLabels(tuple(choices), names, unreadable)
    if out is not None:
        write_choices(result, out)
    if tasks is not None:
        from dear.tasks.labeling.exchange import write_tasks

        write_tasks(result, tasks)
    return result


def open_readable(pool: PathLike | ImageSet | Sequence[ImageLike]) -> tuple[ImageSet, tuple[str, ...]]:
    """The readable images of a pool, and why others cannot be read.

    Raises:
        DataError: there is no readable image.
    """
    images = pool if isinstance(pool, ImageSet) else open_unlabeled(pool)
    bad = find_unreadable(images, range(len(images)))
    if len(bad) == len(images):
        raise DataError(f"{images.name}: none of its images can be read; the first: {bad[0].reason}")
    places = {item.index for item in bad}
    readable = (
        images.subset([index for index in range(len(images)) if index not in places]) if bad else images
    )
    return readable, tuple(item.reason for item in bad)


def text_features(clip: Clip, names: Sequence[str], template: str) -> Tensor | None:
    """Unit text features times CLIP's scale, [C, E]; None without class names."""
    if not names:
        return None
    with torch.no_grad():
        texts = clip.encode_text([fill_template(template, name) for name in names]).float().cpu()
    return F.normalize(texts, dim=1) * float(clip.logit_scale)


def guess(features: Tensor, labels: Tensor, texts: Tensor) -> Tensor:
    """Probabilities [n, C] of all images: of a probe where there are labels, else of the prompts."""
    if bool((labels != UNLABELED).any()):
        return fit_semi_supervised_probe(features, labels, texts).probe.logits(features).softmax(dim=1)
    return (features @ texts.T).softmax(dim=1)


def _class_names(
    classes: Sequence[str] | None, labeled: ImageSet | None, run: Model | None
) -> tuple[str, ...]:
    if classes is not None:
        names = tuple(classes)
        missing = [] if labeled is None else [name for name in labeled.classes if name not in names]
        if missing:
            raise InputError(f"classes must name all classes of the data, {missing[0]!r} is missing")
        return names
    if run is not None:
        return run.method.classes
    return () if labeled is None else labeled.classes


def write_choices(chosen: NextLabels, out: PathLike) -> None:
    """Write choices as CSV: path, an empty label to fill in, guess, confidence.

    Rows whose label is filled in are training images and the others are unlabeled: the table can be given as
    data as it is.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("path", "label", "guess", "confidence"))
    for choice in chosen.choices:
        table.writerow((choice.path, "", choice.guess, f"{choice.confidence:.4f}" if choice.guess else ""))
    write_atomic(Path(out), text.getvalue())


def counts_of(labels: Mapping[str, str], classes: Sequence[str]) -> dict[str, int]:
    """Labels of each class, classes without any included.

    >>> counts_of({"a.jpg": "cat"}, ["cat", "dog"])
    {'cat': 1, 'dog': 0}
    """
    counts = dict.fromkeys(classes, 0)
    for name in labels.values():
        counts[name] = counts.get(name, 0) + 1
    return counts
