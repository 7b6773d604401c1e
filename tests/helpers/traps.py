"""Files that would run code if anybody unpickled them, and small models to aim them at."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import published
import pytest
import torch

import dear
from dear.errors import CheckpointError

TEXT = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}
TEXT |= {"vocab_size": 40, "eos_token_id": 39, "max_position_embeddings": 6}
VISION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 64}
VISION |= {"image_size": 8, "patch_size": 4}


def small_model():
    """A transformers CLIPModel of a few thousand numbers."""
    return published.random_model(VISION, TEXT, 16)


class Runs:
    """Unpickling this would make a folder; the folder must never be there."""

    def __init__(self, path: os.PathLike[str] | str) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def pickles(trap: Path) -> dict[str, bytes]:
    """A pickle that would make `trap`, in every wrapping in which people pass pickles around."""
    bomb = Runs(trap)
    files = {f"protocol {n}": pickle.dumps(bomb, protocol=n) for n in (0, 2, 5)}
    file = io.BytesIO()
    torch.save({"weights": torch.zeros(3), "extra": bomb}, file)
    files["torch.save"] = file.getvalue()
    file = io.BytesIO()
    torch.save({"weights": torch.zeros(3), "extra": bomb}, file, _use_new_zipfile_serialization=False)
    files["torch.save, old"] = file.getvalue()
    file = io.BytesIO()
    np.save(file, np.array([bomb], dtype=object), allow_pickle=True)
    files["numpy.save"] = file.getvalue()
    file = io.BytesIO()
    np.savez(file, a=np.array([bomb], dtype=object))
    files["numpy.savez"] = file.getvalue()
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in ("storages", "tensors", "pickle"):  # what PyTorch wrote before 2017
            member = tarfile.TarInfo(name)
            member.size = len(files["protocol 2"])
            tar.addfile(member, io.BytesIO(files["protocol 2"]))
    files["tar"] = file.getvalue()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", files["protocol 2"])
        archive.writestr("archive/version", "3")
        archive.writestr("archive/code/x.py", "import os")
    files["TorchScript"] = file.getvalue()
    return files


def refused(source, *parts: str) -> str:
    """Loading a checkpoint is refused with a message that has these parts."""
    with pytest.raises(CheckpointError) as caught:
        dear.load(source)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


def repack(source: Path, target: Path, replaced: dict[str, bytes], compress: bool = False) -> Path:
    """Copy a zip, with some records replaced (by the end of their name)."""
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", kind) as new:
        for name in old.namelist():
            record = next((data for end, data in replaced.items() if name.endswith(end)), old.read(name))
            new.writestr(name, record)
    return target
