"""Downloads a backbone from the Hugging Face hub: complete, verified, resumable, and usable offline."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dear.clip.checkpoint import HF_CONFIG, HF_IMAGES, HF_WEIGHTS, OPENCLIP_CONFIG, OPENCLIP_WEIGHTS, shards
from dear.clip.config_huggingface import MODEL_TYPES
from dear.clip.tokenizer_file import FILES as TOKENIZER_FILES
from dear.errors import CheckpointError, DearError, reason_of
from dear.utils import digest
from dear.utils.files import read_json

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)
_TIMEOUT_SECONDS = 20.0
_CONFIG_FILES = (HF_CONFIG, OPENCLIP_CONFIG, *(name for name in HF_WEIGHTS if name.endswith(".index.json")))


def is_hub_name(text: str) -> bool:
    """Whether `text` has the form `owner/name` or `owner/name@revision`.

    Example:
        >>> [is_hub_name(text) for text in ("openai/clip-vit-base-patch16", "a/b@v1.0", "../photos")]
        [True, True, False]
    """
    return _NAME.fullmatch(text) is not None


def fetch(name: str, cache_dir: str | Path | None = None, endpoint: str | None = None) -> Path:
    """The local folder of a hub backbone, downloaded if necessary.

    `name` is `owner/name`, or `owner/name@revision` with a branch, tag or commit. The cache is
    huggingface-hub's (`HF_HOME`, `HF_HUB_CACHE`) unless `cache_dir` is set; cached files are not downloaded
    again.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    repository, _, revision = name.partition("@")
    download = partial(
        snapshot_download, repository, revision=revision or None, cache_dir=cache_dir, endpoint=endpoint
    )
    folder = _find_cached(repository, revision, cache_dir)
    if folder is not None:
        with contextlib.suppress(DearError):  # an incomplete folder is downloaded again
            present = {path.name for path in folder.iterdir() if path.exists()}
            if set(_model_files(name, present, folder)) <= present:
                return folder
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"} or HF_HUB_OFFLINE:
        raise CheckpointError(
            f"{name} is not in the cache and HF_HUB_OFFLINE is set; unset it once to download, or download "
            "the model elsewhere and pass its folder"
        )
    with _translate_errors(name):
        commit, files = _list_files(repository, revision, endpoint)
        folder = Path(download(allow_patterns=list(_CONFIG_FILES)))
        for file in {*_CONFIG_FILES} & {*files}:
            _check_file(name, folder / file)
        needed = list(_model_files(name, files, folder))
        folder = Path(download(allow_patterns=needed))
    if folder.name != commit:
        raise CheckpointError(f"{name}: the repository changed during the download; try again")
    for file in needed:
        _check_file(name, folder / file)
    return folder


def _find_cached(repository: str, revision: str, cache_dir: str | Path | None) -> Path | None:
    """The folder of a revision in the cache, complete or not."""
    from huggingface_hub import try_to_load_from_cache

    for file in _CONFIG_FILES:
        path = try_to_load_from_cache(repository, file, cache_dir=cache_dir, revision=revision or None)
        if isinstance(path, str):
            return Path(path).parent
    return None


def _model_files(name: str, available: Iterable[str], folder: Path) -> Iterator[str]:
    """The files of the model among those available, preferably in Hugging Face's layout.

    `folder` contains the available ones of `_CONFIG_FILES`.
    """
    names = set(available)
    weights = next((file for file in HF_WEIGHTS if file in names), None)
    kind = None
    if HF_CONFIG in names and weights is not None:
        raw = read_json(folder / HF_CONFIG, what="model configuration")
        kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind in MODEL_TYPES and weights is not None:
        yield HF_CONFIG
        yield from {HF_IMAGES} & names
        if kind != "clip":
            yield from _tokenizer_files(names)
        if weights.endswith(".index.json"):
            yield from shards(folder / weights)
        yield weights
        return
    weights = next((file for file in OPENCLIP_WEIGHTS if file in names), None)
    if OPENCLIP_CONFIG not in names or weights is None:
        raise CheckpointError(f"{name}: this repository contains no CLIP in a supported layout")
    yield OPENCLIP_CONFIG
    raw = read_json(folder / OPENCLIP_CONFIG, what="model configuration")
    if "hf_tokenizer_name" in str(raw):
        yield from _tokenizer_files(names)
    yield weights


def _tokenizer_files(names: set[str]) -> Iterator[str]:
    """The tokenizer's configuration, and tokenizer.json or else the sentencepiece model."""
    complete, config, *pieces = TOKENIZER_FILES
    yield from {config} & names
    yield from ({complete} & names) or sorted(set(pieces) & names)


def _list_files(repository: str, revision: str, endpoint: str | None) -> tuple[str, list[str]]:
    """The commit of a revision, and the files of the repository at that commit."""
    from huggingface_hub import HfApi

    info: Any = HfApi(endpoint=endpoint).model_info(
        repository, revision=revision or None, timeout=_TIMEOUT_SECONDS
    )
    return str(info.sha), [file.rfilename for file in info.siblings or ()]


@contextlib.contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    """Convert errors of the hub's client to one sentence that names the model."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except DearError:
        raise
    except GatedRepoError:
        raise CheckpointError(
            f"{name!r} is gated; accept its terms on the Hugging Face hub and log in"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{name!r} is neither a local folder nor a model on the Hugging Face hub"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{name!r}: the model has no such branch, tag or commit") from None
    except Exception as error:  # the hub's HTTP client, and its exceptions, change between versions
        raise CheckpointError(
            f"{name} could not be downloaded from the Hugging Face hub ({reason_of(error)}); check the "
            "connection, or download the model elsewhere and pass its folder"
        ) from error


def _check_file(name: str, path: Path) -> None:
    """Refuse and delete a file whose content does not match the hub's checksum.

    The cache names files by their checksum; on systems without symbolic links it is not stored.
    """
    if not path.is_file():
        raise CheckpointError(f"{name}: the repository lacks {path.name}, which its index names")
    checksum = Path(os.readlink(path)).name if path.is_symlink() else ""
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", checksum):
        return
    hash_file = digest.of_file if len(checksum) == 64 else digest.of_git_blob
    if hash_file(path).hex() != checksum:
        for stored in {path, path.resolve()}:
            with contextlib.suppress(OSError):
                stored.unlink()
        raise CheckpointError(
            f"{name}: {path.name} is damaged (its checksum differs from the hub's) and was deleted; try again"
        )
