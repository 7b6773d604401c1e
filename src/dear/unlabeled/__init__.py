"""Unlabeled images as functions on frozen features: learn from them, judge them, choose what to label."""

from dear.unlabeled.choice import choose_next, choose_typical, margins, typicality
from dear.unlabeled.forecast import Forecast, LearningCurve, forecast_gain, learning_curve
from dear.unlabeled.graph import choose_graph, nearest_neighbors, neighbor_graph, propagate_labels
from dear.unlabeled.pool import (
    Comparison,
    PseudoLabels,
    Reason,
    compare_with_labeled_only,
    judge_pool,
    mean_confidence,
    measure_nearness,
    pseudo_label_share,
    select_pseudo_labels,
)
from dear.unlabeled.probe import (
    UNLABELED,
    Probe,
    SemiSupervisedFit,
    classes_without_labels,
    draw_rows,
    fit_probe,
    fit_semi_supervised_probe,
)

__all__ = [
    "UNLABELED",
    "Comparison",
    "Forecast",
    "LearningCurve",
    "Probe",
    "PseudoLabels",
    "Reason",
    "SemiSupervisedFit",
    "choose_graph",
    "choose_next",
    "choose_typical",
    "classes_without_labels",
    "compare_with_labeled_only",
    "draw_rows",
    "fit_probe",
    "fit_semi_supervised_probe",
    "forecast_gain",
    "judge_pool",
    "learning_curve",
    "margins",
    "mean_confidence",
    "measure_nearness",
    "nearest_neighbors",
    "neighbor_graph",
    "propagate_labels",
    "pseudo_label_share",
    "select_pseudo_labels",
    "typicality",
]
