"""Sharing runs: through the Hugging Face hub, or as one archive with the backbone.

A run is named by its folder, by `hf://owner/name` (or `hf://owner/name@revision`), or by an archive that
`bundle` wrote; `local_run` turns all three into a folder. Files of others pass the same checks as a user's
own: only a run's files are taken, within limits, and no pickle is read.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from dear.clip.factory import list_embedded, locate
from dear.clip.hub import is_hub_name
from dear.errors import DearError, RunError, UsageError, reason_of
from dear.runs.folder import FILES, load_run, read_config, read_metrics
from dear.tasks.share.card import model_card
from dear.utils.digest import of_file
from dear.utils.files import check_output, write_atomic
from dear.utils.user_cache import cache_folder

HUB = "hf://"
BACKBONE, LOCK, CARD = "backbone", "versions.txt", "README.md"
MOST_BYTES = 1 << 30  #: of a run's files
MOST_BACKBONE_BYTES = 32 << 30  #: of a backbone, and of all files of a bundle together
_MOST_MEMBERS = 100  # of a bundle
_BACKBONE_FILES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".model", ".txt")
_PACKAGES = ("dear-vlm", "torch", "numpy", "pillow", "safetensors", "tokenizers")


def push(
    run: str | os.PathLike[str], name: str, *, private: bool = False, endpoint: str | None = None
) -> str:
    """Upload a finished run to the Hugging Face hub, with a model card made from its own figures.

    Args:
        run: the run folder.
        name: `owner/name` on the hub; created if it does not exist.
        private: visible to its owner only, where the repository is new.
        endpoint: another hub than `HF_ENDPOINT`.

    Returns:
        The address of the commit.
    """
    folder, name = Path(run), _hub_name(name)[0]
    files = _run_files(folder)
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    with tempfile.TemporaryDirectory() as place:
        for file in files:
            shutil.copyfile(folder / file, Path(place) / file)
        write_atomic(Path(place) / CARD, model_card(read_config(folder), read_metrics(folder), name))
        with _hub_errors(f"{name}: could not be uploaded"):
            api.create_repo(name, private=private, exist_ok=True)
            commit = api.upload_folder(repo_id=name, folder_path=place, commit_message="A run of dear")
    return str(commit.commit_url)


def pull(name: str, out: str | os.PathLike[str] | None = None, *, endpoint: str | None = None) -> Path:
    """Download a run from the Hugging Face hub.

    Args:
        name: `owner/name` or `owner/name@revision`, with or without `hf://`.
        out: the folder to write, which must not exist; None: the hub's own cache.
        endpoint: another hub than `HF_ENDPOINT`.
    """
    name, revision = _hub_name(name.removeprefix(HUB))
    if out is not None and os.path.lexists(out):
        raise RunError(f"{os.fspath(out)}: exists already; choose a new folder")
    from huggingface_hub import HfApi, snapshot_download

    with _hub_errors(f"{name}: could not be downloaded"):
        info = HfApi(endpoint=endpoint).model_info(name, revision=revision, files_metadata=True)
        size = sum(file.size or 0 for file in info.siblings or () if file.rfilename in FILES)
        if size > MOST_BYTES:
            raise RunError(f"{name}: its files have {size:,} bytes; a run has at most {MOST_BYTES:,}")
        downloaded = snapshot_download(name, revision=info.sha, allow_patterns=list(FILES), endpoint=endpoint)
    folder = Path(downloaded)
    _run_files(folder)
    if out is None:
        return folder
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        fresh = Path(place) / "run"
        fresh.mkdir()
        for file in FILES:
            if (folder / file).is_file():
                shutil.copyfile(folder / file, fresh / file)
        fresh.rename(target)
    return target


def bundle(run: str | os.PathLike[str], out: str | os.PathLike[str], backbone: Any = None) -> Path:
    """Write one archive with a run, its backbone and the versions it was made with.

    A machine with this package and no network can answer images with it. A backbone that comes with the
    package is left out.

    Args:
        run: the run folder.
        out: the archive, ending in .zip.
        backbone: where the backbone is, if it moved since training.
    """
    folder, target = Path(run), Path(out)
    if target.suffix.lower() != ".zip":
        raise UsageError(f"the archive must end in .zip, got {target}")
    check_output(target)
    files = _run_files(folder)
    config = read_config(folder)
    weights = config.backbone_source() if backbone is None else backbone
    load_run(folder, weights)  # refuses another backbone than the one it was trained on
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
            for file in files:
                archive.write(folder / file, file)
            archive.writestr(LOCK, _versions())
            for path in _backbone_files(weights):
                archive.write(path, f"{BACKBONE}/{path.name}")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def local_run(source: str | os.PathLike[str]) -> Path:
    """The folder of a run that is named by its folder, by `hf://owner/name` or by an archive of `bundle`."""
    text = os.fspath(source)
    if text.startswith(HUB):
        return pull(text)
    if text.lower().endswith(".zip") and os.path.isfile(text):
        return _unpack_once(Path(text))
    return Path(text)


def _unpack_once(path: Path) -> Path:
    """The folder that an archive was unpacked to, once per content."""
    folder = cache_folder() / "bundles" / of_file(path).hex()[:32]
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        fresh = Path(place) / "run"
        _unpack(path, fresh)
        _run_files(fresh)
        try:
            fresh.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was first
                raise
    return folder


def _unpack(path: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if not info.is_dir()]
            announced, free = sum(info.file_size for info in members), shutil.disk_usage(folder.parent).free
            if len(members) > _MOST_MEMBERS or announced > min(MOST_BACKBONE_BYTES, free):
                raise RunError(
                    f"{path}: a bundle may have {_MOST_MEMBERS} files and {min(MOST_BACKBONE_BYTES, free):,} "
                    f"bytes together here, got {len(members)} and {announced:,}"
                )
            remaining = MOST_BACKBONE_BYTES
            for info in members:
                name = PurePosixPath(info.filename)
                run_file = len(name.parts) == 1 and name.name in (*FILES, LOCK)
                weights = (
                    len(name.parts) == 2 and name.parts[0] == BACKBONE and name.suffix in _BACKBONE_FILES
                )
                if not run_file and not weights:
                    raise RunError(f"{path}: contains {info.filename[:80]!r}, which is not part of a bundle")
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                remaining -= _copy(
                    archive, info, target, min(MOST_BYTES, remaining) if run_file else remaining
                )
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise RunError(f"{path}: is not an archive that dear bundle wrote ({error})") from error


def _copy(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path, most: int) -> int:
    """Unpack one member of at most `most` bytes (sizes in the directory may be wrong); returns its size."""
    size = 0
    with archive.open(info) as packed, target.open("xb") as file:
        while chunk := packed.read(min(1 << 22, most - size + 1)):
            size += len(chunk)
            if size > most:
                raise RunError(f"{info.filename[:80]}: must have at most {most:,} bytes")
            file.write(chunk)
    return size


def _run_files(folder: Path) -> list[str]:
    """Names of the files of a finished run."""
    read_config(folder)
    if not (folder / "adapter.safetensors").is_file():
        raise RunError(f"{folder}: this run was not completed; resume it", hint="adapt-resume")
    read_metrics(folder)
    return [file for file in FILES if (folder / file).is_file()]


def _backbone_files(source: Any) -> Iterator[Path]:
    name, path = locate(source)
    if name in list_embedded():
        return
    if path.is_file():
        yield path
        return
    for file in sorted(path.iterdir()):
        if file.is_file() and file.suffix in _BACKBONE_FILES and not file.name.startswith("."):
            yield file


def _versions() -> str:
    lines = []
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            lines.append(f"{package}=={version(package)}\n")
    return "".join(lines)


def _hub_name(text: str) -> tuple[str, str | None]:
    if not is_hub_name(text):
        raise UsageError(f"a repository of the hub must be owner/name or owner/name@revision, got {text!r}")
    name, _, revision = text.partition("@")
    return name, revision or None


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """The hub's own errors, whichever client raised them, as one sentence."""
    try:
        yield
    except DearError:
        raise
    except Exception as error:
        raise RunError(f"{what} ({reason_of(error)[:200]}); check the name and the connection") from error
