"""Recognizes the layout of a folder or file and reads it as `Clip`'s state dict; no code in it is run.

`dear.clip.layouts` knows what tensors are called in each published layout.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dear.clip.archive import check_zip, is_archive, read_archive
from dear.clip.config import ACTIVATIONS, ClipConfig
from dear.clip.config_huggingface import from_huggingface, to_huggingface, to_images
from dear.clip.config_openclip import from_openclip
from dear.clip.config_shapes import from_shapes
from dear.clip.layouts import (
    TOKEN_ROWS,
    TOKEN_TABLE,
    abbreviate,
    convert,
    huggingface_table,
    is_huggingface,
    is_openai,
    is_timm,
    openai_table,
    publish,
    text_prefix,
    timm_table,
)
from dear.clip.model import Clip
from dear.clip.tokenizer import Tokenizer, tokenize
from dear.clip.tokenizer_file import find_tokenizer
from dear.errors import CheckpointError, DearError, UsageError, reason_of
from dear.utils.files import read_json, read_safetensors, write_json, write_safetensors

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
_TEXT_BYTES = frozenset(b"\t\n\r" + bytes(range(32, 127)))  # no zip and no pickle of PyTorch begins with them
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read into memory: the shape of the model and its tensors under `Clip`'s names."""

    config: ClipConfig
    state: dict[str, Tensor]
    layout: str  #: "huggingface", "openclip", "torchscript" or "openai"
    tokenizer: Tokenizer | None = tokenize  #: None: its file is missing


def read_checkpoint(path: Path, activation: str | None = None) -> Checkpoint:
    """Read a folder in Hugging Face's or OpenCLIP's layout, or one weight file.

    `activation` ("quick_gelu" or "gelu") is for a bare weight file, which does not store it.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise UsageError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    try:
        checkpoint = _read_folder(path, activation) if path.is_dir() else _read_file(path, activation)
    except CheckpointError:
        raise
    except DearError as error:  # the file readers do not know that these files are checkpoints
        raise CheckpointError(str(error)) from error
    towers = (checkpoint.config.vision, checkpoint.config.text)
    if activation is not None and any(tower.activation != activation for tower in towers):
        raise CheckpointError(
            f"{path}: its activation is {towers[0].activation}, got activation={activation!r}; leave it out"
        )
    return checkpoint


def _read_folder(folder: Path, activation: str | None) -> Checkpoint:
    """Hugging Face's layout if it is complete, else OpenCLIP's; hub repositories often contain both."""
    weights = _first_file(folder, HF_WEIGHTS)
    if weights is not None and (folder / HF_CONFIG).is_file():
        raw = _read_config(folder / HF_CONFIG)
        if _first_file(folder, OPENCLIP_WEIGHTS) is None or (isinstance(raw, dict) and "model_type" in raw):
            return _huggingface_checkpoint(_read_weights(weights).tensors, folder, weights)
    weights = _first_file(folder, OPENCLIP_WEIGHTS)
    if weights is not None and (folder / OPENCLIP_CONFIG).is_file():
        return _openclip_checkpoint(_read_weights(weights).tensors, folder / OPENCLIP_CONFIG, weights)
    bare = sorted(folder.glob("*.pt"))
    if len(bare) == 1:
        return _read_file(bare[0], activation)
    raise CheckpointError(
        f"{folder}: holds no CLIP checkpoint; a folder needs {HF_CONFIG} with {HF_WEIGHTS[0]}, "
        f"{OPENCLIP_CONFIG} with {OPENCLIP_WEIGHTS[0]}, or one .pt file"
    )


def _first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_config(path: Path) -> Any:
    return read_json(path, what="model configuration", max_bytes=_MAX_CONFIG_BYTES)


def _huggingface_checkpoint(tensors: dict[str, Tensor], folder: Path, weights: Path) -> Checkpoint:
    images = folder / HF_IMAGES
    config = from_huggingface(
        _read_config(folder / HF_CONFIG),
        _read_config(images) if images.is_file() else None,
        str(folder / HF_CONFIG),
    )
    shortened = TOKEN_ROWS in tensors and tensors.get(TOKEN_TABLE, torch.empty(())).dim() == 2
    rows = len(tensors[TOKEN_TABLE]) if shortened else None
    _check_depth(config, tensors, folder / HF_CONFIG)
    state = convert(tensors, huggingface_table(config, rows), str(weights))
    return Checkpoint(config, state, "huggingface", _tokenizer_of(folder, config))


def _tokenizer_of(folder: Path, config: ClipConfig) -> Tokenizer | None:
    """CLIP's tokenizer, or the one next to the weights."""
    return tokenize if config.text.clean == "clip" else find_tokenizer(folder, config.text)


