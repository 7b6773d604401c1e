"""The training loop, schedules, precision and run folders."""

from dear.train.evaluate import Evaluation, evaluate
from dear.train.folder import RunConfig, RunIdentity, add_metrics, load_run, read_config
from dear.train.loop import Recipe
from dear.train.run import Paused, Trained, train

__all__ = [
    "Evaluation",
    "Paused",
    "Recipe",
    "RunConfig",
    "RunIdentity",
    "Trained",
    "add_metrics",
    "evaluate",
    "load_run",
    "read_config",
    "train",
]
