"""The layouts in which CLIP-like models are published.

A layout is a table of entries: a published tensor, its shape, and the tensor (or tensors) of `Clip` that it
becomes. The same table loads a checkpoint, checks names and shapes, and writes the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dear.clip.config import ClipConfig, TowerConfig, VisionConfig
from dear.errors import CheckpointError

#: Maps a BPE id to a row of a shortened token table (our addition to Hugging Face's layout).
TOKEN_ROWS = "text_model.embeddings.token_rows"
TOKEN_TABLE = "text_model.embeddings.token_embedding.weight"

# Buffers and settings that some releases save among the weights.
_NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size")
_NOT_WEIGHT_ENDINGS = ("position_ids", "attn_mask")

_MAX_LOG_SCALE = 20.0  # logits are cosines times its exponential; CLIP's is below 4.7
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
    """Whether tensor names are those of a Hugging Face `CLIPModel`."""
    return any(name.startswith(("vision_model.", "text_model.")) for name in names)


def is_openai(names: Sequence[str] | Mapping[str, Tensor]) -> bool:
    """Whether tensor names are those that OpenAI and OpenCLIP use for a vision transformer."""
    return any(name.startswith("visual.transformer.resblocks.") for name in names)


def is_timm(names: Sequence[str] | Mapping[str, Tensor]) -> bool:
    """Whether the image tower is one of timm's inside OpenCLIP."""
    return any(name.startswith("visual.trunk.") for name in names)


def text_prefix(names: Sequence[str] | Mapping[str, Tensor]) -> str:
    """The prefix of OpenCLIP's names of the text tower: "" or "text."."""
    return "text." if any(name.startswith("text.") for name in names) else ""


def convert(tensors: Mapping[str, Tensor], table: Sequence[Entry], source: str) -> dict[str, Tensor]:
    """Turn published tensors into the state dict of `Clip`, keeping each tensor's precision."""
    check(tensors, table, source)
    state: dict[str, Tensor] = {}
    for entry in table:
        tensor = tensors[entry.source].detach().reshape(entry.shape)
        if entry.integer:
            state[entry.into[0]] = tensor.long()
            continue
        # A sum is finite only if all its terms are, and takes a tenth of the time.
        if not bool(tensor.sum().isfinite()) and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{source}: tensor {entry.source!r} contains NaN or infinity; "
                "the file is damaged, download it again"
            )
        if entry.transposed:
            tensor = tensor.t()
        parts = tensor.chunk(len(entry.into)) if len(entry.into) > 1 else (tensor,)
        state.update(zip(entry.into, (part.contiguous() for part in parts), strict=True))
    if "text.rows" in state:
        _check_rows(state, source)
    if not abs(float(state["log_scale"])) < _MAX_LOG_SCALE:
        raise CheckpointError(
            f"{source}: logit_scale is {float(state['log_scale']):g}, which is out of range; "
            f"CLIP's is below 4.7"
        )
    return state


def _check_rows(state: Mapping[str, Tensor], source: str) -> None:
    """Every BPE id must point to an existing row."""
    rows, count = state["text.rows"], len(state["text.tokens"])
    if int(rows.min()) < 0 or int(rows.max()) >= count:
        raise CheckpointError(
            f"{source}: {TOKEN_ROWS} points to rows {int(rows.min())} to {int(rows.max())}, "
            f"but {TOKEN_TABLE} has {count}"
        )


def check(tensors: Mapping[str, Tensor], table: Sequence[Entry], source: str) -> None:
    """Compare names, shapes and kinds with the table."""
    expected = {entry.source: entry for entry in table}
    missing = [name for name in expected if name not in tensors]
    ignored = {name for name in tensors if name in _NOT_WEIGHTS or name.endswith(_NOT_WEIGHT_ENDINGS)}
    surplus = [name for name in tensors if name not in expected and name not in ignored]
    misshapen, wrong_dtype = [], []
    for name, entry in expected.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        # Some releases write the scale as [1], and the probe and the positions with leading axes of 1.
        if tuple(d for d in tensor.shape if d != 1) != tuple(d for d in entry.shape if d != 1):
            misshapen.append(f"{name} is {list(tensor.shape)}, expected {list(entry.shape)}")
        if tensor.dtype not in (_INTEGERS if entry.integer else _FLOATS):
            wrong_dtype.append(f"{name} is {str(tensor.dtype).removeprefix('torch.')}")
    faults = [
        f"{word} {abbreviate(names)}"
        for word, names in (
            ("missing", missing),
            ("surplus", surplus),
            ("misshapen", misshapen),
            ("of an unusable type", wrong_dtype),
        )
        if names
    ]
    if faults:
        raise CheckpointError(f"{source}: the tensors do not fit this CLIP: {'; '.join(faults)}")


