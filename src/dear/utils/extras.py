"""The exact command that installs a missing extra, for a clone and for an installed package alike."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import urlsplit
from urllib.request import url2pathname

from dear.errors import UsageError

PACKAGE = "dear-vlm"


def install_command(extra: str) -> str:
    """What to type to install an extra.

    >>> install_command("onnx").startswith("pip install ")
    True
    """
    try:
        origin = json.loads(distribution(PACKAGE).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url = urlsplit(str(origin.get("url", "")))
    editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
    target = url2pathname(url.path) if url.scheme == "file" and "dir_info" in origin else PACKAGE
    return f"pip install {editable}'{target}[{extra}]'"


def missing_extra(feature: str, extra: str) -> UsageError:
    """The error of a feature whose extra is not installed.

    >>> str(missing_extra("Parquet", "parquet")).startswith("Parquet needs the extra 'parquet': pip install ")
    True
    """
    return UsageError(f"{feature} needs the extra {extra!r}: {install_command(extra)}")
