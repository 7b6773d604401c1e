"""Run folders: what was trained, on what and how, and the files that a training run leaves behind.

A `RunIdentity` holds everything that determines what a run learns; it is compared on resuming and hashed for
keys. A `RunConfig` is `config.json`: the identity, and what a reader of the folder needs beside it.

A folder holds `config.json` (all that is needed to build the method again), `adapter.safetensors` (learned
tensors only), `roles.json` where the method uses roles, `correction.safetensors` where a concept was removed
from the image feature, `metrics.json`, `log.jsonl`, and while training is not complete `resume.safetensors`.
Every file is written whole or not at all. This module does not depend on which method was trained.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

import filelock
import msgspec
import torch

from dear._io.files import (
    read_json,
    read_safetensors,
    read_text,
    require_finite,
    write_atomic,
    write_json,
    write_safetensors,
)
from dear._io.text import Strict, Whole, check, decode, parse_json
from dear.clip.correction import Correction
from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import CheckpointError, DearError, RunError
from dear.heads.roles import RoleMap
from dear.methods import build_method, find_method
from dear.methods.base import Method
from dear.methods.calibration import Calibration
from dear.methods.options import earlier_values
from dear.train.loop import Line, Recipe

FORMAT, SCHEMA = "dear run", 2
CORRECTION, CALIBRATION = "correction.safetensors", "calibration.json"
REQUIRED_FILES = ("config.json", "adapter.safetensors", "metrics.json")
"""Files that every finished run has."""
FILES = (*REQUIRED_FILES, "roles.json", "log.jsonl", CORRECTION, CALIBRATION)
"""Files that a finished run may have."""
_corrected_clips: WeakKeyDictionary[Clip, WeakValueDictionary[str, Clip]] = WeakKeyDictionary()
_WORDS = {"roles": "role map", "fingerprint": "backbone", "data": "training images", "ids": "token ids"}
_RENAMED = {"optimiser": "optimizer", "centre": "center", "pictures": "images"}  # names of schema 1


def plain(value: Any) -> Any:
    """Tuples as lists, all the way down: what JSON gives back."""
    return json.loads(json.dumps(value))


def canonical(value: Any) -> str:
    """JSON text that is the same for equal values: sorted keys, no spaces, tuples as lists.

    >>> canonical({"b": (1, 2), "a": 0.5})
    '{"a":0.5,"b":[1,2]}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, in hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def roles_digest(roles: RoleMap) -> str:
    """Hash of what a method sees of a role map: the kind of each head and, of core heads, the concept."""
    heads = [[*key, role.kind, role.concept if role.kind == "core" else None] for key, role in roles]
    return digest({"core": roles.core, "heads": heads})