def abbreviate(names: Sequence[str]) -> str:
    """The first six names and the number of further ones, for messages."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


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


class _Names(NamedTuple):
    """Names that a layout uses for the parts of the image tower."""

    patch: str
    class_token: str
    positions: str
    pre: str  #: the norm before the layers
    post: str  #: the norm after the layers
    blocks: str
    block: Mapping[str, str]  #: our name -> its name inside a layer
    qkv: str  #: q, k and v of a layer in one matrix; empty: three matrices
    pool: str
    probe: str
    pool_qkv: str
    pool_packed: str  #: which of q, k and v are in that matrix
    pool_parts: Mapping[str, str]


_HF_BLOCK = {
    "ln_1": "layer_norm1", "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj", "attn.o": "self_attn.out_proj", "ln_2": "layer_norm2",
    "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2",
}  # fmt: skip
_OPENAI_MLP = {"attn.o": "attn.out_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_OPENAI_BLOCK, _OPENAI_QKV = {"ln_1": "ln_1", "ln_2": "ln_2", **_OPENAI_MLP}, "attn.in_proj_{}"
_MLP = {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
_HUGGINGFACE = _Names(
    patch="vision_model.embeddings.patch_embedding",
    class_token="vision_model.embeddings.class_embedding",
    positions="vision_model.embeddings.position_embedding.weight",
    pre="vision_model.pre_layrnorm",  # spelled so in the published files
    post="vision_model.post_layernorm",
    blocks="vision_model.encoder.layers",
    block=_HF_BLOCK,
    qkv="",
    pool="vision_model.head",
    probe="vision_model.head.probe",
    pool_qkv="vision_model.head.attention.in_proj_{}",
    pool_packed="qkv",
    pool_parts={"attn.o": "attention.out_proj", "norm": "layernorm", **_MLP},
)
_OPENAI = _Names(
    patch="visual.conv1",
    class_token="visual.class_embedding",
    positions="visual.positional_embedding",
    pre="visual.ln_pre",
    post="visual.ln_post",
    blocks="visual.transformer.resblocks",
    block=_OPENAI_BLOCK,
    qkv=_OPENAI_QKV,
    pool="visual.attn_pool",
    probe="visual.attn_pool.probe",
    pool_qkv="visual.attn_pool.attn.in_proj_{}",
    pool_packed="qkv",
    pool_parts={"norm": "layernorm", **_OPENAI_MLP},
)
_TIMM = _Names(
    patch="visual.trunk.patch_embed.proj",
    class_token="visual.trunk.cls_token",
    positions="visual.trunk.pos_embed",
    pre="visual.trunk.norm_pre",
    post="visual.trunk.norm",
    blocks="visual.trunk.blocks",
    block={"ln_1": "norm1", "attn.o": "attn.proj", "ln_2": "norm2", **_MLP},
    qkv="attn.qkv.{}",
    pool="visual.trunk.attn_pool",
    probe="visual.trunk.attn_pool.latent",
    pool_qkv="visual.trunk.attn_pool.kv.{}",
    pool_packed="kv",
    pool_parts={"attn.q": "q", "attn.o": "proj", "norm": "norm", **_MLP},
)


def huggingface_table(config: ClipConfig, rows: int | None = None) -> tuple[Entry, ...]:
    """Hugging Face's `CLIPModel`, `MetaClip2Model` or `SiglipModel`; `rows`: a shortened token table's."""
    vision, text, E = config.vision, config.text, config.embed_dim
    positions = "text_model.embeddings.position_embedding.weight"
    table = [
        *_scale_and_bias(config),
        Entry(TOKEN_TABLE, (text.vocab if rows is None else rows, text.width), ("text.tokens",)),
        Entry(positions, (text.context, text.width), ("text.positions",)),
        *_norm("text_model.final_layer_norm", "text.ln_final", text.width),
        *_image(vision, _HUGGINGFACE),
        *_blocks("text_model.encoder.layers", "text.blocks", text, _HF_BLOCK),
    ]
    if text.projection_bias:  # SigLIP's name
        table += _linear("text_model.head", "text.proj", (E, text.width))
    else:
        table.append(Entry("text_projection.weight", (E, text.width), ("text.proj",), transposed=True))
    if vision.projection:
        table.append(Entry("visual_projection.weight", (E, vision.width), ("visual.proj",), transposed=True))
    if rows is not None:
        table.append(Entry(TOKEN_ROWS, (text.vocab,), ("text.rows",), integer=True))
    return tuple(table)


def openai_table(config: ClipConfig, prefix: str = "") -> tuple[Entry, ...]:
    """OpenAI's state dict, which OpenCLIP and PE-Core share; OpenCLIP may put "text." before text names."""
    projection = Entry("visual.proj", (config.vision.width, config.embed_dim), ("visual.proj",))
    return (
        *_scale_and_bias(config),
        *_openai_text(config, prefix),
        *_image(config.vision, _OPENAI),
        projection,
    )


