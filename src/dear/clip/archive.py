"""Reads the tensors of a TorchScript archive (OpenAI's `ViT-B-16.pt`) without running any of its code.

The archive is a zip: `data.pkl` describes a tree of modules whose tensors point into raw records under
`data/`; `code/` holds the program. Only the tree and the records are used. The unpickler below knows a
handful of names, replaces each by an inert object, and everything it builds is checked before use.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dear.errors import CheckpointError

_MAX_TREE_BYTES = 64 * 1024 * 1024
_MAX_PROGRAM_BYTES = 64 * 1024 * 1024
_MAX_NODES = 200_000
_MAX_NAME = 512
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


# The opcodes PyTorch writes; others can allocate memory or reach names indirectly.
_OPCODES = {
    *("PROTO", "STOP", "MARK", "POP", "GLOBAL", "NEWOBJ", "BUILD", "REDUCE", "BINPERSID"),
    *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BINUNICODE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS"),
}


@dataclass(frozen=True)
class Archive:
    """The tensors of a TorchScript archive by dotted name, and the activation its program computes."""

    tensors: dict[str, Tensor]
    activation: str


def check_zip(path: Path) -> None:
    """Refuse a zip that would expand when it is read: PyTorch stores its tensors uncompressed."""
    try:
        with zipfile.ZipFile(path) as file:
            members = file.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: is truncated or damaged ({error}); download it again") from None
    stored = [member for member in members if not _is_program(member.filename)]
    if any(member.compress_type != zipfile.ZIP_STORED for member in stored):
        raise CheckpointError(f"{path}: contains compressed tensors, which PyTorch never writes; refused")
    if sum(member.file_size for member in stored) > path.stat().st_size:
        raise CheckpointError(f"{path}: declares more bytes than the file contains; refused")


def is_archive(path: Path) -> bool:
    """Whether `path` is a TorchScript archive rather than tensors written by `torch.save`."""
    try:
        with zipfile.ZipFile(path) as file:
            return any(_is_program(name) for name in file.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return False


def _is_program(name: str) -> bool:
    return name.partition("/")[2].startswith("code/")


def read_archive(path: Path) -> Archive:
    """Read every tensor of the module tree in `path`; none of its code is compiled or run."""
    check_zip(path)
    try:
        with zipfile.ZipFile(path) as file:
            root = _root(file)
            if file.getinfo(f"{root}/data.pkl").file_size > _MAX_TREE_BYTES:
                raise pickle.UnpicklingError("its module tree is larger than any CLIP's")
            if f"{root}/byteorder" in file.namelist() and file.read(f"{root}/byteorder") != b"little":
                raise pickle.UnpicklingError("only little-endian tensors can be read")
            content = file.read(f"{root}/data.pkl")
            _check_opcodes(content)
            tree = _Tree(io.BytesIO(content)).load()
            return Archive(_collect(tree, _Records(file, root)), _activation(_program(file)))
    except Exception as error:  # untrusted bytes: opcodes, records and sizes may fail in any way
        raise CheckpointError(f"{path}: is not a complete TorchScript archive of a CLIP ({error})") from None


def _root(file: zipfile.ZipFile) -> str:
    """The top-level folder of the zip; it may have any name."""
    for name in file.namelist():
        if name.endswith("/data.pkl") and name.count("/") == 1:
            return name.removesuffix("/data.pkl")
    raise pickle.UnpicklingError("it contains no data.pkl")


def _program(file: zipfile.ZipFile) -> str:
    """The archive's source text, which is searched and never run."""
    members = [m for m in file.infolist() if _is_program(m.filename) and m.filename.endswith(".py")]
    if sum(member.file_size for member in members) > _MAX_PROGRAM_BYTES:
        raise pickle.UnpicklingError("its program is larger than any CLIP's")
    return "\n".join(file.read(member).decode("utf-8", "replace") for member in members)


