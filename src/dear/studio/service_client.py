"""The answers of a running service for the Classify tab."""

from __future__ import annotations

import base64
import io
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

from dear.errors import InputError, UsageError

_SECONDS = 30.0
Ranked = tuple[tuple[str, float], ...]  #: class names with probabilities, likeliest first


def check_service(address: str) -> str:
    """The address of an adapter of a service, as `http://127.0.0.1:8000/v1/models/pets`."""
    parts = urlsplit(address)
    path = parts.path.rstrip("/")
    if parts.scheme not in ("http", "https") or not parts.netloc or "/v1/models/" not in path:
        raise UsageError(
            f"service = {address!r}: give the address of an adapter, such as "
            "http://127.0.0.1:8000/v1/models/pets"
        )
    return f"{parts.scheme}://{parts.netloc}{path}"


def ask_service(
    address: str, images: Sequence[Image.Image], classes: Sequence[str], top: int
) -> list[Ranked]:
    """The service's answers for images among some classes. Its key is read from the environment: DEAR_KEY."""
    body = {"images": [_png(image) for image in images], "classes": list(classes), "top": top}
    headers = {"Content-Type": "application/json"}
    if os.environ.get("DEAR_KEY"):
        headers["Authorization"] = f"Bearer {os.environ['DEAR_KEY']}"
    request = urllib.request.Request(f"{address}/classify", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
            answers: Any = json.load(reply)["answers"]
        return [tuple((one["name"], float(one["probability"])) for one in a["classes"]) for a in answers]
    except urllib.error.HTTPError as error:
        raise InputError(f"the service at {address} refuses: {_sentence(error)}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"the service at {address} does not answer ({error})") from None


def _sentence(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"status {error.code}"


def _png(image: Image.Image) -> str:
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()