def _check_depth(config: ClipConfig, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Refuse a depth that the weights cannot have, before a model of that depth is built."""
    layers = config.vision.layers + config.text.layers
    if layers > len(tensors):
        raise CheckpointError(
            f"{source}: declares {layers} layers, but the weights are {len(tensors)} tensors"
        )


def _openclip_checkpoint(tensors: dict[str, Tensor], config_path: Path, weights: Path) -> Checkpoint:
    config = from_openclip(_read_config(config_path), str(config_path))
    _check_depth(config, tensors, config_path)
    table = timm_table if is_timm(tensors) else openai_table
    state = convert(tensors, table(config, text_prefix(tensors)), str(weights))
    return Checkpoint(config, state, "openclip", _tokenizer_of(config_path.parent, config))


def _read_file(path: Path, activation: str | None) -> Checkpoint:
    """One weight file: its tensors' names decide the layout, a configuration next to it the rest."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint file or folder")
    if is_archive(path):
        archive = read_archive(path)
        return _bare_checkpoint(archive.tensors, archive.activation, path, "torchscript")
    weights = _read_weights(path)
    tensors = weights.tensors
    if is_huggingface(tensors):
        if not (path.parent / HF_CONFIG).is_file():
            raise CheckpointError(
                f"{path}: holds Hugging Face's tensors, which need their {HF_CONFIG} next to them"
            )
        return _huggingface_checkpoint(tensors, path.parent, path)
    activation_unknown = weights.activation_unknown or path.name in OPENCLIP_WEIGHTS
    if activation_unknown and (path.parent / OPENCLIP_CONFIG).is_file():
        return _openclip_checkpoint(tensors, path.parent / OPENCLIP_CONFIG, path)
    if is_timm(tensors):
        raise CheckpointError(
            f"{path}: holds OpenCLIP's tensors, which need their {OPENCLIP_CONFIG} next to them"
        )
    if not is_openai(tensors):
        raise CheckpointError(f"{path}: its tensors fit no known CLIP layout: {abbreviate(list(tensors))}")
    if "visual.attn_pool.probe" in tensors:  # PE-Core's own file: all PE-Core models use GELU
        activation = activation or "gelu"
    if activation is None and not activation_unknown:
        activation = "quick_gelu"  # bare state dicts in OpenAI's layout come from OpenAI
    if activation is None:
        raise CheckpointError(
            f"{path}: does not store its activation; put its {OPENCLIP_CONFIG} next to it, or pass "
            "activation='gelu' or activation='quick_gelu'"
        )
    return _bare_checkpoint(tensors, activation, path, "openai")


def _bare_checkpoint(tensors: dict[str, Tensor], activation: str, path: Path, layout: str) -> Checkpoint:
    config = from_shapes(tensors, activation, str(path))
    return Checkpoint(config, convert(tensors, openai_table(config), str(path)), layout)


@dataclass(frozen=True)
class _Weights:
    """Named tensors, and whether the file format leaves their activation open."""

    tensors: dict[str, Tensor]
    activation_unknown: bool


def _read_weights(path: Path) -> _Weights:
    """Named tensors of a weight file, or of all files that an index names."""
    if path.name.endswith(".index.json"):
        return _Weights(_read_shards(path), activation_unknown=True)
    with path.open("rb") as file:
        start = file.read(9)
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return _Weights(read_safetensors(path, what="safetensors checkpoint")[0], activation_unknown=True)
    if start and all(byte in _TEXT_BYTES for byte in start):
        raise CheckpointError(
            f"{path}: is a text file, not a checkpoint; download it again (safetensors is best)"
        )
    return _read_pickle(path)


def _read_shards(index: Path) -> dict[str, Tensor]:
    """All tensors that an index names."""
    tensors: dict[str, Tensor] = {}
    for name in shards(index):
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: the file {name} is missing next to it")
        tensors.update(_read_weights(index.parent / name).tensors)
    missing = [name for name in _read_weight_map(index) if name not in tensors]
    if missing:
        raise CheckpointError(f"{index}: its files lack the tensors {abbreviate(missing)}")
    return tensors


def shards(index: Path) -> list[str]:
    """The weight files that an index names; all must be in its folder."""
    names = sorted({str(file) for file in _read_weight_map(index).values()})
    for name in names:
        if not _PLAIN_NAME.fullmatch(name) or name.endswith(".json"):
            raise CheckpointError(f"{index}: names the file {name[:80]!r}, which is not in its folder")
    return names


def _read_weight_map(index: Path) -> dict[str, Any]:
    raw = _read_config(index)
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    return weight_map


def _read_pickle(path: Path) -> _Weights:
    """A state dict written by `torch.save`, read with `weights_only`: anything but tensors is refused."""
    if zipfile.is_zipfile(path):
        check_zip(path)
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: contains more than tensors, or is not a PyTorch file; a pickle that could run code is "
            "refused; use the weights in safetensors format"
        ) from None
    except Exception as error:  # torch raises many kinds of errors for damaged files
        raise CheckpointError(
            f"{path}: is truncated or damaged ({reason_of(error)}); download it again"
        ) from None
    wrapped = isinstance(value, Mapping) and isinstance(value.get("state_dict"), Mapping)
    if wrapped:
        value = {str(name).removeprefix("module."): tensor for name, tensor in value["state_dict"].items()}
    if not isinstance(value, Mapping) or not value:
        raise CheckpointError(f"{path}: holds no state dict (named tensors)")
    tensors = {str(name): tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
    unusable = [
        name
        for name, tensor in tensors.items()
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized
    ]
    if unusable:
        raise CheckpointError(
            f"{path}: tensor {unusable[0]!r} is sparse, quantized or on the meta device, not dense"
        )
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > path.stat().st_size:
        raise CheckpointError(f"{path}: declares more numbers than the file contains, so it is refused")
    # OpenCLIP's training runs wrap their state dict, OpenAI's files do not.
    return _Weights(tensors, activation_unknown=wrapped)


def save_hf(clip: Clip, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write `clip` as a Hugging Face `CLIPModel` folder that transformers and `dear.load` read.

    Each file is written atomically, the weights (in `dtype`) before the configuration. A shortened token
    table is written with its row map, which only `dear.load` understands.
    """
    folder, config = Path(folder), clip.config
    state = clip.state_dict()
    rows = len(state["text.tokens"]) if "text.rows" in state else None
    tensors = publish(state, huggingface_table(config, rows))
    stored = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    write_safetensors(folder / HF_WEIGHTS[0], stored, {"format": "pt"})
    write_json(folder / HF_IMAGES, to_images(config))
    write_json(folder / HF_CONFIG, to_huggingface(config, str(dtype).removeprefix("torch.")))
