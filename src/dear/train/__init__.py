"""Training: `fit` trains what a Spec says; below it the loop, its feed of batches, schedules and resuming."""

from dear.train.run import Paused, train

__all__ = ["Paused", "train"]
