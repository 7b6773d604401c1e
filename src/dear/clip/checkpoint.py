"""Finds out what a folder or a file holds and reads it as `Clip`'s state dict; nothing in it is ever run.

A published layout is a table of entries: one published tensor, its shape, and the tensor (or tensors) of ours
that it becomes. The same table loads, names what is missing or misshapen, and writes the layout again.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dear._io.files import read_json, read_safetensors, write_json, write_safetensors
from dear.clip.archive import check_zip, is_archive, read_archive
from dear.clip.config import (
    ACTIVATIONS,
    ClipConfig,
    TextConfig,
    TowerConfig,
    VisionConfig,
    from_huggingface,
    to_huggingface,
    to_images,
)
from dear.clip.config_openclip import from_openclip
from dear.clip.config_shapes import from_shapes
from dear.clip.model import Clip
from dear.clip.tokenizer import ClipTokenizer, Tokenizer
from dear.clip.tokenizer_file import find_tokenizer
from dear.errors import CheckpointError, DearError, UsageError

HF_CONFIG = "config.json"
HF_IMAGES = "preprocessor_config.json"
HF_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
OPENCLIP_CONFIG = "open_clip_config.json"
OPENCLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")

_MAX_CONFIG_BYTES = 16 * 1024 * 1024
_TEXT = frozenset(b"\t\n\r" + bytes(range(32, 127)))  # no zip, and no pickle that PyTorch writes, begins so
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read into memory: the shape of the model and its tensors under `Clip`'s own names."""

    config: ClipConfig
    state: dict[str, Tensor]
    layout: str  #: "huggingface", "openclip", "torchscript" or "openai"
    tokenizer: Tokenizer | None = field(default_factory=ClipTokenizer)  #: None: its file is missing


def read_checkpoint(path: Path, activation: str | None = None) -> Checkpoint:
    """Read the checkpoint in a folder or file.

    Args:
        path: a folder in Hugging Face's or OpenCLIP's layout, or one weight file.
        activation: "quick_gelu" or "gelu", for a bare weight file that does not say.

    Raises:
        CheckpointError: nothing that can be read is there, or what is there is damaged or of another model.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise UsageError(f"activation={activation!r} is not known; use one of {', '.join(ACTIVATIONS)}")
    try:
        found = _read_folder(path, activation) if path.is_dir() else _read_file(path, activation)
    except CheckpointError:
        raise
    except DearError as error:  # the file readers do not know that these files are checkpoints
        raise CheckpointError(str(error)) from error
    towers = (found.config.vision, found.config.text)
    if activation is not None and any(tower.activation != activation for tower in towers):
        raise CheckpointError(
            f"{path}: says that its activation is {towers[0].activation}; leave activation={activation!r} out"
        )
    return found


def _read_folder(folder: Path, activation: str | None) -> Checkpoint:
    """Hugging Face's layout if it is whole, else OpenCLIP's; repositories on the hub often hold both."""
    weights = _first(folder, HF_WEIGHTS)
    if weights is not None and (folder / HF_CONFIG).is_file():
        raw = _config(folder / HF_CONFIG)
        if _first(folder, OPENCLIP_WEIGHTS) is None or (isinstance(raw, dict) and "model_type" in raw):
            return _huggingface(_weights(weights).tensors, folder, weights)
    weights = _first(folder, OPENCLIP_WEIGHTS)
    if weights is not None and (folder / OPENCLIP_CONFIG).is_file():
        return _openclip(_weights(weights).tensors, folder / OPENCLIP_CONFIG, weights)
    bare = sorted(folder.glob("*.pt"))
    if len(bare) == 1:
        return _read_file(bare[0], activation)
    raise CheckpointError(
        f"{folder}: holds no CLIP checkpoint; a folder needs {HF_CONFIG} with {HF_WEIGHTS[0]}, "
        f"{OPENCLIP_CONFIG} with {OPENCLIP_WEIGHTS[0]}, or one .pt file"
    )


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _config(path: Path) -> Any:
    return read_json(path, what="model configuration", max_bytes=_MAX_CONFIG_BYTES)


def _huggingface(tensors: dict[str, Tensor], folder: Path, weights: Path) -> Checkpoint:
    images = folder / HF_IMAGES
    config = from_huggingface(
        _config(folder / HF_CONFIG),
        _config(images) if images.is_file() else None,
        str(folder / HF_CONFIG),
    )
    short = TOKEN_ROWS in tensors and tensors.get(TOKEN_TABLE, torch.empty(())).dim() == 2
    rows = len(tensors[TOKEN_TABLE]) if short else None
    _check_depth(config, tensors, folder / HF_CONFIG)
    state = convert(tensors, huggingface_table(config, rows), str(weights))
    return Checkpoint(config, state, "huggingface", _tokenizer(folder, config))


def _tokenizer(folder: Path, config: ClipConfig) -> Tokenizer | None:
    """CLIP's own tokenizer, or the one beside the weights."""
    return ClipTokenizer() if config.text.clean == "clip" else find_tokenizer(folder, config.text)