def _activation(program: str) -> str:
    """The activation that the program computes: QuickGELU is written with a sigmoid, GELU calls gelu."""
    return "gelu" if "gelu(" in program and "sigmoid(" not in program else "quick_gelu"


def _check_opcodes(content: bytes) -> None:
    """Refuse a tree that uses pickle opcodes that PyTorch never writes."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name not in _OPCODES:
            raise pickle.UnpicklingError(
                f"its module tree uses the opcode {opcode.name}, which PyTorch does not"
            )
        if opcode.name == "LONG_BINPUT" and not 0 <= int(argument or 0) <= len(content):
            raise pickle.UnpicklingError("its module tree numbers more values than it has bytes")


class _Module:
    """Placeholder for any module of the archive: its attributes."""

    attributes: object = None

    def __setstate__(self, state: object) -> None:
        self.attributes = state


class _View:
    """Placeholder for a tensor: its storage, offset, size and strides."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a tensor has an invalid description")


class _Passthrough:
    """Placeholder for PyTorch's wrapper functions; returns its first argument."""

    def __new__(cls, value: Any = None, *_: object) -> Any:
        return value

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a value has an invalid description")


_KNOWN: dict[tuple[str, str], type] = {
    ("torch._utils", "_rebuild_tensor"): _View,
    ("torch._utils", "_rebuild_tensor_v2"): _View,
    ("torch._utils", "_rebuild_parameter"): _Passthrough,
    ("torch.jit._pickle", "restore_type_tag"): _Passthrough,
    ("collections", "OrderedDict"): _Passthrough,  # a tensor's backward hooks, always empty
    **{
        ("torch.jit._pickle", f"build_{kind}list"): _Passthrough
        for kind in ("int", "double", "bool", "tensor")
    },
}


class _Tree(pickle.Unpickler):
    """Unpickles a module tree into the placeholders above; unknown names are refused."""

    def find_class(self, module: str, name: str) -> Any:
        """The placeholder of a name; the type of a storage stays a string."""
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and name in _STORAGES:
            return name
        if module.split(".", maxsplit=1)[0] == "__torch__":
            return _Module
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no CLIP archive needs")

    def persistent_load(self, pid: Any) -> Any:
        """The description of a storage, which `_Records` reads later."""
        return pid


class _Records:
    """The raw values under `data/`; each record is read once."""

    def __init__(self, file: zipfile.ZipFile, root: str) -> None:
        self._file, self._root = file, root
        self._read: dict[str, Tensor] = {}

    def tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: object) -> Tensor:
        """The tensor that a view describes; one that reaches outside its record is refused."""
        _, kind, key, _, _ = storage
        dtype = _STORAGES[kind]
        if key not in self._read:
            data = bytearray(self._file.read(f"{self._root}/data/{key}"))
            self._read[key] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        record = self._read[key]
        if record.dtype != dtype or len(size) != len(stride) or min(offset, *size, *stride, 0) < 0:
            raise pickle.UnpicklingError(f"the tensor in record {key} has an invalid description")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if math.prod(size) > record.numel() or (0 not in size and last >= record.numel()):
            raise pickle.UnpicklingError(f"a tensor reaches outside record {key}")
        return record.as_strided(tuple(size), tuple(stride), offset)


def _collect(tree: object, records: _Records) -> dict[str, Tensor]:
    """Flatten the module tree to dotted names, as `state_dict` would."""
    tensors: dict[str, Tensor] = {}
    waiting: list[tuple[str, object]] = [("", tree)]
    for _ in range(_MAX_NODES):
        if not waiting:
            return tensors
        prefix, value = waiting.pop()
        if len(prefix) > _MAX_NAME:  # a module that contains itself would never end
            break
        if isinstance(value, _View):
            tensors[prefix] = records.tensor(*value.arguments)
        elif isinstance(value, _Module) and isinstance(value.attributes, dict):
            waiting += [(f"{prefix}.{name}".lstrip("."), child) for name, child in value.attributes.items()]
    raise pickle.UnpicklingError("it has more modules, or deeper ones, than any CLIP")
