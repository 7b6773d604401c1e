"""How the published CLIP layouts name and fold the tensors that `Clip` holds.

A layout is a table of entries: one published tensor, its shape, and the tensor (or tensors) of ours that it
becomes. The same table loads, names what is missing or misshapen, and writes the layout again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dear.clip.config import ClipConfig, TextConfig, VisionConfig
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

# Ours -> Hugging Face's and OpenAI's names inside one block.
_HF_BLOCK = {
    "ln_1": "layer_norm1",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
_OPENAI_BLOCK = {
    "ln_1": "ln_1",
    "attn.o": "attn.out_proj",
    "ln_2": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


@dataclass(frozen=True)
class Entry:
    """One published tensor: its name, its shape, and what it becomes.

    Three names in `into` share the tensor's rows equally (OpenAI keeps q, k and v in one matrix).
    """

    source: str
    shape: tuple[int, ...]
    into: tuple[str, ...]
    transposed: bool = False
    integer: bool = False


def huggingface(config: ClipConfig, rows: int | None = None) -> tuple[Entry, ...]:
    """The table of Hugging Face's `CLIPModel`; `rows` is the length of a shortened token table."""
    vision, text, E = config.vision, config.text, config.embed_dim
    table = [
        Entry("logit_scale", (), ("log_scale",)),
        Entry("visual_projection.weight", (E, vision.width), ("visual.proj",), transposed=True),
        Entry("text_projection.weight", (E, text.width), ("text.proj",), transposed=True),
        Entry(TOKEN_TABLE, (text.vocab if rows is None else rows, text.width), ("text.tokens",)),
        Entry(
            "text_model.embeddings.position_embedding.weight", (text.context, text.width), ("text.positions",)
        ),
        *_norm("text_model.final_layer_norm", "text.ln_final", text.width),
        *_patches(
            vision,
            patch="vision_model.embeddings.patch_embedding.weight",
            class_token="vision_model.embeddings.class_embedding",
            positions="vision_model.embeddings.position_embedding.weight",
        ),
        *_norm("vision_model.pre_layrnorm", "visual.ln_pre", vision.width),  # the published name has the slip
        *_norm("vision_model.post_layernorm", "visual.ln_post", vision.width),
        *_hf_blocks("vision_model.encoder.layers", "visual.blocks", vision),
        *_hf_blocks("text_model.encoder.layers", "text.blocks", text),
    ]
    if rows is not None:
        table.append(Entry(TOKEN_ROWS, (text.vocab,), ("text.rows",), integer=True))
    return tuple(table)


def openai(config: ClipConfig) -> tuple[Entry, ...]:
    """The table of OpenAI's state dict, which OpenCLIP shares."""
    vision, text, E = config.vision, config.text, config.embed_dim
    return (
        Entry("logit_scale", (), ("log_scale",)),
        Entry("visual.proj", (vision.width, E), ("visual.proj",)),
        Entry("text_projection", (text.width, E), ("text.proj",)),
        Entry("token_embedding.weight", (text.vocab, text.width), ("text.tokens",)),
        Entry("positional_embedding", (text.context, text.width), ("text.positions",)),
        *_norm("ln_final", "text.ln_final", text.width),
        *_patches(
            vision,
            patch="visual.conv1.weight",
            class_token="visual.class_embedding",
            positions="visual.positional_embedding",
        ),
        *_norm("visual.ln_pre", "visual.ln_pre", vision.width),
        *_norm("visual.ln_post", "visual.ln_post", vision.width),
        *_openai_blocks("visual.transformer.resblocks", "visual.blocks", vision),
        *_openai_blocks("transformer.resblocks", "text.blocks", text),
    )


def _patches(vision: VisionConfig, patch: str, class_token: str, positions: str) -> Iterator[Entry]:
    """What turns pixels into tokens; the class token has a position of its own."""
    yield Entry(patch, (vision.width, 3, vision.patch_size, vision.patch_size), ("visual.patch.weight",))
    yield Entry(class_token, (vision.width,), ("visual.class_token",))
    yield Entry(positions, (vision.positions, vision.width), ("visual.positions",))


def _norm(source: str, ours: str, width: int) -> Iterator[Entry]:
    for part in ("weight", "bias"):
        yield Entry(f"{source}.{part}", (width,), (f"{ours}.{part}",))


def _sizes(tower: VisionConfig | TextConfig) -> dict[str, tuple[int, ...]]:
    """Weight shapes of one block, by our names; a bias has the first number of its weight."""
    D = tower.width
    square = dict.fromkeys(("attn.q", "attn.k", "attn.v", "attn.o"), (D, D))
    return {"ln_1": (D,), "ln_2": (D,), **square, "mlp.up": (tower.mlp, D), "mlp.down": (D, tower.mlp)}


def _hf_blocks(source: str, ours: str, tower: VisionConfig | TextConfig) -> Iterator[Entry]:
    yield from _blocks(source, ours, tower, _HF_BLOCK)


def _openai_blocks(source: str, ours: str, tower: VisionConfig | TextConfig) -> Iterator[Entry]:
    yield from _blocks(source, ours, tower, _OPENAI_BLOCK)
    D = tower.width
    for layer in range(tower.layers):
        for part, shape in (("weight", (3 * D, D)), ("bias", (3 * D,))):
            into = tuple(f"{ours}.{layer}.attn.{name}.{part}" for name in "qkv")
            yield Entry(f"{source}.{layer}.attn.in_proj_{part}", shape, into)


def _blocks(
    source: str, ours: str, tower: VisionConfig | TextConfig, names: Mapping[str, str]
) -> Iterator[Entry]:
    sizes = _sizes(tower)
    for layer in range(tower.layers):
        for name, published in names.items():
            for part, shape in (("weight", sizes[name]), ("bias", sizes[name][:1])):
                yield Entry(f"{source}.{layer}.{published}.{part}", shape, (f"{ours}.{layer}.{name}.{part}",))


def is_huggingface(names: Sequence[str] | Mapping[str, Tensor]) -> bool:
    """Whether these tensor names are those of a Hugging Face `CLIPModel`."""
    return any(name.startswith(("vision_model.", "text_model.")) for name in names)


def is_openai(names: Sequence[str] | Mapping[str, Tensor]) -> bool:
    """Whether these tensor names are those OpenAI and OpenCLIP use for a vision transformer."""
    return any(name.startswith("visual.transformer.resblocks.") for name in names)


def convert(tensors: Mapping[str, Tensor], table: Sequence[Entry], source: str) -> dict[str, Tensor]:
    """Turn published tensors into the state dict of `Clip`, keeping each tensor's precision.

    Args:
        tensors: published names to tensors.
        table: `huggingface(config)` or `openai(config)`.
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
        one_number = entry.shape == () and tensor.numel() == 1  # some releases write the scale as [1]
        if tuple(tensor.shape) != entry.shape and not one_number:
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
