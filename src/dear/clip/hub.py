"""Downloads a backbone from the Hugging Face hub: checked, complete, resumable, and offline afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dear._io.files import read_json
from dear.clip.checkpoint import HF_CONFIG, HF_IMAGES, HF_WEIGHTS, OPENCLIP_CONFIG, OPENCLIP_WEIGHTS, shards
from dear.clip.config import KNOWN
from dear.clip.tokenizer_file import FILES as TOKENIZER
from dear.errors import CheckpointError, DearError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_TIMEOUT_SECONDS = 20.0
_CHUNK = 8 * 1024 * 1024


@dataclass(frozen=True)
class _Blob:
    """What the hub says a file is: its length and a checksum (sha256 of large files, git's sha1 of small)."""

    size: int | None
    checksum: str | None


@dataclass(frozen=True)
class _Listing:
    """The files of a repository at one commit."""

    commit: str
    blobs: dict[str, _Blob]


def is_hub_name(text: str) -> bool:
    """Whether `text` has the form `owner/name`.

    Example:
        >>> is_hub_name("openai/clip-vit-base-patch16"), is_hub_name("../photos")
        (True, False)
    """
    return _NAME.fullmatch(text) is not None


def fetch(name: str, cache_dir: str | Path | None = None, endpoint: str | None = None) -> Path:
    """The folder of a hub backbone on this machine, downloaded if it is not here yet.

    Every file is compared with the checksum the hub gives for it, also when it comes from the cache; one
    that differs is thrown away. The cache is huggingface-hub's own (`HF_HOME`, `HF_HUB_CACHE`).

    Args:
        name: `owner/name` on the hub.
        cache_dir: another cache folder.
        endpoint: another hub than `HF_ENDPOINT`.

    Raises:
        CheckpointError: the hub cannot be reached, does not have the model, or sent damaged files.
    """
    cached = _from_cache(name, cache_dir)
    if cached is not None:
        return cached
    if _offline():
        raise CheckpointError(
            f"{name} is not in the cache and HF_HUB_OFFLINE is set; unset it once to download, or download "
            "the model elsewhere and pass its folder"
        )
    listing = _list(name, endpoint)
    folder = None
    for file in _wanted(name, listing.blobs, lambda part: _get(name, part, listing, cache_dir, endpoint)):
        folder = _get(name, file, listing, cache_dir, endpoint).parent
    assert folder is not None  # `_wanted` names files or raises
    return folder


def _offline() -> bool:
    from huggingface_hub import constants

    asked = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    return asked or bool(constants.HF_HUB_OFFLINE)


def _wanted(name: str, available: Iterable[str], get: Any) -> Iterator[str]:
    """The files that make up the model, out of those available: Hugging Face's layout if it is there.

    `get` brings a small file to this machine, because two of them decide what else is needed.
    """
    there = set(available)
    weights = next((file for file in HF_WEIGHTS if file in there), None)
    kind = None
    if HF_CONFIG in there and weights is not None:
        raw = read_json(get(HF_CONFIG), what="model configuration")
        kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind in KNOWN and weights is not None:
        yield HF_CONFIG
        yield from {HF_IMAGES} & there
        if kind != "clip":
            yield from _tokenizer(there)
        if weights.endswith(".index.json"):
            yield from shards(get(weights))
        yield weights
        return
    weights = next((file for file in OPENCLIP_WEIGHTS if file in there), None)
    if OPENCLIP_CONFIG not in there or weights is None:
        raise CheckpointError(f"{name}: this repository holds no CLIP in a layout that can be loaded")
    yield OPENCLIP_CONFIG
    raw = read_json(get(OPENCLIP_CONFIG), what="model configuration")
    if "hf_tokenizer_name" in str(raw):
        yield from _tokenizer(there)
    yield weights


def _tokenizer(there: set[str]) -> Iterator[str]:
    """The tokenizer's files: tokenizer.json alone where it is there, else the sentencepiece model."""
    config, whole, pieces = TOKENIZER[1], TOKENIZER[0], TOKENIZER[2:]
    yield from {config} & there
    yield from ({whole} & there) or sorted(set(pieces) & there)


def _list(name: str, endpoint: str | None) -> _Listing:
    """Ask the hub what the repository holds, with lengths and checksums."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        info = HfApi(endpoint=endpoint).model_info(name, files_metadata=True, timeout=_TIMEOUT_SECONDS)
        blobs = {
            file.rfilename: _Blob(
                size=file.lfs.size if file.lfs else file.size,
                checksum=file.lfs.sha256 if file.lfs else file.blob_id,
            )
            for file in info.siblings or ()
        }
        return _Listing(str(info.sha), blobs)
    except (RepositoryNotFoundError, GatedRepoError) as error:
        if isinstance(error, GatedRepoError):
            fault = "asks you to accept its terms on the Hugging Face hub first"
        else:
            fault = "is neither a folder here nor a model on the Hugging Face hub"
        raise CheckpointError(f"{name!r} {fault}") from None
    except Exception as error:  # the hub's HTTP client, and its exceptions, change between versions
        raise _unreachable(name, error) from error


def _unreachable(name: str, error: Exception) -> CheckpointError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CheckpointError(
        f"{name} could not be downloaded from the Hugging Face hub ({reason}); check the connection, or "
        "download the model elsewhere and pass its folder"
    )


def _get(name: str, file: str, listing: _Listing, cache_dir: str | Path | None, endpoint: str | None) -> Path:
    """One file, downloaded (resumed where a transfer broke) and checked; if damaged, fetched once more."""
    from huggingface_hub import hf_hub_download

    blob = listing.blobs.get(file)
    if blob is None:
        raise CheckpointError(f"{name}: the repository lacks {file}, which its index names")
    for _ in range(2):
        try:
            path = Path(hf_hub_download(name, file, cache_dir=cache_dir, endpoint=endpoint))
        except Exception as error:  # see `_list`
            raise _unreachable(name, error) from error
        if path.parent.name != listing.commit:
            raise CheckpointError(f"{name}: the repository changed during the download; try again")
        if _intact(path, blob):
            return path
        _discard(path)
    raise CheckpointError(
        f"{name}: {file} arrived damaged twice (its size or sha256 differs from what the hub announces); "
        "nothing was kept, try again later"
    )


def _from_cache(name: str, cache_dir: str | Path | None) -> Path | None:
    """The snapshot in the cache if it is whole and every file still has its checksum."""
    files = _cached_files(name, cache_dir)
    if files is None:
        return None
    damaged = [path for path in files if not _intact(path, _announced(path))]
    for path in damaged:
        _discard(path)
    return None if damaged else files[0].parent


def _cached_files(name: str, cache_dir: str | Path | None) -> list[Path] | None:
    """Where the files of a model lie in the cache, or None if one is missing."""
    from huggingface_hub import try_to_load_from_cache

    def cached(file: str) -> Path | None:
        path = try_to_load_from_cache(name, file, cache_dir=cache_dir)
        return Path(path) if isinstance(path, str) else None

    known = (HF_CONFIG, HF_IMAGES, *HF_WEIGHTS, OPENCLIP_CONFIG, *OPENCLIP_WEIGHTS, *TOKENIZER)
    there = [file for file in known if cached(file) is not None]
    try:
        paths = [cached(file) for file in _wanted(name, there, cached)]
    except DearError:  # incomplete, or damaged: to be downloaded
        return None
    return [path for path in paths if path is not None] if None not in paths else None


def _announced(path: Path) -> _Blob:
    """The cache names a file's content by the hub's checksum; where links cannot be made it is forgotten."""
    checksum = Path(os.readlink(path)).name if path.is_symlink() else ""
    return _Blob(None, checksum if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", checksum) else None)


def _intact(path: Path, blob: _Blob) -> bool:
    """Whether a file has the length and the checksum that were announced."""
    size = path.stat().st_size
    if blob.size is not None and size != blob.size:
        return False
    if blob.checksum is None:
        return True
    # git hashes a header before the content; large files are hashed alone
    digest = hashlib.sha256() if len(blob.checksum) == 64 else hashlib.sha1(b"blob %d\0" % size)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == blob.checksum


def _discard(path: Path) -> None:
    """Remove a damaged file from the cache: the link and the content behind it."""
    target = path.resolve()
    for file in {path, target}:
        with contextlib.suppress(OSError):
            file.unlink()
