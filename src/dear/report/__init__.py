"""Pages and plots.

The figures are plotly figures, the same in pages, in the studio and in a notebook:

>>> from dear.report import fusion_weights
>>> fusion_weights({"class": 0.5, "Color": 0.5}).data[0].type
'bar'
"""

from dear.report.figures import (
    accuracy_bars,
    accuracy_curve,
    changes,
    class_accuracy,
    confusion,
    fusion_weights,
    training_curve,
)

__all__ = [
    "accuracy_bars",
    "accuracy_curve",
    "changes",
    "class_accuracy",
    "confusion",
    "fusion_weights",
    "training_curve",
]
