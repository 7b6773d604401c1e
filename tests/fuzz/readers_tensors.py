"""Readers of weights: checkpoints in every layout, their configurations, contribution stores."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import mutate
import published
import safetensors.torch
import torch
from fuzzing import Target
from tiny import Colors, tiny_clip

from dear.clip.checkpoint import read_checkpoint
from dear.clip.factory import build
from dear.heads.contributions import head_maps
from dear.heads.moments import Moments, SavedMoments
from dear.utils.files import read_safetensors, require_finite

TEXT = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
TEXT |= {"vocab_size": 20, "eos_token_id": 19, "max_position_embeddings": 5}
VISION = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
VISION |= {"image_size": 8, "patch_size": 4}

# Opcodes of pickle, and names that a hostile one would ask for.
_PICKLE = (
    *(
        b"cos\nsystem\n",
        b"cbuiltins\neval\n",
        b"cposix\nmkdir\n",
        b"ctorch\nload\n",
        b"ctorch\nFloatStorage\n",
    ),
    *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_sparse_tensor\n"),
    *(b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n", b"ctorch._utils\n_rebuild_qtensor\n"),
    *(
        b"R",
        b"b",
        b"0",
        b"(",
        b")",
        b"\x85",
        b"\x86",
        b"\x87",
        b"}",
        b"]",
        b"s",
        b"u",
        b"\x81",
        b"Q",
        b"i",
        b"o",
    ),
    *(b"\x8a\x08" + b"\xff" * 8, b"J\xff\xff\xff\x7f", b"\x93", b"\x94", b"\x8c\x05posix"),
    *(b"X\x05\x00\x00\x00posix", b"K\x00", b"N", b"."),
)


def _model():
    return published.random_model(VISION, TEXT, 8)


def check_checkpoint(path: Path) -> None:
    """What must hold of a checkpoint that was read: a model whose every number is finite."""
    clip = build(read_checkpoint(path), "x", torch.device("cpu"), torch.float32)
    assert all(bool(torch.isfinite(t).all()) for t in clip.state_dict().values() if t.is_floating_point())
    assert clip.fingerprint.startswith("sha256:")


def hf_weights(folder: Path) -> Target:
    place = published.write_huggingface(_model(), folder / "hf")
    good = (place / "model.safetensors").read_bytes()

    def read(data: bytes) -> None:
        (place / "model.safetensors").write_bytes(data)
        check_checkpoint(place)

    return Target("hf-weights", [good], read, mutate.safetensors_file)


def hf_config(folder: Path) -> Target:
    place = published.write_huggingface(_model(), folder / "hfc")
    images = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.2, 0.2, 0.2], "size": 8}
    whole = json.loads((place / "config.json").read_text())
    whole = {key: whole[key] for key in ("vision_config", "text_config", "projection_dim", "model_type")}
    for tower, own in (("vision_config", VISION), ("text_config", TEXT)):
        whole[tower] = {key: whole[tower][key] for key in (*own, "hidden_act", "layer_norm_eps")}

    def read(data: bytes) -> None:
        config, _, preprocessor = data.partition(b"\n--\n")
        (place / "config.json").write_bytes(config)
        (place / "preprocessor_config.json").write_bytes(preprocessor)
        check_checkpoint(place)

    def change(data: bytes, rng, pool, words) -> bytes:
        parts = list(data.partition(b"\n--\n")[::2])
        at = rng.choice((0, 0, 1))
        parts[at] = mutate.json_text(parts[at], rng, parts, words)
        return b"\n--\n".join(parts)

    seed = json.dumps(whole).encode() + b"\n--\n" + json.dumps(images).encode()
    return Target("hf-config", [seed], read, change)


def openclip_config(folder: Path) -> Target:
    place = published.write_openclip(_model(), folder / "oc")
    path = place / "open_clip_config.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        check_checkpoint(place)

    return Target("openclip-config", [path.read_bytes()], read, mutate.json_text)


def shard_index(folder: Path) -> Target:
    place = published.write_huggingface(_model(), folder / "shards")
    (place / "model.safetensors").rename(place / "one.safetensors")
    names = safetensors.torch.load_file(place / "one.safetensors")
    good = json.dumps({"weight_map": dict.fromkeys(names, "one.safetensors")}).encode()
    path = place / "model.safetensors.index.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        check_checkpoint(place)

    return Target("shard-index", [good], read, mutate.json_text, [b"../one.safetensors", b"/"])


def _repacked(whole: bytes, name: str, record: bytes) -> bytes:
    """A zip with one member replaced, checksums right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(out, "w") as new:
        for member in old.namelist():
            new.writestr(member, record if member.endswith(name) else old.read(member))
    return out.getvalue()


