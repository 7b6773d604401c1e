"""What requests say: images as multipart files or JSON, and the options beside them."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
from fastapi import Request
from msgspec import Meta
from starlette.requests import ClientDisconnect

from dear.errors import DearError, UsageError
from dear.runs.class_lists import resolve_classes, split_class_list
from dear.serve.decode import Upload
from dear.serve.errors import Refused
from dear.serve.multipart import read_parts
from dear.serve.settings import Limits
from dear.serve.time_limit import time_limit
from dear.serve.tracing import stage

_MOST_LISTED = 10_000  # entries of any list; what a request may really have is in its `Limits`
_Texts = Annotated[list[str], Meta(max_length=_MOST_LISTED)]
# Bytes of a body that are read on the event loop; longer ones are read by a thread. Decoding JSON and base64
# takes some ten times as long as finding the files of a form.
_SHORT = {"application/json": 128 * 2**10, "multipart/form-data": 2 * 2**20}
_MOST_NAME = 255  # characters of a file's name that are repeated in the answer
_BOOLEANS = dict.fromkeys(("true", "1", "yes", "on"), True)
_BOOLEANS |= dict.fromkeys(("false", "0", "no", "off"), False)
_readers = ThreadPoolExecutor(2, thread_name_prefix="dear-serve-read")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON request; multipart requests carry the same fields as form fields, images as `files`."""

    images: Annotated[_Texts, Meta(description="base64, with data:...;base64, before it or without")] = []
    texts: _Texts = []
    top: Annotated[int, Meta(description="how many to list, at least 1")] = 5
    classes: (
        Annotated[_Texts, Meta(description="others; + before any name adds all to the trained ones")] | None
    ) = None
    reject: bool = False
    attribute: str | None = None
    gallery: str | None = None
    by: Annotated[str, Meta(description="features or heads")] = "features"


def json_schema(*fields: str) -> dict[str, Any]:
    """The OpenAPI description of a request that takes some of the fields, in both ways."""
    _, found = msgspec.json.schema_components([Options])
    known = found["Options"]["properties"]
    shared = {name: known[name] for name in fields}
    ways = {
        "multipart/form-data": {"files": {"type": "array", "items": {"type": "string", "format": "binary"}}},
        "application/json": {"images": known["images"]},
    }
    content = {way: {"schema": {"type": "object", "properties": own | shared}} for way, own in ways.items()}
    return {"requestBody": {"required": True, "content": content}}


async def received(request: Request, limits: Limits) -> bytes:
    """The body of a request, which has some time to arrive."""
    seconds = limits.body_seconds
    late = Refused(408, f"the request did not arrive within {seconds:g} seconds")
    parts: list[bytes] = []
    more = True
    with stage("receive"), time_limit(seconds, late):
        while more:
            message = await request.receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def read_request(request: Request, limits: Limits) -> tuple[list[Upload], Options]:
    """Images and options of a request; a long body is not read on the event loop."""
    header = request.headers.get("content-type", "")
    kind = header.partition(";")[0].strip().casefold()
    if kind not in _SHORT:
        raise Refused(415, "send images as multipart/form-data (field files) or as application/json")
    body = await received(request, limits)
    read = _read_json if kind == "application/json" else _read_multipart
    if len(body) <= _SHORT[kind]:
        return read(body, header, limits)
    with stage("read"):
        return await asyncio.get_running_loop().run_in_executor(_readers, read, body, header, limits)


def _read_json(body: bytes, content_type: str, limits: Limits) -> tuple[list[Upload], Options]:
    try:
        options = msgspec.json.decode(body, type=Options)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        too_long = "of length <=" in str(error)
        raise Refused(413 if too_long else 400, f"the request is not a valid JSON body ({error})") from None
    check_options(len(options.images), options, limits)
    return _from_base64(options.images), options


def _from_base64(texts: Sequence[str]) -> list[Upload]:
    found = []
    for number, text in enumerate(texts, 1):
        try:
            content = base64.b64decode(
                text.partition(",")[2] if text.startswith("data:") else text, validate=True
            )
        except (binascii.Error, ValueError):
            raise Refused(400, f"image {number} is not valid base64") from None
        found.append(Upload(f"image {number}", content))
    return found


def _read_multipart(body: bytes, content_type: str, limits: Limits) -> tuple[list[Upload], Options]:
    uploads: list[Upload] = []
    fields: dict[str, list[str]] = {}
    for part in read_parts(body, content_type, limits.images + limits.classes + 16):
        if part.filename is None:
            fields.setdefault(part.name, []).append(_text(part.name, part.content))
        elif part.name != "files":
            raise Refused(400, f"the field {part.name[:80]!r} is not known; send images in the field files")
        else:
            name = part.filename[:_MOST_NAME] or f"file {len(uploads) + 1}"
            uploads.append(Upload(name, part.content))
    options = _from_fields(fields)
    check_options(len(uploads), options, limits)
    return uploads, options


def _text(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(400, f"the field {name[:80]!r} is not UTF-8 text") from None


def _from_fields(fields: dict[str, list[str]]) -> Options:
    """Options from form fields; lists as repeated fields or separated by commas."""
    known: dict[str, Any] = {}
    for name, values in fields.items():
        if name == "classes":
            known[name] = _split_classes(values)
        elif name == "texts":
            known[name] = [value.strip() for value in values]
        elif len(values) != 1:
            raise Refused(400, f"the field {name[:80]!r} is given {len(values)} times; give it once")
        elif name == "top":
            known[name] = _integer(values[0].strip())
        elif name == "reject":
            known[name] = _boolean(name, values[0])
        elif name in ("attribute", "gallery", "by"):
            known[name] = values[0]
        else:
            raise Refused(400, f"the field {name[:80]!r} is not known")
    return Options(**known)


def _split_classes(values: list[str]) -> list[str]:
    """Names of one field with commas between, or of a field that is repeated for each name."""
    if len(values) > 1:
        return [value.strip() for value in values]
    try:
        return split_class_list(values[0])
    except UsageError as error:
        raise Refused(400, f"classes: {error}") from None


def _boolean(name: str, text: str) -> bool:
    value = _BOOLEANS.get(text.strip().casefold())
    if value is None:
        raise Refused(400, f"{name} must be true or false, got {text[:80]!r}")
    return value


def _integer(text: str) -> int:
    """A number in at most nine plain digits; else -1, which no option takes."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


def check_options(images: int, options: Options, limits: Limits) -> None:
    """Refuse options that no request may have."""
    if images > limits.images:
        raise Refused(413, f"{images} images are more than {limits.images} per request")
    if options.top < 1:
        raise Refused(400, "top must be an integer of at least 1")
    if len(options.texts) > limits.texts:
        raise Refused(413, f"{len(options.texts)} texts are more than {limits.texts} per request")
    if any(len(text) > _MOST_LISTED for text in options.texts):
        raise Refused(413, f"a text has more than {_MOST_LISTED:,} characters")
    if options.classes is not None and not 1 <= len(options.classes) <= limits.classes:
        raise Refused(400, f"classes must be 1 to {limits.classes} names; got {len(options.classes)}")


def requested_classes(names: Sequence[str] | None, trained: Sequence[str]) -> tuple[str, ...] | None:
    """The classes that a request names, as `dear predict` reads them; None: those of the adapter.

    >>> requested_classes(["soup", "+cake"], ["pizza"]), requested_classes(["soup", "cake"], ["pizza"])
    (('pizza', 'soup', 'cake'), ('soup', 'cake'))
    """
    if names is None:
        return None
    try:
        return resolve_classes(names, trained)
    except DearError as error:
        raise Refused(400, str(error)) from None