def data_digest(images: ImageSet) -> str:
    """Hash of the labels and names of all images, in their order."""
    keys = hashlib.sha256()
    for index, label in enumerate(images.labels.tolist()):
        keys.update(f"{label} {images.key(index)}\n".encode("utf-8", "surrogatepass"))
    return keys.hexdigest()


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """Everything that decides what a run learns; runs with equal identities learn the same.

    Attributes:
        method: name of the method.
        options: its options, all of them.
        recipe: the training recipe, all of it.
        classes: class names in the order of the labels.
        template: the prompt around a class name.
        ids: token ids that were given instead of prompts.
        fingerprint: hash of the backbone's weights.
        roles: hash of the role map; None where none is used.
        data: hash of the training images' names and labels.
        correction: hash of the correction of the image feature; None where there is none.
        preset: name of the setting that options and recipe were taken from.
    """

    method: str
    options: Mapping[str, Any]
    recipe: Mapping[str, Any]
    classes: tuple[str, ...]
    template: str
    ids: tuple[tuple[int, ...], ...] | None
    fingerprint: str
    roles: str | None
    data: str
    correction: str | None = None
    preset: str | None = None

    @classmethod
    def of(cls, method: Method, recipe: Recipe, images: ImageSet, preset: str | None = None) -> RunIdentity:
        """The identity of a run that is to train `method` on `images`."""
        ids = method.prompts.given
        used = method.roles if method.uses_roles else None
        return cls(
            method=method.name,
            options=plain(dataclasses.asdict(method.config)),
            recipe=plain(dataclasses.asdict(recipe)),
            classes=method.classes,
            template=method.template,
            ids=None if ids is None else tuple(map(tuple, ids.tolist())),
            fingerprint=method.clip.fingerprint,
            roles=None if used is None else roles_digest(used),
            data=data_digest(images),
            correction=None if method.clip.correction is None else method.clip.correction.digest,
            preset=preset,
        )

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits that change with any part, but for the preset's name."""
        parts = dataclasses.asdict(self)
        del parts["preset"]  # the options and the recipe say what it stands for
        return digest(parts)[:16]

    def differences(self, other: RunIdentity) -> list[str]:
        """What differs, in words: the parts, and of options and recipe the names in them.

        >>> one = RunIdentity("coop", {"context": 4}, {"lr": 1.0}, ("a",), "{}", None, "sha256:0", None, "0")
        >>> one.differences(dataclasses.replace(one, options={"context": 8}, template="a {}"))
        ['options (context)', 'template']
        """
        found = []
        for field in dataclasses.fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == "preset" or ours == theirs:
                continue
            words = _WORDS.get(field.name, field.name)
            if isinstance(ours, Mapping):
                names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
                words = f"{words} ({', '.join(names)})"
            found.append(words)
        return found


class DataConfig(Strict, frozen=True):
    """The training images."""

    name: str
    images: Whole
    digest: str
    source: str | None = None  #: absolute path, or name that `open_data` takes
    root: str | None = None  #: absolute path of the folder of the benchmarks, for the name of one

    def spec(self) -> str | None:
        """What `open_data` takes to open the same data, with `root`; None where the run does not say."""
        return self.name if self.source is None and self.name.startswith("world:") else self.source


class RunConfig(Strict, frozen=True):
    """The whole file."""

    format: Literal["dear run"]
    schema: Literal[2]
    dear: str
    method: str
    options: dict[str, Any]
    classes: list[str]
    template: str
    ids: list[list[int]] | None
    backbone: str
    fingerprint: str
    allow_other_roles: bool
    recipe: dict[str, Any]
    data: DataConfig
    backbone_path: str | None = None  #: absolute path of the weights, where they are files of the user
    roles: str | None = None  #: hash of the role map
    correction: dict[str, Any] | None = None  #: of the image feature; see `dear.train.folder.read_correction`
    preset: str | None = None
    extra: dict[str, Any] = msgspec.field(default_factory=dict)  #: what a caller of `Trained.save` added

    @property
    def identity(self) -> RunIdentity:
        """What must agree for the run to be continued."""
        return RunIdentity(
            method=self.method,
            options=self.all_options(),
            recipe={**plain(earlier_values(Recipe)), **self.recipe},
            classes=tuple(self.classes),
            template=self.template,
            ids=None if self.ids is None else tuple(map(tuple, self.ids)),
            fingerprint=self.fingerprint,
            roles=self.roles,
            data=self.data.digest,
            correction=None if self.correction is None else str(self.correction.get("digest")),
            preset=self.preset,
        )

    def all_options(self) -> dict[str, Any]:
        """The method's options; those that it got after this run are as the run was trained without them."""
        return {**plain(earlier_values(find_method(self.method).Config)), **self.options}

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    def weights(self) -> str | Path:
        """What to load as the backbone: the path it was loaded from, while it exists; else its name."""
        path = self.backbone_path
        return Path(path) if path and os.path.isabs(path) and os.path.exists(path) else self.backbone