def _member(whole: bytes, name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(whole)) as file:
        return next(file.read(member) for member in file.namelist() if member.endswith(name))


def torch_pickle(folder: Path) -> Target:
    """The pickle inside a file that `torch.save` wrote."""
    path = published.write_state_dict(_model(), folder / "a.pt")
    whole = path.read_bytes()

    def read(data: bytes) -> None:
        path.write_bytes(_repacked(whole, "/data.pkl", data))
        check_checkpoint(path)

    return Target("torch-pickle", [_member(whole, "/data.pkl")], read, words=_PICKLE)


def torch_file(folder: Path) -> Target:
    """The file around it: the zip of today and the bare pickle of old."""
    path = folder / "b.pt"
    state = published.openai_state(_model())
    torch.save(state, path, _use_new_zipfile_serialization=False)
    old = path.read_bytes()
    torch.save(state, path)
    seeds = [path.read_bytes(), old]

    def read(data: bytes) -> None:
        path.write_bytes(data)
        check_checkpoint(path)

    return Target("torch-file", seeds, read, words=[*_PICKLE, b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"])


def archive_tree(folder: Path) -> Target:
    """The module tree of a TorchScript archive."""
    path = published.write_torchscript(_model(), folder / "c.pt")
    whole = path.read_bytes()

    def read(data: bytes) -> None:
        path.write_bytes(_repacked(whole, "/data.pkl", data))
        check_checkpoint(path)

    return Target("archive-tree", [_member(whole, "/data.pkl")], read, words=_PICKLE)


def archive_file(folder: Path) -> Target:
    """The zip of a TorchScript archive."""
    path = published.write_torchscript(_model(), folder / "d.pt")

    def read(data: bytes) -> None:
        path.write_bytes(data)
        check_checkpoint(path)

    words = [b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"../", b"/code/", b"data.pkl"]
    return Target("archive-file", [path.read_bytes()], read, words=words)


def tensors(folder: Path) -> Target:
    """Any safetensors file: adapters and saved states go through the same reader."""
    path = folder / "t.safetensors"
    state = {
        "a": torch.ones(2, 3),
        "b": torch.zeros(4, dtype=torch.int64),
        "c": torch.ones((), dtype=torch.half),
    }
    good = safetensors.torch.save(state, {"step": "3"})

    def read(data: bytes) -> None:
        path.write_bytes(data)
        found, words = read_safetensors(path)
        require_finite(found, "t")
        assert sum(t.numel() * t.element_size() for t in found.values()) <= len(data)
        assert all(isinstance(k, str) and isinstance(v, str) for k, v in words.items())

    words = [b'"F8_E4M3"', b'"U64"', b'"C64"', b'"BF16"', b'"F4"', b"__metadata__", b"data_offsets"]
    return Target("safetensors", [good, safetensors.torch.save({})], read, mutate.safetensors_file, words)


def moments(folder: Path) -> Target:
    """What an interrupted discovery kept: taken over whole, or the images are read again."""
    path = folder / "kept.safetensors"
    clip = tiny_clip(dtype=torch.float32)
    kept = SavedMoments(path, clip, Colors(), (6,), 4)
    seen = Moments(head_maps(clip, (6,)), (6,))
    seen.add(torch.ones(5, 1, 4, 9))
    kept.save(seen, done=5)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        found = Moments(seen.maps, (6,))
        assert 0 <= kept.restore(found) == found.count <= len(Colors())
        assert bool(torch.isfinite(found.total).all())
        assert bool(torch.isfinite(found.square).all())

    return Target("kept-moments", [path.read_bytes()], read, mutate.safetensors_file, [b" 5", b"total"])


TARGETS = {
    "kept-moments": moments,
    "hf-weights": hf_weights,
    "hf-config": hf_config,
    "openclip-config": openclip_config,
    "shard-index": shard_index,
    "torch-pickle": torch_pickle,
    "torch-file": torch_file,
    "archive-tree": archive_tree,
    "archive-file": archive_file,
    "safetensors": tensors,
}
