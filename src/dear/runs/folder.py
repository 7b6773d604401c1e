"""Run folders: reading and writing the files of a training run.

A folder contains `config.json` (everything needed to build the method), `adapter.safetensors` (learned
tensors only), `roles.json` where the method uses roles, `correction.safetensors` where a concept was removed
from the image feature, `calibration.json` and `reference.safetensors` where probabilities were calibrated,
`texts.safetensors` where classes have several texts, `metrics.json`, `log.jsonl`, and while training is not
complete `resume.safetensors`.
Every file is written atomically.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
import msgspec
import torch

from dear.calibration.calibration import Calibration
from dear.calibration.reference import REFERENCE, Reference
from dear.clip.correction import Correction
from dear.clip.digest_cache import read_digests, write_digests
from dear.clip.factory import list_backbones, load
from dear.clip.model import Clip
from dear.errors import CheckpointError, DearError, RunError, reason_of
from dear.heads.roles import RoleMap
from dear.methods import build_method, find_method
from dear.methods.base import Method
from dear.methods.texts import ClassTexts
from dear.runs.recipe import Line
from dear.runs.spec import SCHEMA, Spec, plain, roles_digest
from dear.utils.files import (
    read_json,
    read_safetensors,
    read_text,
    require_finite,
    write_atomic,
    write_json,
    write_safetensors,
)
from dear.utils.schema import check, decode, parse_json

FORMAT = "dear run"
CORRECTION, CALIBRATION, TEXTS = "correction.safetensors", "calibration.json", "texts.safetensors"
REQUIRED_FILES = ("config.json", "adapter.safetensors", "metrics.json")
"""Files of every finished run."""
FILES = (*REQUIRED_FILES, "roles.json", "log.jsonl", CORRECTION, CALIBRATION, REFERENCE, TEXTS)
"""Files that a finished run may have."""


def read_config(folder: str | os.PathLike[str]) -> Spec:
    """`config.json` of a run, checked."""
    path = Path(folder) / "config.json"
    if not os.path.isfile(path):  # unlike Path.is_file, also for names that no file system allows
        if not os.path.exists(folder):
            if os.fspath(folder) in list_backbones():
                raise RunError(
                    f"{folder} is a backbone, not a run; dear.zeroshot answers with a backbone", hint="adapt"
                )
            raise RunError(f"{folder}: no such run folder", hint="adapt")
        raise RunError(
            f"{folder}: is not a run folder (no config.json); pass a dataset as data", hint="adapt"
        )
    document = read_json(path, "run configuration")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RunError(f"{path}: is not the configuration of a run")
    if document.get("schema") != SCHEMA:
        raise RunError(
            f"{path}: has schema {document.get('schema')!r}; this version of dear reads schema {SCHEMA}"
        )
    return check(document, Spec, str(path), "run configuration", error=RunError)


def open_folder(folder: Path, spec: Spec, resume: bool) -> str:
    """The state of the folder: "new", "resumable" or "finished"."""
    if not (folder / "config.json").exists():
        return "new"
    _require_unused(folder, resume)
    differing = read_config(folder).differences(spec)
    if differing:
        raise RunError(
            f"{folder}: cannot be resumed: it was started with other settings ({', '.join(differing)}); "
            "use the same settings, or choose another folder"
        )
    if _finished(folder):
        return "finished"
    return "resumable" if (folder / "resume.safetensors").exists() else "new"


def check_folder(path: str | os.PathLike[str], resume: bool) -> None:
    """Raise a RunError if no run can be written to the folder, before any work is done."""
    folder = Path(path)
    is_new = not folder.exists()
    try:
        with locked(folder):
            _require_unused(folder, resume)
    finally:
        if is_new:
            with suppress(OSError):  # removes only an empty folder
                folder.rmdir()


def _require_unused(folder: Path, resume: bool) -> None:
    """Raise a RunError for a folder that contains a run, unless it is resumed, or files of something else."""
    if not (folder / "config.json").exists():
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        foreign = [name for name in names if name not in (*FILES, "resume.safetensors")]
        if foreign:
            raise RunError(
                f"{folder}: contains {foreign[0]!r}, which is not part of a run; choose a new or empty folder"
            )
        return
    if resume:
        return
    if _finished(folder):
        raise RunError(f"{folder}: contains a finished run; choose another folder, or delete it first")
    raise RunError(
        f"{folder}: contains a run that was not completed; resume it, or delete it first", hint="resume"
    )


def _finished(folder: Path) -> bool:
    return (folder / "metrics.json").exists() and not (folder / "resume.safetensors").exists()


def read_log(folder: Path) -> list[Line]:
    """The lines of the training log."""
    path = folder / "log.jsonl"
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(read_text(path, "training log").splitlines(), 1):
        line = parse_json(text, f"{path}, line {number}", "log line")
        numbers = isinstance(line, dict) and all(type(value) in (int, float) for value in line.values())
        if not numbers or not isinstance(line.get("step"), int):
            raise RunError(f"{path}, line {number}: is not a line of a training log (numbers by name)")
        lines.append(line)
    return lines


def read_metrics(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """`metrics.json` of a finished run, checked."""
    path = Path(folder) / "metrics.json"
    metrics = read_json(path, "run metrics")
    if not isinstance(metrics, dict) or type(metrics.get("steps")) is not int:
        raise RunError(f"{path}: is not the metrics of a run")
    return metrics


def write_log(folder: Path, lines: list[Line]) -> None:
    """Write the log, one JSON object per line."""
    write_atomic(folder / "log.jsonl", "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def load_adapter(method: Method, folder: Path) -> None:
    """Load the learned tensors of a finished run into a method."""
    path = folder / "adapter.safetensors"
    state, _ = read_safetensors(path, "adapter")
    require_finite(state, str(path))
    method.load_adapter_state(state, str(path))


def write_spec(folder: Path, method: Method, spec: Spec) -> None:
    """Write what is trained: `config.json`, and the role map and the correction where there are any."""
    write_correction(folder, method.clip.correction)
    write_texts(folder, method)
    write_json(folder / "config.json", spec.document())
    if method.uses_roles and method.roles is not None:
        method.roles.save(folder / "roles.json")


def write_texts(folder: Path, method: Method) -> None:
    """Write the mean feature of each class that has several texts, trained or not, in the order of names."""
    texts = method.prompts.texts
    means = texts.features(method.clip, texts.sentences, method.template)
    if means:
        rows = torch.stack([means[name].float().cpu() for name in texts.sentences])
        write_safetensors(folder / TEXTS, {"features": rows}, {"dear": "mean features of class texts"})


def read_texts(folder: Path, config: Spec, same_weights: bool) -> ClassTexts:
    """The texts of a run; means of another backbone's text tower are computed again."""
    if not config.texts or not same_weights:
        return ClassTexts(config.texts)
    path = folder / TEXTS
    tensors, _ = read_safetensors(path, "file of class texts")
    require_finite(tensors, str(path))
    rows = tensors.get("features")
    if rows is None or rows.ndim != 2 or len(rows) != len(config.texts):
        raise RunError(f"{path}: must contain one row of features for each of {len(config.texts)} classes")
    return ClassTexts(config.texts, dict(zip(config.texts, rows, strict=True)))


