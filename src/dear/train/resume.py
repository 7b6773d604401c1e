"""The saved state of an unfinished run: written during training, checked before training resumes from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dear._io.files import read_safetensors, require_finite, write_safetensors
from dear.errors import RunError
from dear.train.folder import read_log, write_log
from dear.train.loop import Loop


def save_state(loop: Loop, folder: Path, seconds: float) -> None:
    """Save the log and all that is needed to continue; `seconds` of training so far."""
    tensors, words = loop.state()
    write_log(folder, loop.lines)
    write_safetensors(folder / "resume.safetensors", tensors, {**words, "seconds": f"{seconds:.3f}"})


def restore(loop: Loop, folder: Path) -> float:
    """Continue from the folder's saved state; returns the seconds that earlier processes trained for."""
    path = folder / "resume.safetensors"
    tensors, words = read_safetensors(path, "saved training state")
    require_finite(tensors, str(path))
    if not any(name.startswith("optimizer.") for name in tensors):  # earlier versions spelled it otherwise
        tensors = {re.sub("^optimiser", "optimizer", name): tensor for name, tensor in tensors.items()}
    try:
        _check_words(loop, tensors.get("window"), words)
        loop.restore(tensors, words, read_log(folder))
        _check_optimizer(loop, [name for name in tensors if name.startswith("optimizer.")])
        seconds = float(words.get("seconds", 0.0))
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{seconds} seconds of training")
        return seconds
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise RunError(f"{path}: is damaged ({error}); delete it to start again") from error


def _check_words(loop: Loop, window: Tensor | None, words: Mapping[str, str]) -> None:
    """Refuse a saved state from another place than this run can be at."""
    if not 0 < int(words["step"]) <= loop.steps:
        raise ValueError(f"step {words['step'][:20]} of {loop.steps}")
    if window is not None and (window.dim() != 2 or window.shape[1] != len(words["parts"].split())):
        raise ValueError("its losses do not fit their names")


def _check_optimizer(loop: Loop, names: list[str]) -> None:
    """Refuse an optimizer's state that would only fail some steps later."""
    whole = {"momentum_buffer"} if loop.recipe.optimizer == "sgd" else {"step", "exp_avg", "exp_avg_sq"}
    found = 0
    for parameter in loop.learned:
        state = loop.optimizer.state.get(parameter, {})
        found += len(state)
        if state and set(state) != whole:
            raise ValueError("the optimizer's state is not whole")
        if any(value.shape not in (parameter.shape, torch.Size([])) for value in state.values()):
            raise ValueError("the optimizer's state does not fit the learned tensors")
    if found != len(names):
        raise ValueError("the optimizer's state is of more tensors than are learned")
