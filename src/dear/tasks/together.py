"""Images of one folder help each other (transduction): `dear predict --together`.

A probe is fitted to the labeled features that the run keeps and to the images as unlabeled ones
(`dear.unlabeled`); the answer is the mean of its probabilities and those of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.data.batches import Images
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.runs.answer import Answer
from dear.runs.model import Model
from dear.runs.tree import check_certain
from dear.unlabeled import UNLABELED, fit_semi_supervised_probe


def joint_probabilities(model: Model, images: Images, mode: str | None = None) -> Tensor:
    """Probabilities [n, C] of images that help each other; rows of unreadable images are NaN.

    Raises:
        UsageError: the run keeps no labeled features, because it was not calibrated; or the model is on
            other classes than its labels are of.
    """
    if model.reference is None:
        raise UsageError("together needs the features of labeled images; train the run with calibrate on")
    if model.spec is not None and model.classes != model.spec.classes:
        raise UsageError("together answers with the trained classes of a run; leave classes out")
    probabilities = model.probabilities(images, mode, unreadable="skip").float()
    rows = (~probabilities.isnan().any(dim=1)).nonzero()[:, 0].tolist()
    if not rows:
        return probabilities
    some: Images = images.subset(rows) if isinstance(images, ImageSet) else [images[row] for row in rows]
    labeled = model.reference.unit
    features = F.normalize(model.features(some)[:, : labeled.shape[1]].float().cpu(), dim=1)
    prompts = model.method.prompts.frozen[:, : labeled.shape[1]]
    texts = (prompts * float(model.clip.logit_scale)).float().cpu()
    labels = torch.cat([model.reference.labels, torch.full((len(rows),), UNLABELED, dtype=torch.int64)])
    fit = fit_semi_supervised_probe(torch.cat([labeled, features]), labels, texts)
    probabilities[rows] = (probabilities[rows] + fit.probabilities[len(labeled) :]) / 2
    return probabilities


def answer_together(
    model: Model,
    images: Images,
    answers: Sequence[Answer],
    top: int = 5,
    mode: str | None = None,
    certain: float | None = None,
) -> list[Answer]:
    """The answers of a model with the classes, nodes and probabilities of `joint_probabilities`.

    Whether an image is rejected stays what the model says of it alone.
    """
    tree, probabilities = model.tree, joint_probabilities(model, images, mode)
    values, columns = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
    nodes: Sequence[tuple[str, float] | None] = [None] * len(answers)
    if tree is not None:
        nodes, _ = tree.answers(probabilities.nan_to_num(), check_certain(certain, tree))
    changed = []
    for answer, row, places, node in zip(answers, values.tolist(), columns.tolist(), nodes, strict=True):
        pairs = tuple((model.classes[place], value) for place, value in zip(places, row, strict=True))
        changed.append(answer if answer.error is not None else replace(answer, classes=pairs, node=node))
    return changed
