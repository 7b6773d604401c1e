"""One call for any CLIP: `load` takes an embedded name, a hub name, a folder or a file, and a device."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from dear.clip import hub
from dear.clip.backbones import backbones
from dear.clip.checkpoint import Checkpoint, read_checkpoint
from dear.clip.digest_cache import checkpoint_stamp
from dear.clip.identity import WeightDigests
from dear.clip.model import Clip
from dear.errors import CheckpointError, UsageError, reason_of
from dear.utils.text import close_name

EMBEDDED = Path(__file__).parent / "weights"


def load(
    source: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    activation: str | None = None,
) -> Clip:
    """Load a CLIP, frozen and in eval mode.

    Args:
        source: an embedded name ("mini"), a hub name ("openai/clip-vit-base-patch16", a revision after
            "@"), a folder in Hugging Face's or OpenCLIP's layout, or a weight file (also OpenAI's
            `ViT-B-16.pt`). A folder with the name of an embedded backbone is loaded as "./mini".
        device: of the weights.
        dtype: precision of the weights; norms and the logit scale keep the checkpoint's if it is higher.
        activation: "quick_gelu" or "gelu", only for a bare weight file that does not store it.

    Raises:
        CheckpointError: there is no such backbone, it cannot be downloaded, or it is not a complete CLIP.
        UsageError: an unknown device, precision or activation.

    Example:
        >>> load("no such backbone")
        Traceback (most recent call last):
        dear.errors.CheckpointError: 'no such backbone' is not a backbone: ...
    """
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device must be a PyTorch device, got {device!r} ({reason_of(error)})") from None
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise UsageError(f"dtype must be torch.float32, float64, bfloat16 or float16, got {dtype!r}")
    name, path = locate(source)
    stamp = checkpoint_stamp(path)  # before the files are read
    clip = build(read_checkpoint(path, activation), name, device, dtype)
    clip.checkpoint_stamp = stamp
    if not path.is_relative_to(EMBEDDED) and os.path.exists(Path(os.fspath(source)).expanduser()):
        clip.source = os.path.abspath(path)
    return clip


def locate(source: str | os.PathLike[str]) -> tuple[str, Path]:
    """The name of a source, and its folder or file on this machine, downloaded first if necessary."""
    text = os.fspath(source)
    path = Path(text).expanduser()
    if isinstance(source, str) and text in list_embedded():
        return text, EMBEDDED / text
    if os.path.exists(path):  # unlike Path.exists, it accepts names that no disk can hold
        return path.name or text, path
    if isinstance(source, str) and hub.is_hub_name(text):
        return text, hub.fetch(text)
    suggestion = close_name(text, list_backbones())
    remedy = f"did you mean {suggestion!r}?" if suggestion else "list_backbones() returns the names"
    raise CheckpointError(
        f"{text[:200]!r} is not a backbone: no such file or folder, and not a known name; {remedy}",
        hint=None if suggestion else "backbones",
    )


def list_embedded() -> tuple[str, ...]:
    """Names of the backbones that come with this package."""
    return tuple(sorted(folder.parent.name for folder in EMBEDDED.glob("*/config.json")))


def list_backbones() -> tuple[str, ...]:
    """Names that `load` takes: those that come with this package, then those on the hub.

    Example:
        >>> "openai/clip-vit-base-patch16" in list_backbones()
        True
    """
    return list_embedded() + tuple(backbones())


def build(checkpoint: Checkpoint, name: str, device: torch.device, dtype: torch.dtype) -> Clip:
    """A model with a checkpoint's tensors, which are not copied if device and precision are the same."""
    state = checkpoint.state
    rows = len(state["text.tokens"]) if "text.rows" in state else None
    with torch.device("meta"):
        clip = Clip(checkpoint.config, name, rows)
    placed = {key: _place(key, tensor, device, dtype) for key, tensor in state.items()}
    clip.load_state_dict(placed, assign=True)
    clip.tokenizer = checkpoint.tokenizer
    clip.requires_grad_(False)
    if dtype in (torch.float16, torch.bfloat16):
        # The identity is that of the checkpoint's values before rounding.
        clip.digests = WeightDigests.of(state)
    return clip


def _place(name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.to(device)
    if ".ln_" in name or ".pool.norm." in name or name in ("log_scale", "pair_bias"):
        stored = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
        dtype = torch.promote_types(dtype, stored)
    try:
        placed = tensor.to(device, dtype)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"the weights cannot be moved to {device} ({reason_of(error)}); try device='cpu'"
        ) from None
    if dtype == torch.float16 != tensor.dtype and not bool(torch.isfinite(placed).all()):
        raise UsageError(
            f"weights in float16 must not exceed 65,504, but {name} does; use bfloat16 or float32"
        )
    return placed


def pick_device(name: str) -> str:
    """The device to use: "auto" is the first GPU (CUDA, else Apple's "mps"), or the CPU if there is none.

    >>> pick_device("cpu")
    'cpu'
    """
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = reason_of(error).partition(",")[0]
        raise UsageError(
            f"device {name} is not available ({reason[:80]}); use cpu, cuda, mps or auto"
        ) from None
    return name
