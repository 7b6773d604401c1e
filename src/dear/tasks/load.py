"""One call for anything that answers or encodes images: `dear.load`."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from dear.clip import factory
from dear.clip.model import Clip
from dear.errors import UsageError
from dear.runs.folder import FORMAT
from dear.runs.model import Model, Run
from dear.tasks.share.task import HUB, local_run


def load(
    source: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    activation: str | None = None,
    backbone: str | os.PathLike[str] | Clip | None = None,
) -> Any:
    """Load a backbone as a `Clip`, or a run as a `Model`.

    Args:
        source: a run folder, an archive of `dear bundle`, `hf://owner/name` for a shared run; or a backbone:
            an embedded name ("mini"), a hub name ("openai/clip-vit-base-patch16", a revision after "@"), a
            folder in Hugging Face's or OpenCLIP's layout, or a weight file (also OpenAI's `ViT-B-16.pt`). A
            folder with the name of an embedded backbone is reached as "./mini".
        device: where the weights go.
        dtype: precision of a backbone. Norms and the logit scale keep the checkpoint's, where it is higher.
        activation: "quick_gelu" or "gelu", only for a bare weight file that does not contain it.
        backbone: of a run whose backbone moved; None: the one that the run names.

    Returns:
        `Model` for a run, else `Clip`, frozen and in eval mode.

    Raises:
        CheckpointError: there is no such backbone, it cannot be downloaded, or it is not a complete CLIP.
        RunError: the run is not complete, or its backbone does not fit.
        UsageError: an unknown device, precision or activation.

    Example:
        >>> load("mini").config.embed_dim
        128
    """
    if is_run(source):
        return Model.load(local_run(source), backbone, device)
    if backbone is not None:
        raise UsageError(f"backbone is only for runs, and {os.fspath(source)!r} is no run; leave it out")
    return factory.load(source, device, dtype, activation)


def is_run(source: str | os.PathLike[str]) -> bool:
    """Whether a source names a run rather than a backbone."""
    text = os.fspath(source)
    if text.startswith(HUB) or (text.lower().endswith(".zip") and os.path.isfile(text)):
        return True
    try:
        with open(os.path.join(text, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("format") == FORMAT


def load_model(
    run: Run, backbone: str | os.PathLike[str] | Clip | None = None, device: str = "auto"
) -> Model:
    """The model of a run folder, an archive, `hf://owner/name`, a method, or a model."""
    if isinstance(run, str | os.PathLike):
        run = local_run(run)
    return Model.of(run, backbone, device)


def load_backbone(backbone: str | os.PathLike[str] | Clip | None, device: str = "auto") -> Clip:
    """A loaded backbone as it is, or what `dear.clip.factory.load` takes; None: `mini`."""
    if isinstance(backbone, Clip):
        return backbone
    return factory.load("mini" if backbone is None else backbone, device=factory.pick_device(device))