def describe(method: Method, recipe: Recipe, images: ImageSet, preset: str | None = None) -> RunConfig:
    """The configuration of a run that is to train `method` on `images`."""
    from dear import __version__

    identity = RunIdentity.of(method, recipe, images, preset)
    source = getattr(images, "source", None)
    return RunConfig(
        format="dear run",
        schema=2,
        dear=__version__,
        method=identity.method,
        options=dict(identity.options),
        classes=list(identity.classes),
        template=identity.template,
        ids=None if identity.ids is None else [list(row) for row in identity.ids],
        backbone=method.clip.name,
        backbone_path=getattr(method.clip, "source", None),
        fingerprint=identity.fingerprint,
        allow_other_roles=method.allow_other_roles,
        recipe=dict(identity.recipe),
        data=DataConfig(
            name=images.name,
            images=len(images),
            digest=identity.data,
            source=None if source is None else source.spec,
            root=None if source is None else source.root,
        ),
        roles=identity.roles,
        correction=_described(method.clip.correction),
        preset=identity.preset,
    )


def _described(correction: Correction | None) -> dict[str, Any] | None:
    """The correction's part of `config.json`; None: the run has none."""
    if correction is None:
        return None
    return {
        "note": correction.note,
        "heads": [list(head) for head in correction.heads],
        "digest": correction.digest,
    }


def read_config(folder: str | os.PathLike[str]) -> RunConfig:
    """`config.json` of a run, checked; that of an older version is brought up to date.

    Raises:
        RunError: the folder holds none, or one of another version.
    """
    path = Path(folder) / "config.json"
    if not os.path.isfile(path):  # unlike Path's own, also for names no disk can hold
        raise RunError(
            f"{folder}: is not a run folder (no config.json)",
            hint="adapt",
        )
    document = read_json(path, "run configuration")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RunError(f"{path}: is not the configuration of a run")
    if document.get("schema") not in (1, SCHEMA):
        raise RunError(f"{path}: has schema {document.get('schema')!r}; this version of dear reads {SCHEMA}")
    if document["schema"] == 1:
        document = _from_schema_1(document, Path(folder))
    return check(document, RunConfig, str(path), "run configuration", error=RunError)