def timm_table(config: ClipConfig, prefix: str = "text.") -> tuple[Entry, ...]:
    """OpenCLIP's state dict around an image tower of timm."""
    table = [*_scale_and_bias(config), *_openai_text(config, prefix), *_image(config.vision, _TIMM)]
    if config.vision.projection:
        table += _linear("visual.trunk.head", "visual.proj", (config.embed_dim, config.vision.width))
    return tuple(table)


def _scale_and_bias(config: ClipConfig) -> Iterator[Entry]:
    yield Entry("logit_scale", (), ("log_scale",))
    if config.logit_bias:
        yield Entry("logit_bias", (), ("pair_bias",))


def _openai_text(config: ClipConfig, prefix: str) -> Iterator[Entry]:
    text, E = config.text, config.embed_dim
    if text.projection_bias:
        yield from _linear(f"{prefix}text_projection", "text.proj", (E, text.width))
    else:
        yield Entry(f"{prefix}text_projection", (text.width, E), ("text.proj",))
    yield Entry(f"{prefix}token_embedding.weight", (text.vocab, text.width), ("text.tokens",))
    yield Entry(f"{prefix}positional_embedding", (text.context, text.width), ("text.positions",))
    yield from _norm(f"{prefix}ln_final", "text.ln_final", text.width)
    yield from _blocks(f"{prefix}transformer.resblocks", "text.blocks", text, _OPENAI_BLOCK, _OPENAI_QKV)


def _image(vision: VisionConfig, names: _Names) -> Iterator[Entry]:
    """The image tower without its projection; the class token has its own position."""
    shape = (vision.width, 3, vision.patch_size, vision.patch_size)
    yield Entry(f"{names.patch}.weight", shape, ("visual.patch.weight",))
    if vision.patch_bias:
        yield Entry(f"{names.patch}.bias", (vision.width,), ("visual.patch.bias",))
    if vision.class_token:
        yield Entry(names.class_token, (vision.width,), ("visual.class_token",))
    yield Entry(names.positions, (vision.positions, vision.width), ("visual.positions",))
    if vision.pre_norm:
        yield from _norm(names.pre, "visual.ln_pre", vision.width)
    yield from _norm(names.post, "visual.ln_post", vision.width)
    yield from _blocks(names.blocks, "visual.blocks", vision, names.block, names.qkv)
    if vision.pool == "attention":
        yield Entry(names.probe, (vision.width,), ("visual.pool.probe",))
        yield from _packed(names.pool_qkv, "visual.pool.attn", names.pool_packed, vision.width)
        yield from _layer_parts(names.pool, "visual.pool", vision, names.pool_parts)


def _norm(source: str, ours: str, width: int) -> Iterator[Entry]:
    for part in ("weight", "bias"):
        yield Entry(f"{source}.{part}", (width,), (f"{ours}.{part}",))


def _linear(source: str, ours: str, shape: tuple[int, int]) -> Iterator[Entry]:
    """A projection with a bias, of which ours is the transpose."""
    yield Entry(f"{source}.weight", shape, (ours,), transposed=True)
    yield Entry(f"{source}.bias", shape[:1], (f"{ours}_bias",))


def _packed(source: str, ours: str, names: str, width: int) -> Iterator[Entry]:
    """Several square projections in one matrix; `{}` in `source` becomes "weight" or "bias"."""
    count = len(names)
    for part, shape in (("weight", (count * width, width)), ("bias", (count * width,))):
        yield Entry(source.format(part), shape, tuple(f"{ours}.{name}.{part}" for name in names))


def _blocks(
    source: str, ours: str, tower: TowerConfig, names: Mapping[str, str], qkv: str = ""
) -> Iterator[Entry]:
    for layer in range(tower.layers):
        yield from _layer_parts(f"{source}.{layer}", f"{ours}.{layer}", tower, names)
        if qkv:
            yield from _packed(f"{source}.{layer}.{qkv}", f"{ours}.{layer}.attn", "qkv", tower.width)


def _layer_parts(source: str, ours: str, tower: TowerConfig, names: Mapping[str, str]) -> Iterator[Entry]:
    """The parts of a layer or of the pooling; a bias has the first number of its weight's shape."""
    D = tower.width
    square = dict.fromkeys(("attn.q", "attn.k", "attn.v", "attn.o"), (D, D))
    norms = dict.fromkeys(("ln_1", "ln_2", "norm"), (D,))
    sizes: dict[str, tuple[int, ...]] = {
        **norms, **square, "mlp.up": (tower.mlp, D), "mlp.down": (D, tower.mlp)
    }  # fmt: skip
    for name, published in names.items():
        for part, shape in (("weight", sizes[name]), ("bias", sizes[name][:1])):
            yield Entry(f"{source}.{published}.{part}", shape, (f"{ours}.{name}.{part}",))
