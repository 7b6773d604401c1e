"""The training loop, its feed of batches, schedules and resuming."""

from dear.train.run import Paused, Trained, train

__all__ = ["Paused", "Trained", "train"]
