"""Training: `fit` trains a Spec; the loop, its batches, recorded steps, and resuming."""

from dear.train.run import Paused, train

__all__ = ["Paused", "train"]
