"""Downloads a backbone from the Hugging Face hub: complete, checked, resumable, and offline afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dear.clip.checkpoint import HF_CONFIG, HF_IMAGES, HF_WEIGHTS, OPENCLIP_CONFIG, OPENCLIP_WEIGHTS, shards
from dear.clip.config_huggingface import KNOWN
from dear.clip.tokenizer_file import FILES as TOKENIZER
from dear.errors import CheckpointError, DearError, reason_of
from dear.utils.files import read_json

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)
_TIMEOUT_SECONDS = 20.0
_CHUNK = 8 * 1024 * 1024
_DECIDING = (HF_CONFIG, OPENCLIP_CONFIG, *(name for name in HF_WEIGHTS if name.endswith(".index.json")))


def is_hub_name(text: str) -> bool:
    """Whether `text` has the form `owner/name` or `owner/name@revision`.

    Example:
        >>> [is_hub_name(text) for text in ("openai/clip-vit-base-patch16", "a/b@v1.0", "../photos")]
        [True, True, False]
    """
    return _NAME.fullmatch(text) is not None


def fetch(name: str, cache_dir: str | Path | None = None, endpoint: str | None = None) -> Path:
    """The folder of a hub backbone on this machine, downloaded if it is not here yet.

    `name` is `owner/name`, or `owner/name@revision` with a branch, tag or commit. The cache is
    huggingface-hub's (`HF_HOME`, `HF_HUB_CACHE`) unless `cache_dir` is set; what is in it is not
    downloaded again.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    repository, _, revision = name.partition("@")
    download = partial(
        snapshot_download, repository, revision=revision or None, cache_dir=cache_dir, endpoint=endpoint
    )
    folder = _cached(repository, revision, cache_dir)
    if folder is not None:
        with contextlib.suppress(DearError):  # what is there is not complete
            there = {path.name for path in folder.iterdir() if path.exists()}
            if set(_wanted(name, there, folder)) <= there:
                return folder
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"} or HF_HUB_OFFLINE:
        raise CheckpointError(
            f"{name} is not in the cache and HF_HUB_OFFLINE is set; unset it once to download, or download "
            "the model elsewhere and pass its folder"
        )
    with _named_errors(name):
        commit, files = _list(repository, revision, endpoint)
        folder = Path(download(allow_patterns=list(_DECIDING)))
        for file in {*_DECIDING} & {*files}:
            _check(name, folder / file)
        wanted = list(_wanted(name, files, folder))
        folder = Path(download(allow_patterns=wanted))
    if folder.name != commit:
        raise CheckpointError(f"{name}: the repository changed during the download; try again")
    for file in wanted:
        _check(name, folder / file)
    return folder


def _cached(repository: str, revision: str, cache_dir: str | Path | None) -> Path | None:
    """The folder of a revision in the cache, complete or not."""
    from huggingface_hub import try_to_load_from_cache

    for file in _DECIDING:
        path = try_to_load_from_cache(repository, file, cache_dir=cache_dir, revision=revision or None)
        if isinstance(path, str):
            return Path(path).parent
    return None


def _wanted(name: str, available: Iterable[str], folder: Path) -> Iterator[str]:
    """The files that make up the model, out of those available: Hugging Face's layout if it is there.

    `folder` holds those of `_DECIDING`.
    """
    there = set(available)
    weights = next((file for file in HF_WEIGHTS if file in there), None)
    kind = None
    if HF_CONFIG in there and weights is not None:
        raw = read_json(folder / HF_CONFIG, what="model configuration")
        kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind in KNOWN and weights is not None:
        yield HF_CONFIG
        yield from {HF_IMAGES} & there
        if kind != "clip":
            yield from _tokenizer(there)
        if weights.endswith(".index.json"):
            yield from shards(folder / weights)
        yield weights
        return
    weights = next((file for file in OPENCLIP_WEIGHTS if file in there), None)
    if OPENCLIP_CONFIG not in there or weights is None:
        raise CheckpointError(f"{name}: this repository holds no CLIP in a layout that can be loaded")
    yield OPENCLIP_CONFIG
    raw = read_json(folder / OPENCLIP_CONFIG, what="model configuration")
    if "hf_tokenizer_name" in str(raw):
        yield from _tokenizer(there)
    yield weights


def _tokenizer(there: set[str]) -> Iterator[str]:
    """The tokenizer's files: tokenizer.json alone where it is there, else the sentencepiece model."""
    complete, config, *pieces = TOKENIZER
    yield from {config} & there
    yield from ({complete} & there) or sorted(set(pieces) & there)


def _list(repository: str, revision: str, endpoint: str | None) -> tuple[str, list[str]]:
    """The commit that is meant, and the files of the repository there."""
    from huggingface_hub import HfApi

    info: Any = HfApi(endpoint=endpoint).model_info(
        repository, revision=revision or None, timeout=_TIMEOUT_SECONDS
    )
    return str(info.sha), [file.rfilename for file in info.siblings or ()]


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Whatever the hub's client raises becomes one sentence that names the model."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except DearError:
        raise
    except GatedRepoError:
        raise CheckpointError(
            f"{name!r} requires you to accept its terms on the Hugging Face hub first"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{name!r} is neither a folder here nor a model on the Hugging Face hub"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{name!r}: the model has no such branch, tag or commit") from None
    except Exception as error:  # the hub's HTTP client, and its exceptions, change between versions
        raise CheckpointError(
            f"{name} could not be downloaded from the Hugging Face hub ({reason_of(error)}); check the "
            "connection, or download the model elsewhere and pass its folder"
        ) from error


def _check(name: str, path: Path) -> None:
    """Refuse and remove a file whose content is not what the hub announced.

    The cache names the content by the hub's checksum; where links cannot be made it is forgotten.
    """
    if not path.is_file():
        raise CheckpointError(f"{name}: the repository lacks {path.name}, which its index names")
    checksum = Path(os.readlink(path)).name if path.is_symlink() else ""
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", checksum):
        return
    # git hashes a header before the content; large files are hashed alone
    size = path.stat().st_size
    digest = hashlib.sha256() if len(checksum) == 64 else hashlib.sha1(b"blob %d\0" % size)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != checksum:
        for stored in {path, path.resolve()}:
            with contextlib.suppress(OSError):
                stored.unlink()
        raise CheckpointError(
            f"{name}: {path.name} arrived damaged (its checksum differs from what the hub announces); it was "
            "not kept, try again"
        )