def _check_depth(config: ClipConfig, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Refuse a depth that the weights cannot have, before anything as long as it is built."""
    layers = config.vision.layers + config.text.layers
    if layers > len(tensors):
        raise CheckpointError(
            f"{source}: asks for {layers} layers, but the weights are {len(tensors)} tensors"
        )


def _openclip(tensors: dict[str, Tensor], config_path: Path, weights: Path) -> Checkpoint:
    config = from_openclip(_config(config_path), str(config_path))
    _check_depth(config, tensors, config_path)
    table = timm_table if is_timm(tensors) else openai_table
    state = convert(tensors, table(config, text_prefix(tensors)), str(weights))
    return Checkpoint(config, state, "openclip", _tokenizer(config_path.parent, config))


def _read_file(path: Path, activation: str | None) -> Checkpoint:
    """One weight file; its tensors' names tell the layout, a configuration beside it the rest."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint file or folder")
    if is_archive(path):
        archive = read_archive(path)
        return _bare(archive.tensors, archive.activation, path, "torchscript")
    weights = _weights(path)
    tensors = weights.tensors
    if is_huggingface(tensors):
        if not (path.parent / HF_CONFIG).is_file():
            raise CheckpointError(
                f"{path}: holds Hugging Face's tensors, which need their {HF_CONFIG} beside them"
            )
        return _huggingface(tensors, path.parent, path)
    activation_unknown = weights.activation_unknown or path.name in OPENCLIP_WEIGHTS
    if activation_unknown and (path.parent / OPENCLIP_CONFIG).is_file():
        return _openclip(tensors, path.parent / OPENCLIP_CONFIG, path)
    if is_timm(tensors):
        raise CheckpointError(
            f"{path}: holds OpenCLIP's tensors, which need their {OPENCLIP_CONFIG} beside them"
        )
    if not is_openai(tensors):
        raise CheckpointError(f"{path}: its tensors are those of no CLIP layout: {some(list(tensors))}")
    if "visual.attn_pool.probe" in tensors:  # PE-Core's own file: all of them were trained with GELU
        activation = activation or "gelu"
    if activation is None and not activation_unknown:
        activation = "quick_gelu"  # what a bare state dict of OpenAI's format is made of
    if activation is None:
        raise CheckpointError(
            f"{path}: does not say whether it was trained with GELU or QuickGELU; put its {OPENCLIP_CONFIG} "
            "beside it, or pass activation='gelu' or activation='quick_gelu'"
        )
    return _bare(tensors, activation, path, "openai")


def _bare(tensors: dict[str, Tensor], activation: str, path: Path, layout: str) -> Checkpoint:
    config = from_shapes(tensors, activation, str(path))
    return Checkpoint(config, convert(tensors, openai_table(config), str(path)), layout)


@dataclass(frozen=True)
class _Weights:
    """Named tensors, and whether their container leaves open which activation they were trained with."""

    tensors: dict[str, Tensor]
    activation_unknown: bool


def _weights(path: Path) -> _Weights:
    """Named tensors of a weight file, or of all the files an index names."""
    if path.name.endswith(".index.json"):
        return _Weights(_sharded(path), activation_unknown=True)
    with path.open("rb") as file:
        start = file.read(9)
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return _Weights(read_safetensors(path, what="safetensors checkpoint")[0], activation_unknown=True)
    if start and all(byte in _TEXT for byte in start):
        raise CheckpointError(f"{path}: is a text file, not a checkpoint; get it again (safetensors is best)")
    return _pickled(path)


def _sharded(index: Path) -> dict[str, Tensor]:
    """All tensors an index names."""
    tensors: dict[str, Tensor] = {}
    for name in shards(index):
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: the file {name} is missing beside it")
        tensors.update(_weights(index.parent / name).tensors)
    lost = [name for name in _weight_map(index) if name not in tensors]
    if lost:
        raise CheckpointError(f"{index}: its files lack the tensors {some(lost)}")
    return tensors


def shards(index: Path) -> list[str]:
    """The weight files an index names; all must lie in its own folder.

    Raises:
        CheckpointError: no index, or one that names a file elsewhere.
    """
    names = sorted({str(file) for file in _weight_map(index).values()})
    for name in names:
        if not _PLAIN_NAME.fullmatch(name) or name.endswith(".json"):
            raise CheckpointError(f"{index}: names the file {name[:80]!r}, which is not in its own folder")
    return names


def _weight_map(index: Path) -> dict[str, Any]:
    raw = _config(index)
    where = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{index}: has no weight_map")
    return where


def _pickled(path: Path) -> _Weights:
    """A state dict written by `torch.save`, read with `weights_only`: anything but tensors is refused."""
    if zipfile.is_zipfile(path):
        check_zip(path)
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: holds more than tensors, or is no PyTorch file; a pickle that could run code stays "
            "shut; get the weights as safetensors"
        ) from None
    except Exception as error:  # torch names damage in many ways, none of them for users
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: is cut or damaged ({reason}); get it again") from None
    wrapped = isinstance(value, Mapping) and isinstance(value.get("state_dict"), Mapping)
    if wrapped:
        value = {str(name).removeprefix("module."): tensor for name, tensor in value["state_dict"].items()}
    if not isinstance(value, Mapping) or not value:
        raise CheckpointError(f"{path}: holds no state dict (named tensors)")
    tensors = {str(name): tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
    odd = [name for name, tensor in tensors.items() if not _is_plain(tensor)]
    if odd:
        raise CheckpointError(f"{path}: tensor {odd[0]!r} is sparse, quantized or empty; no CLIP's is")
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > path.stat().st_size:
        raise CheckpointError(f"{path}: claims more numbers than the file has, so it is refused")
    return _Weights(
        tensors, activation_unknown=wrapped
    )  # OpenCLIP's training runs wrap theirs; OpenAI's files do not


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a block of numbers in memory, as all of a CLIP's are."""
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized


def save_hf(clip: Clip, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write `clip` as a Hugging Face `CLIPModel` folder that transformers and `dear.load` read.

    A shortened token table is written with its row map, which only `dear.load` understands.

    Args:
        clip: the model.
        folder: where `config.json`, `preprocessor_config.json` and `model.safetensors` go; each is written
            whole or not at all, the weights before the configuration that announces them.
        dtype: precision of the stored weights.
    """
    folder, config = Path(folder), clip.config
    state = clip.state_dict()
    rows = len(state["text.tokens"]) if "text.rows" in state else None
    tensors = publish(state, huggingface_table(config, rows))
    stored = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    write_safetensors(folder / HF_WEIGHTS[0], stored, {"format": "pt"})
    write_json(folder / HF_IMAGES, to_images(config))
    write_json(folder / HF_CONFIG, to_huggingface(config, str(dtype).removeprefix("torch.")))


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
        table: the layout, made by `huggingface`, `openai` or `timm`.
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
        # A sum is finite only if all its terms are, and takes a tenth of the time.
        if not bool(tensor.sum().isfinite()) and not bool(torch.isfinite(tensor).all()):
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
            f"{source}: logit_scale is {float(state['log_scale']):g}, which is no usable temperature; "
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


# Ours -> the published names inside one layer, or inside the pooling.
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
_TIMM_BLOCK = {
    "ln_1": "norm1",
    "attn.o": "attn.proj",
    "ln_2": "norm2",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
_HF_POOL = {"attn.o": "attention.out_proj", "norm": "layernorm", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
_OPENAI_POOL = {
    "attn.o": "attn.out_proj",
    "norm": "layernorm",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_TIMM_POOL = {"attn.q": "q", "attn.o": "proj", "norm": "norm", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}


def huggingface_table(config: ClipConfig, rows: int | None = None) -> tuple[Entry, ...]:
    """Hugging Face's `CLIPModel`, `MetaClip2Model` or `SiglipModel`; `rows`: a shortened token table's."""
    vision, text, E = config.vision, config.text, config.embed_dim
    table = [
        *_scale(config),
        Entry(TOKEN_TABLE, (text.vocab if rows is None else rows, text.width), ("text.tokens",)),
        Entry(
            "text_model.embeddings.position_embedding.weight", (text.context, text.width), ("text.positions",)
        ),
        *_norm("text_model.final_layer_norm", "text.ln_final", text.width),
        *_image_ends(
            vision,
            patch="vision_model.embeddings.patch_embedding",
            class_token="vision_model.embeddings.class_embedding",
            positions="vision_model.embeddings.position_embedding.weight",
            pre="vision_model.pre_layrnorm",  # the published name has the slip
            post="vision_model.post_layernorm",
        ),
        *_blocks("vision_model.encoder.layers", "visual.blocks", vision, _HF_BLOCK),
        *_blocks("text_model.encoder.layers", "text.blocks", text, _HF_BLOCK),
    ]
    if text.projection_bias:  # SigLIP's name
        table += _linear("text_model.head", "text.proj", (E, text.width))
    else:
        table.append(
            Entry("text_projection.weight", (E, text.width), ("text.proj",), transposed=True),
        )
    if vision.projection:
        table.append(
            Entry("visual_projection.weight", (E, vision.width), ("visual.proj",), transposed=True),
        )
    if vision.pool == "attention":
        table.append(Entry("vision_model.head.probe", (vision.width,), ("visual.pool.probe",)))
        table += _packed("vision_model.head.attention.in_proj_{}", "visual.pool.attn", "qkv", vision.width)
        table += _named("vision_model.head", "visual.pool", vision, _HF_POOL)
    if rows is not None:
        table.append(Entry(TOKEN_ROWS, (text.vocab,), ("text.rows",), integer=True))
    return tuple(table)


def openai_table(config: ClipConfig, text_at: str = "") -> tuple[Entry, ...]:
    """OpenAI's state dict, which OpenCLIP and PE-Core share; OpenCLIP may put "text." before text names."""
    vision, E = config.vision, config.embed_dim
    table = [
        *_scale(config),
        *_openai_text(config, text_at),
        *_image_ends(
            vision,
            patch="visual.conv1",
            class_token="visual.class_embedding",
            positions="visual.positional_embedding",
            pre="visual.ln_pre",
            post="visual.ln_post",
        ),
        *_openai_blocks("visual.transformer.resblocks", "visual.blocks", vision),
        Entry("visual.proj", (vision.width, E), ("visual.proj",)),
    ]
    if vision.pool == "attention":
        table.append(Entry("visual.attn_pool.probe", (vision.width,), ("visual.pool.probe",)))
        table += _packed("visual.attn_pool.attn.in_proj_{}", "visual.pool.attn", "qkv", vision.width)
        table += _named("visual.attn_pool", "visual.pool", vision, _OPENAI_POOL)
    return tuple(table)


def timm_table(config: ClipConfig, text_at: str = "text.") -> tuple[Entry, ...]:
    """OpenCLIP's state dict around an image tower of timm."""
    vision, E = config.vision, config.embed_dim
    table = [
        *_scale(config),
        *_openai_text(config, text_at),
        *_image_ends(
            vision,
            patch="visual.trunk.patch_embed.proj",
            class_token="visual.trunk.cls_token",
            positions="visual.trunk.pos_embed",
            pre="visual.trunk.norm_pre",
            post="visual.trunk.norm",
        ),
        *_blocks("visual.trunk.blocks", "visual.blocks", vision, _TIMM_BLOCK),
    ]
    for layer in range(vision.layers):
        source = f"visual.trunk.blocks.{layer}.attn.qkv."
        table += _packed(source + "{}", f"visual.blocks.{layer}.attn", "qkv", vision.width)
    if vision.projection:
        table += _linear("visual.trunk.head", "visual.proj", (E, vision.width))
    if vision.pool == "attention":
        table.append(Entry("visual.trunk.attn_pool.latent", (vision.width,), ("visual.pool.probe",)))
        table += _packed("visual.trunk.attn_pool.kv.{}", "visual.pool.attn", "kv", vision.width)
        table += _named("visual.trunk.attn_pool", "visual.pool", vision, _TIMM_POOL)
    return tuple(table)


def _scale(config: ClipConfig) -> Iterator[Entry]:
    yield Entry("logit_scale", (), ("log_scale",))
    if config.logit_bias:
        yield Entry("logit_bias", (), ("pair_bias",))


def _openai_text(config: ClipConfig, at: str) -> Iterator[Entry]:
    text, E = config.text, config.embed_dim
    if text.projection_bias:
        yield from _linear(f"{at}text_projection", "text.proj", (E, text.width))
    else:
        yield Entry(f"{at}text_projection", (text.width, E), ("text.proj",))
    yield Entry(f"{at}token_embedding.weight", (text.vocab, text.width), ("text.tokens",))
    yield Entry(f"{at}positional_embedding", (text.context, text.width), ("text.positions",))
    yield from _norm(f"{at}ln_final", "text.ln_final", text.width)
    yield from _openai_blocks(f"{at}transformer.resblocks", "text.blocks", text)


def _image_ends(
    vision: VisionConfig, patch: str, class_token: str, positions: str, pre: str, post: str
) -> Iterator[Entry]:
    """What stands before and after the layers; the class token has a position of its own."""
    shape = (vision.width, 3, vision.patch_size, vision.patch_size)
    yield Entry(f"{patch}.weight", shape, ("visual.patch.weight",))
    if vision.patch_bias:
        yield Entry(f"{patch}.bias", (vision.width,), ("visual.patch.bias",))
    if vision.class_token:
        yield Entry(class_token, (vision.width,), ("visual.class_token",))
    yield Entry(positions, (vision.positions, vision.width), ("visual.positions",))
    if vision.pre_norm:
        yield from _norm(pre, "visual.ln_pre", vision.width)
    yield from _norm(post, "visual.ln_post", vision.width)


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


def _openai_blocks(source: str, ours: str, tower: VisionConfig | TextConfig) -> Iterator[Entry]:
    yield from _blocks(source, ours, tower, _OPENAI_BLOCK)
    for layer in range(tower.layers):
        packed = f"{source}.{layer}.attn.in_proj_"
        yield from _packed(packed + "{}", f"{ours}.{layer}.attn", "qkv", tower.width)


def _blocks(source: str, ours: str, tower: TowerConfig, names: Mapping[str, str]) -> Iterator[Entry]:
    for layer in range(tower.layers):
        yield from _named(f"{source}.{layer}", f"{ours}.{layer}", tower, names)


def _named(source: str, ours: str, tower: TowerConfig, names: Mapping[str, str]) -> Iterator[Entry]:
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