def _from_schema_1(document: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Schema 1 had other words, no hash of the role map, and whatever a caller added beside the rest."""
    known = set(RunConfig.__struct_fields__)
    extra = {name: value for name, value in document.items() if name not in known}
    kept = {name: _renamed(value) for name, value in document.items() if name in known}
    roles = None
    with suppress(DearError):  # a damaged role map is refused where it is used
        if (folder / "roles.json").is_file():
            roles = roles_digest(RoleMap.load(folder / "roles.json"))
    return {**kept, "schema": SCHEMA, "roles": roles, "extra": extra}


def _renamed(part: Any) -> Any:
    """Options, recipe or data with the present names."""
    return (
        {_RENAMED.get(name, name): value for name, value in part.items()} if isinstance(part, dict) else part
    )


def open_folder(folder: Path, identity: RunIdentity, resume: bool) -> str:
    """What the folder holds: "new", "resumable" or "finished"."""
    finished = (folder / "metrics.json").exists() and not (folder / "resume.safetensors").exists()
    if not (folder / "config.json").exists():
        return "new"
    _refuse_used(folder, resume)
    differing = read_config(folder).identity.differences(identity)
    if differing:
        raise RunError(
            f"{folder}: cannot be resumed: it was begun with different settings: {', '.join(differing)}; ask "
            "for the same, or choose another folder"
        )
    if finished:
        return "finished"
    return "resumable" if (folder / "resume.safetensors").exists() else "new"


def check_folder(path: str | os.PathLike[str], resume: bool) -> None:
    """Refuse a folder that no run can be written to, before any work is done for it.

    Raises:
        RunError: it holds a run that is not to be continued, is in use, is a file or cannot be written.
    """
    folder = Path(path)
    fresh = not folder.exists()
    try:
        with locked(folder):
            _refuse_used(folder, resume)
    finally:
        if fresh:
            with suppress(OSError):  # only an empty folder goes
                folder.rmdir()


def _refuse_used(folder: Path, resume: bool) -> None:
    """Refuse a folder with a run in it, unless it is to be continued."""
    if resume or not (folder / "config.json").exists():
        return
    finished = (folder / "metrics.json").exists() and not (folder / "resume.safetensors").exists()
    how = "a finished run; choose another folder" if finished else "a run that was not completed; resume it"
    hint = None if finished else "resume"
    raise RunError(f"{folder}: holds {how}, or delete it first", hint=hint)


def read_log(folder: Path) -> list[Line]:
    """The log as it was saved."""
    path = folder / "log.jsonl"
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(read_text(path, "training log").splitlines(), 1):
        line = parse_json(text, f"{path}, line {number}", "log line")
        if not isinstance(line, dict) or not isinstance(line.get("step"), int) or not _numbers(line):
            raise RunError(f"{path}, line {number}: is not a line of a training log (numbers by name)")
        lines.append(line)
    return lines


def _numbers(line: dict[str, Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in line.values())


def read_metrics(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """`metrics.json` of a finished run, checked.

    Raises:
        RunError: it is not one.
    """
    path = Path(folder) / "metrics.json"
    metrics = read_json(path, "run metrics")
    if not isinstance(metrics, dict) or type(metrics.get("steps")) is not int:
        raise RunError(f"{path}: is not the metrics of a run")
    if "trainable_numbers" in metrics:  # as earlier versions called them
        metrics["trainable_parameters"] = metrics.pop("trainable_numbers")
    return metrics


def write_log(folder: Path, lines: list[Line]) -> None:
    """Write the log, one JSON object per line."""
    write_atomic(folder / "log.jsonl", "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def load_adapter(method: Method, folder: Path) -> None:
    """Give a method the learned tensors of a finished run."""
    path = folder / "adapter.safetensors"
    state, _ = read_safetensors(path, "adapter")
    require_finite(state, str(path))
    method.load_adapter_state(state, str(path))
    method.calibration = read_calibration(folder)


def write_correction(folder: Path, correction: Correction | None) -> None:
    """Write the tensors of a correction, if there is one."""
    if correction is not None:
        tensors = {"matrix": correction.matrix.cpu(), "bias": correction.bias.cpu()}
        write_safetensors(folder / CORRECTION, tensors, {"dear": correction.digest})


def read_correction(folder: Path, entry: Any) -> Correction | None:
    """The correction that `config.json` of a run describes; None where it has none.

    Raises:
        RunError: it is not as it should be, or the tensors are others than the run was trained with.
    """
    if entry is None:
        return None
    path = folder / CORRECTION
    try:
        heads = tuple((int(layer), int(head)) for layer, head in entry["heads"])
        note, digest = str(entry["note"]), entry["digest"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{folder / 'config.json'}: 'correction' is not as it should be") from error
    tensors, _ = read_safetensors(path, "correction of the image feature")
    if set(tensors) != {"matrix", "bias"}:
        raise RunError(f"{path}: must hold the tensors matrix and bias")
    require_finite(tensors, str(path))
    try:
        found = Correction(tensors["matrix"].float(), tensors["bias"].float(), heads, note)
    except DearError as error:
        raise RunError(f"{path}: {error}") from error
    if found.digest != digest:
        raise RunError(f"{path}: is not the correction that this run was trained with")
    return found


def write_calibration(folder: Path, calibration: Calibration | None) -> None:
    """Write the calibration to a run folder; None removes an older one."""
    if calibration is None:
        (folder / CALIBRATION).unlink(missing_ok=True)
    else:
        write_json(folder / CALIBRATION, msgspec.to_builtins(calibration))


def read_calibration(folder: str | os.PathLike[str]) -> Calibration | None:
    """The calibration of a run folder; None where it has none.

    Raises:
        RunError: the file is damaged.
    """
    path = Path(folder) / CALIBRATION
    if not path.is_file():
        return None
    return decode(read_text(path, "calibration"), Calibration, str(path), "calibration", error=RunError)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process; a second process gets an error."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; name a folder for the run")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock", timeout=0)
        lock.acquire()
    except filelock.Timeout:
        raise RunError(f"{folder}: another process is training in this folder; choose another") from None
    except OSError as error:
        raise RunError(f"{folder}: cannot be used as a run folder ({error.strerror or error})") from error
    for left in folder.glob(".*.part"):  # of a process that was killed while writing
        left.unlink(missing_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # before it is released: afterwards it may be the next process's lock
            (folder / ".lock").unlink()
        lock.release()


def load_run(
    path: str | os.PathLike[str],
    backbone: Any = None,
    device: str | torch.device = "cpu",
    allow_other: bool = False,
) -> Method:
    """The method of a finished run, ready to answer.

    Args:
        path: the run folder.
        backbone: a `Clip`, or what `dear.load` takes; None: the one the run names.
        device: where to load the backbone.
        allow_other: accept a backbone with other weights of the same shape.

    Raises:
        RunError: the folder holds no finished run, or the backbone or the tensors do not fit it.
    """
    folder = Path(path)
    config = read_config(folder)
    if not (folder / "adapter.safetensors").is_file():
        raise RunError(f"{folder}: this run was not completed; resume it", hint="adapt-resume")
    clip = backbone if isinstance(backbone, Clip) else _backbone(folder, config, backbone, device)
    if clip.fingerprint != config.fingerprint and not allow_other:
        raise RunError(
            f"{folder}: was trained on {config.backbone} ({config.fingerprint[:19]}…), but this is "
            f"{clip.name} ({clip.fingerprint[:19]}…); load the one it was trained on"
        )
    clip = corrected_backbone(clip, read_correction(folder, config.correction))
    try:
        method = _untrained(folder, config, clip, allow_other)
    except DearError as error:
        if str(folder) in str(error):
            raise
        raise RunError(f"{folder / 'config.json'}: {error}") from error
    except Exception as error:  # options of another kind than a method expects may fail in any way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"{folder / 'config.json'}: cannot be used ({reason})") from error
    load_adapter(method, folder)
    return method


def _backbone(folder: Path, config: RunConfig, backbone: Any, device: str | torch.device) -> Clip:
    """The backbone that was asked for, or the one that the run names."""
    try:
        return load(config.weights() if backbone is None else backbone, device=device)
    except CheckpointError as error:
        if backbone is not None:
            raise
        raise RunError(
            f"{folder}: was trained on a backbone called {config.backbone!r}, which is not found by "
            "that name; say where it is",
            hint="backbone",
        ) from error


def corrected_backbone(clip: Clip, correction: Correction | None) -> Clip:
    """A backbone with a run's correction in the place of its own.

    Runs with the same correction get the same object, so that adapters share its work.
    """
    if correction is None:
        return clip if clip.correction is None else clip.corrected(None)
    kept = _corrected_clips.setdefault(clip.plain, WeakValueDictionary())
    found = kept.get(correction.digest)
    if found is None:
        found = kept[correction.digest] = clip.corrected(correction)
    return found


def _untrained(folder: Path, config: RunConfig, clip: Clip, allow_other: bool) -> Method:
    """The run's method before its learned tensors are loaded."""
    roles = None
    if find_method(config.method).uses_roles:
        roles = RoleMap.load(folder / "roles.json")
        if config.roles is not None and roles_digest(roles) != config.roles:
            raise RunError(f"{folder / 'roles.json'}: is not the role map that the run was trained with")
    return build_method(
        config.method,
        clip,
        config.classes,
        template=config.template,
        roles=roles,
        allow_other_roles=allow_other or config.allow_other_roles,
        ids=None if config.ids is None else torch.tensor(config.ids, dtype=torch.long),
        **config.all_options(),
    )


def add_metrics(folder: str | os.PathLike[str], **entries: Any) -> None:
    """Add entries to a run's `metrics.json` (an evaluation, say)."""
    write_json(Path(folder) / "metrics.json", {**read_metrics(folder), **plain(entries)})
