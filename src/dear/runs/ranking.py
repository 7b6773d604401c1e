"""From the logits of a model to its answers: likeliest classes, labels, node of a tree, rejection."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dear.calibration.calibration import apply_scales
from dear.errors import UsageError
from dear.runs.answer import Answer
from dear.runs.tree import REJECTED, check_certain

if TYPE_CHECKING:
    from dear.runs.model import Model


class Ranking:
    """Turns logits of a model into answers; everything that all images share is computed once.

    Args:
        model: on the classes of the answers.
        top: number of classes to list.
        mode: way to predict; None: the usual one.
        reject: share of images of trained classes that may be rejected; None: no image is.
        certain: of a model with a tree: the least probability of a named node; None: 0.8.

    Raises:
        UsageError: an option is out of bounds, or the model has no calibration that it needs.
    """

    def __init__(
        self,
        model: Model,
        top: int = 5,
        mode: str | None = None,
        reject: float | None = None,
        certain: float | None = None,
    ) -> None:
        if top < 1:
            raise UsageError(f"top must be at least 1, got {top}")
        self.mode = mode = model.pick_mode(mode)
        self._calibrator, self._tree, self._classes = model.calibrator, model.tree, model.classes
        self._top = min(top, len(model.classes))
        tree, calibrator = self._tree, self._calibrator
        self._certain = check_certain(certain, tree)
        self._scales = calibrator.scales(mode)
        self._label_thresholds = calibrator.label_thresholds(mode) if calibrator.several else None
        self._rejects = reject is not None
        self._threshold = self._none_threshold = float("-inf")
        if reject is not None:
            self._threshold = self._none_threshold = calibrator.threshold(reject, mode).value
            if tree is not None:
                self._none_threshold = calibrator.threshold(reject * REJECTED, mode).value
        #: whether answers depend on how near images are to the training images
        self.needs_nearness = reject is not None and calibrator.needs_nearness

    def nearness(self, features: Tensor) -> Tensor:
        """How near frozen features [b, W] are to the training images, [b]."""
        return self._calibrator.nearness(features)

    def answers(self, logits: Tensor, near: Tensor | None = None) -> list[Answer]:
        """Answers without image names for uncalibrated logits [b, C] and nearness [b], on the CPU."""
        scaled = logits if self._scales is None else apply_scales(logits, self._scales.to(logits))
        probabilities = self._calibrator.probabilities(scaled)
        best = probabilities.topk(self._top, dim=-1)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        classes = [tuple(zip(map(self._classes.__getitem__, n), p, strict=True)) for n, p in rows]
        if self._label_thresholds is not None:
            assigned = (probabilities >= self._label_thresholds).tolist()
            named = [tuple(compress(self._classes, row)) for row in assigned]
            return [
                Answer("", likeliest, labels=labels) for likeliest, labels in zip(classes, named, strict=True)
            ]
        score = self._calibrator.score(scaled, near, self.mode) if self._rejects else None
        rejected = None if score is None else score < self._threshold
        nodes: list[tuple[str, float] | None] = [None] * len(classes)
        if self._tree is not None:
            below_none = None if score is None else score < self._none_threshold
            named_nodes, rejected_by_tree = self._tree.answers(
                probabilities, self._certain, rejected, below_none
            )
            nodes = [*named_nodes]
            rejected = None if rejected_by_tree is None else torch.from_numpy(rejected_by_tree)
        flags = [None] * len(classes) if rejected is None else rejected.tolist()
        return [
            Answer("", likeliest, rejected=is_rejected, node=None if is_rejected else node)
            for likeliest, is_rejected, node in zip(classes, flags, nodes, strict=True)
        ]
