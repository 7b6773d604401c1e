"""What requests say: images as multipart files or JSON, and the options beside them."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from dear._io.text import check_name, decode
from dear.errors import DearError
from dear.serve.decode import Upload, from_base64
from dear.serve.errors import Refused
from dear.serve.settings import Limits


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON request; multipart requests carry the same fields as form fields, images as `files`."""

    images: list[str] = []  #: base64, with or without `data:...;base64,`
    texts: list[str] = []
    top: int = 5
    classes: list[str] | None = None
    reject: bool = False
    attribute: str | None = None
    gallery: str | None = None
    by: str = "features"


def json_schema(*fields: str) -> dict[str, Any]:
    """The OpenAPI description of a request that takes some of the fields, in both ways."""
    kinds: dict[str, Any] = {
        "top": {"type": "integer", "default": 5, "minimum": 1},
        "classes": {"type": "array", "items": {"type": "string"}},
        "reject": {"type": "boolean", "default": False},
        "texts": {"type": "array", "items": {"type": "string"}},
        "attribute": {"type": "string"},
        "gallery": {"type": "string"},
        "by": {"type": "string", "enum": ["features", "heads"], "default": "features"},
    }
    shared = {name: kinds[name] for name in fields}
    images = {"type": "array", "items": {"type": "string", "format": "base64"}}
    files = {"type": "array", "items": {"type": "string", "format": "binary"}}
    content = {
        "multipart/form-data": {"schema": {"type": "object", "properties": {"files": files, **shared}}},
        "application/json": {"schema": {"type": "object", "properties": {"images": images, **shared}}},
    }
    return {"requestBody": {"required": True, "content": content}}


async def read_request(request: Request, limits: Limits) -> tuple[list[Upload], Asked]:
    """Images and options of a request.

    Raises:
        Refused: naming what is wrong.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().casefold()
    if kind == "multipart/form-data":
        uploads, asked = await _multipart(request, limits)
    elif kind == "application/json":
        try:
            asked = decode((await request.body()).decode("utf-8"), Asked, "the request", "JSON body")
        except (DearError, UnicodeDecodeError) as error:
            if isinstance(error, Refused):
                raise
            raise Refused(400, str(error)) from None
        uploads = from_base64(asked.images)
    else:
        raise Refused(415, "send images as multipart/form-data (field files) or as application/json")
    _check(uploads, asked, limits)
    return uploads, asked


async def _multipart(request: Request, limits: Limits) -> tuple[list[Upload], Asked]:
    try:
        form = await request.form(max_files=limits.images + 1, max_fields=limits.classes + 16)
    except HTTPException as error:
        raise Refused(400, f"the multipart body cannot be read: {error.detail}") from None
    uploads: list[Upload] = []
    fields: dict[str, list[str]] = {}
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name != "files":
                    raise Refused(400, f"the field {name!r} is not known; send images in the field files")
                uploads.append(Upload(value.filename or f"file {len(uploads) + 1}", await value.read()))
            else:
                fields.setdefault(name, []).append(value)
    finally:
        await form.close()
    return uploads, _from_fields(fields)


def _from_fields(fields: dict[str, list[str]]) -> Asked:
    """Options from form fields; lists as repeated fields or separated by commas."""
    known: dict[str, Any] = {}
    for name, values in fields.items():
        if name in ("classes", "texts"):
            split = values[0].split(",") if name == "classes" and len(values) == 1 else values
            known[name] = [value.strip() for value in split]
        elif len(values) != 1:
            raise Refused(400, f"the field {name!r} is given {len(values)} times; give it once")
        elif name == "top":
            known[name] = int(values[0]) if values[0].strip().isdigit() else -1
        elif name == "reject":
            known[name] = values[0].strip().casefold() in ("1", "true", "yes", "on")
        elif name in ("attribute", "gallery", "by"):
            known[name] = values[0]
        else:
            raise Refused(400, f"the field {name!r} is not known")
    return Asked(**known)


def _check(uploads: list[Upload], asked: Asked, limits: Limits) -> None:
    if len(uploads) > limits.images:
        raise Refused(413, f"{len(uploads)} images are more than {limits.images} per request")
    if asked.top < 1:
        raise Refused(400, "top must be a whole number of at least 1")
    if len(asked.texts) > limits.texts:
        raise Refused(413, f"{len(asked.texts)} texts are more than {limits.texts} per request")
    if asked.classes is not None:
        if not 1 <= len(asked.classes) <= limits.classes:
            raise Refused(400, f"classes must be 1 to {limits.classes} names; got {len(asked.classes)}")
        try:
            names = [check_name(name) for name in asked.classes]
        except DearError as error:
            raise Refused(400, str(error)) from None
        if len(set(names)) != len(names):
            raise Refused(400, "a class is named twice")