def write_correction(folder: Path, correction: Correction | None) -> None:
    """Write the tensors of a correction, if there is one."""
    if correction is not None:
        tensors = {"matrix": correction.matrix.cpu(), "bias": correction.bias.cpu()}
        write_safetensors(folder / CORRECTION, tensors, {"dear": correction.digest})


def read_correction(folder: Path, entry: Any) -> Correction | None:
    """The correction in `config.json` of a run; None if it has none."""
    if entry is None:
        return None
    path = folder / CORRECTION
    try:
        heads = tuple((int(layer), int(head)) for layer, head in entry["heads"])
        note, digest = str(entry["note"]), entry["digest"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{folder / 'config.json'}: 'correction' needs note, heads and digest") from error
    tensors, _ = read_safetensors(path, "correction of the image feature")
    if set(tensors) != {"matrix", "bias"}:
        raise RunError(f"{path}: must contain the tensors matrix and bias")
    require_finite(tensors, str(path))
    try:
        correction = Correction(tensors["matrix"].float(), tensors["bias"].float(), heads, note)
    except DearError as error:
        raise RunError(f"{path}: {error}") from error
    if correction.digest != digest:
        raise RunError(f"{path}: is not the correction that this run was trained with")
    return correction


def write_learned(folder: Path, method: Method, metrics: Mapping[str, Any], lines: list[Line]) -> None:
    """Write what a training learned: log, learned tensors, and metrics."""
    write_log(folder, lines)
    # One key: safetensors writes several in an order that changes from run to run.
    metadata = {"dear": f"{method.name} on {method.clip.fingerprint}"}
    write_safetensors(folder / "adapter.safetensors", method.adapter_state(), metadata)
    write_json(folder / "metrics.json", plain(metrics))


def write_calibration(
    folder: Path, calibration: Calibration | None, reference: Reference | None = None
) -> None:
    """Write the calibration and the features that belong to it; None removes an older file."""
    if calibration is None:
        (folder / CALIBRATION).unlink(missing_ok=True)
    else:
        write_json(folder / CALIBRATION, msgspec.to_builtins(calibration))
    if reference is None:
        (folder / REFERENCE).unlink(missing_ok=True)
    else:
        reference.save(folder)


def read_calibration(folder: str | os.PathLike[str]) -> Calibration | None:
    """The calibration of a run folder; None if it has none."""
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
    for partial in folder.glob(".*.part"):  # of a process that was killed while writing
        partial.unlink(missing_ok=True)
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
    config: Spec | None = None,
) -> Method:
    """The method of a finished run, ready to answer.

    Args:
        path: the run folder.
        backbone: a `Clip`, or what `dear.load` takes; None: the one the run names.
        device: where to load the backbone.
        allow_other: accept a backbone with other weights of the same shape.
        config: the run's `config.json`, if it has been read.
    """
    folder = Path(path)
    config = read_config(folder) if config is None else config
    if not (folder / "adapter.safetensors").is_file():
        raise RunError(f"{folder}: this run was not completed; resume it", hint="adapt-resume")
    if isinstance(backbone, Clip):
        clip = backbone
    else:
        clip = _backbone(folder, config, backbone, device)
        _recall_fingerprints(clip)
    if clip.identity != config.identity and not allow_other:
        same = clip.fingerprint == config.fingerprint
        what = "the same image tower with another text tower, temperature, architecture or preprocessing"
        raise RunError(
            f"{folder}: was trained on {config.backbone} ({config.identity[:19]}…), but {clip.name} "
            f"({clip.identity[:19]}…) is {what if same else 'another backbone'}; load the original one"
        )
    clip = clip.with_correction(read_correction(folder, config.correction))
    try:
        method = _build_untrained(folder, config, clip, allow_other)
    except DearError as error:
        if str(folder) in str(error):
            raise
        raise RunError(f"{folder / 'config.json'}: {error}") from error
    except Exception as error:  # options of wrong types may fail in any way
        raise RunError(f"{folder / 'config.json'}: cannot be used ({reason_of(error)})") from error
    load_adapter(method, folder)
    return method


