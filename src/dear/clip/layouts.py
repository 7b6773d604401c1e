"""From published tensors to those of `Clip`, by a table of entries (see `layout_tables`).

An entry is one published tensor, its shape, and the tensor (or tensors) of ours that it becomes. The same
table loads, names what is missing or misshapen, and writes the layout again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dear.errors import CheckpointError

#: Maps a BPE id to a row of a shortened token table (an addition of ours to Hugging Face's layout).
TOKEN_ROWS = "text_model.embeddings.token_rows"
TOKEN_TABLE = "text_model.embeddings.token_embedding.weight"

# Buffers and notes that some releases save and that carry no weight.
_NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size")
_NOT_WEIGHT_ENDINGS = ("position_ids", "attn_mask")

_MAX_LOG_SCALE = 20.0  # its exponential multiplies every logit: e^20 times a cosine is no logit any more
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Entry:
    """One published tensor: its name, its shape, and what it becomes.

    Several names in `into` share the tensor's rows equally (OpenAI keeps q, k and v in one matrix).
    """

    source: str
    shape: tuple[int, ...]
    into: tuple[str, ...]
    transposed: bool = False
    integer: bool = False


def is_huggingface(names: Sequence[str] | Mapping[str, Tensor]) -> bool:
    """Whether these tensor names are those of a Hugging Face `CLIPModel`."""
    return any(name.startswith(("vision_model.", "text_model.")) for name in names)


def is_openai(names: Sequence[str] | Mapping[str, Tensor]) -> bool:
    """Whether these tensor names are those OpenAI and OpenCLIP use for a vision transformer."""
    return any(name.startswith("visual.transformer.resblocks.") for name in names)


def is_timm(names: Sequence[str] | Mapping[str, Tensor]) -> bool:
    """Whether the image tower is one of timm's inside OpenCLIP."""
    return any(name.startswith("visual.trunk.") for name in names)


def text_prefix(names: Sequence[str] | Mapping[str, Tensor]) -> str:
    """What OpenCLIP puts before the text tower's names: nothing, or "text."."""
    return "text." if any(name.startswith("text.") for name in names) else ""


def convert(tensors: Mapping[str, Tensor], table: Sequence[Entry], source: str) -> dict[str, Tensor]:
    """Turn published tensors into the state dict of `Clip`, keeping each tensor's precision.

    Args:
        tensors: published names to tensors.
        table: one of `layout_tables`.
        source: the file, for messages.

    Raises:
        CheckpointError: naming the tensors that are missing, surplus, misshapen, not numbers, or not finite.
    """
    check(tensors, table, source)
    state: dict[str, Tensor] = {}
    for entry in table:
        tensor = tensors[entry.source].detach().reshape(entry.shape)
        if entry.integer:
            state[entry.into[0]] = tensor.long()
            continue
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{source}: tensor {entry.source!r} holds NaN or infinity; the file is damaged, get it again"
            )
        if entry.transposed:
            tensor = tensor.t()
        parts = tensor.chunk(len(entry.into)) if len(entry.into) > 1 else (tensor,)
        state.update(zip(entry.into, (part.contiguous() for part in parts), strict=True))
    if "text.rows" in state:
        _check_rows(state, source)
    if not abs(float(state["log_scale"])) < _MAX_LOG_SCALE:
        raise CheckpointError(
            f"{source}: logit_scale is {float(state['log_scale']):g}, of which no temperature can be made; "
            f"CLIP's is below 4.7"
        )
    return state


def _check_rows(state: Mapping[str, Tensor], source: str) -> None:
    """Every BPE id must point at a row that is there."""
    rows, count = state["text.rows"], len(state["text.tokens"])
    if int(rows.min()) < 0 or int(rows.max()) >= count:
        raise CheckpointError(
            f"{source}: {TOKEN_ROWS} points at rows {int(rows.min())} to {int(rows.max())}, "
            f"but {TOKEN_TABLE} has {count}"
        )


def check(tensors: Mapping[str, Tensor], table: Sequence[Entry], source: str) -> None:
    """Compare names, shapes and kinds with the table.

    Raises:
        CheckpointError: with every kind of difference in one message.
    """
    expected = {entry.source: entry for entry in table}
    missing = [name for name in expected if name not in tensors]
    surplus = [name for name in tensors if name not in expected and not _is_note(name)]
    misshapen, strange = [], []
    for name, entry in expected.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        # Some releases write the scale as [1], and the probe and the positions with leading axes of 1.
        if tuple(d for d in tensor.shape if d != 1) != tuple(d for d in entry.shape if d != 1):
            misshapen.append(f"{name} is {list(tensor.shape)}, expected {list(entry.shape)}")
        if tensor.dtype not in (_INTEGERS if entry.integer else _FLOATS):
            strange.append(f"{name} is {str(tensor.dtype).removeprefix('torch.')}")
    faults = [
        f"{word} {some(names)}"
        for word, names in (
            ("missing", missing),
            ("surplus", surplus),
            ("misshapen", misshapen),
            ("of an unusable type", strange),
        )
        if names
    ]
    if faults:
        raise CheckpointError(f"{source}: the tensors do not fit this CLIP: {'; '.join(faults)}")


def _is_note(name: str) -> bool:
    return name in _NOT_WEIGHTS or name.endswith(_NOT_WEIGHT_ENDINGS)


def some(names: Sequence[str], limit: int = 6) -> str:
    """The first names, and how many more there are: for messages."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def publish(state: Mapping[str, Tensor], table: Sequence[Entry]) -> dict[str, Tensor]:
    """The reverse of `convert`: the tensors of `Clip` under their published names."""
    published = {}
    for entry in table:
        parts = [state[name].detach() for name in entry.into]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        published[entry.source] = (tensor.t() if entry.transposed else tensor).contiguous()
        if entry.integer:
            published[entry.source] = tensor.to(torch.int32)
    return published
