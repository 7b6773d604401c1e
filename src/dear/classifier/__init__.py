"""The scikit-learn estimator: `dear.Classifier`."""

from dear.classifier.estimator import Classifier

__all__ = ["Classifier"]