def _recall_fingerprints(clip: Clip) -> None:
    """Use cached fingerprints if the weight files are unchanged; otherwise cache the computed ones."""
    known = read_digests(clip.checkpoint_stamp)
    if known is None:
        write_digests(clip.checkpoint_stamp, clip.weight_digests())
    else:
        clip.digests = known


def _backbone(folder: Path, config: Spec, backbone: Any, device: str | torch.device) -> Clip:
    """The backbone that the caller names, the one in the run folder, or the one that the run names."""
    bundled = folder / "backbone"
    if backbone is None and bundled.is_dir():
        files = [path for path in bundled.iterdir() if path.is_file()]
        clip = load(files[0] if len(files) == 1 else bundled, device=device)
        clip.name = config.backbone
        return clip
    try:
        return load(config.backbone_source() if backbone is None else backbone, device=device)
    except CheckpointError as error:
        if backbone is not None:
            raise
        raise RunError(
            f"{folder}: was trained on the backbone {config.backbone!r}, which was not found; pass its "
            "path as backbone",
            hint="backbone",
        ) from error


def _build_untrained(folder: Path, config: Spec, clip: Clip, allow_other: bool) -> Method:
    """The run's method before its learned tensors are loaded."""
    roles, kind = None, find_method(config.method)
    former = kind.former_options
    options = {k: v for k, v in config.options.items() if k not in former or v != former[k]}
    if kind.uses_roles:
        roles = RoleMap.load(folder / "roles.json")
        if config.roles_digest is not None and roles_digest(roles) != config.roles_digest:
            raise RunError(f"{folder / 'roles.json'}: is not the role map that the run was trained with")
    return build_method(
        config.method,
        clip,
        config.classes,
        template=config.template,
        roles=roles,
        allow_other_roles=allow_other or config.allow_other_roles,
        ids=None if config.ids is None else torch.tensor(config.ids, dtype=torch.long),
        several=config.several,
        trained=[name for name in config.classes if name not in config.extended],
        texts=read_texts(folder, config, clip.identity == config.identity),
        **options,
    )


def add_metrics(folder: str | os.PathLike[str], **entries: Any) -> None:
    """Add entries to a run's `metrics.json` (an evaluation, say)."""
    write_json(Path(folder) / "metrics.json", {**read_metrics(folder), **plain(entries)})
