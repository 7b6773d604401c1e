"""Bodies of requests: images as multipart files or JSON, and the options next to them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import Request

from dear.errors import DearError, UsageError
from dear.runs.class_lists import resolve_classes, split_class_list
from dear.serve.decoding import Decoding, Upload
from dear.serve.errors import Refused
from dear.serve.forms import parse_form
from dear.serve.schemas import MOST_LISTED, EmbeddingsOptions, Options
from dear.serve.settings import Limits

O = TypeVar("O", bound=Options)  # noqa: E741
# Bytes of a body that is read on the event loop, in less than a millisecond; a thread would cost more.
_SHORT = 64 * 2**10
_THREADS = 4  # that read long bodies; one caller has at most half of them
_MOST_NAME = 255  # characters of a file's name that are repeated in the answer
_BOOLEANS = {"on": True, "yes": True, "off": False, "no": False}  # in addition to msgspec's
_DATA_URL = re.compile(r"data:image/[A-Za-z0-9.+-]{1,40};base64,")
_OTHER_URL = re.compile(r"(data:|[A-Za-z][A-Za-z0-9+.-]{1,20}://)", re.ASCII)


class RequestReader:
    """Reads bodies; long ones in threads, of which a caller has at most half, not on the event loop."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding, self._limits = decoding, decoding.limits
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="dear-serve-read")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, request: Request, options: type[O], caller: str) -> tuple[list[Upload], O]:
        """Images and options of a request."""
        header = request.headers.get("content-type", "")
        kind = header.partition(";")[0].strip().casefold()
        if kind not in ("application/json", "multipart/form-data"):
            raise Refused(415, "send images as multipart/form-data (field files) or as application/json")
        body = await receive_body(request, self._limits)
        read = self._read_json if kind == "application/json" else self._read_form
        if len(body) <= _SHORT:
            return read(body, header, options)
        turn = self._turns.setdefault(caller, asyncio.Semaphore(_THREADS // 2))
        async with turn:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, read, body, header, options)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read_json(self, body: bytes, content_type: str, kind: type[O]) -> tuple[list[Upload], O]:
        try:
            options = msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            status = 413 if "of length <=" in str(error) else 400
            raise Refused(status, f"the body is not valid: {_reason(error)}; see /docs") from None
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body must be valid JSON ({error})") from None
        check_options(len(options.images), options, self._limits)
        images = enumerate(options.images, 1)
        return self._uploads([(f"image {n}", _from_base64(n, text)) for n, text in images]), options

    def _read_form(self, body: bytes, content_type: str, kind: type[O]) -> tuple[list[Upload], O]:
        limits = self._limits
        fields: dict[str, list[str]] = {}
        files: list[tuple[str, bytes]] = []
        for name, filename, value in parse_form(body, content_type, limits.images, limits.classes + 16):
            if isinstance(value, str):
                fields.setdefault(name, []).append(value)
            elif name != "files":
                raise Refused(400, f"unknown field {name[:80]!r}; send images in the field files")
            else:
                files.append(((filename or "")[:_MOST_NAME] or f"file {len(files) + 1}", value))
        options = options_of_fields(fields, kind)
        if isinstance(options, EmbeddingsOptions) and options.images:
            raise Refused(400, "send images of a form as files, not as data: URLs")
        check_options(len(files), options, limits)
        return self._uploads(files), options

    def _uploads(self, files: Sequence[tuple[str, bytes]]) -> list[Upload]:
        return [Upload(name, content, self._decoding.cost(content)) for name, content in files]


async def receive_body(request: Request, limits: Limits) -> bytes:
    """The body of a request, which must arrive in time."""
    try:
        async with asyncio.timeout(limits.body_seconds):
            return b"".join([part async for part in request.stream()])
    except TimeoutError:
        raise Refused(408, f"the body must arrive within {limits.body_seconds:g} seconds") from None


def _from_base64(number: int, text: str) -> bytes:
    prefix = _DATA_URL.match(text)
    if prefix is None and _OTHER_URL.match(text):
        raise Refused(400, f"image {number}: URLs are not fetched; send data:image/...;base64 or base64")
    try:
        return base64.b64decode(text[prefix.end() :] if prefix else text, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(400, f"image {number} is not valid base64") from None


def options_of_fields(fields: dict[str, list[str]], kind: type[O]) -> O:
    """Options from form fields; lists as repeated fields, class lists also separated by commas."""
    known = [name for name in kind.__struct_fields__ if name != "images"]
    values: dict[str, Any] = {}
    for name, texts in fields.items():
        if name not in known:
            raise Refused(400, f"unknown field {name[:80]!r}; the fields are {', '.join(known)}")
        if name in ("classes", "models"):
            values[name] = _split_names(name, texts)
        elif name == "input":
            values[name] = texts
        elif len(texts) != 1:
            raise Refused(400, f"the field {name!r} must be sent once, got {len(texts)}")
        else:
            values[name] = _BOOLEANS.get(texts[0].casefold(), texts[0]) if name == "reject" else texts[0]
    try:
        return msgspec.convert(values, kind, strict=False)  # numbers are texts in a form
    except msgspec.ValidationError as error:
        raise Refused(400, f"the form is not valid: {_reason(error)}; see /docs") from None


def _reason(error: msgspec.ValidationError) -> str:
    """A sentence of msgspec's, with the name of the field in front: top: Expected `int`, got `str`."""
    return re.sub(r"^(.*) - at `\$\.(.*)`$", r"\2: \1", str(error))


def _split_names(name: str, texts: list[str]) -> list[str]:
    """Names of one field with commas between, or of a field that is repeated for each name."""
    if len(texts) > 1:
        return [text.strip() for text in texts]
    try:
        return split_class_list(texts[0])
    except UsageError as error:
        raise Refused(400, f"{name}: {error}") from None


def check_options(images: int, options: Options, limits: Limits) -> None:
    """Refuse options that no request may have."""
    if images > limits.images:
        raise Refused(413, f"a request may have at most {limits.images} images, got {images}")
    classes = getattr(options, "classes", None)
    if classes is not None and not 1 <= len(classes) <= limits.classes:
        raise Refused(400, f"classes must have 1 to {limits.classes} names, got {len(classes)}")
    if isinstance(options, EmbeddingsOptions):
        _check_texts(options.texts, limits)


def _check_texts(texts: Sequence[str], limits: Limits) -> None:
    if len(texts) > limits.texts:
        raise Refused(413, f"a request may have at most {limits.texts} texts, got {len(texts)}")
    for text in texts:
        if len(text) > MOST_LISTED:
            raise Refused(413, f"a text may have at most {MOST_LISTED:,} characters, got {len(text):,}")
        if _OTHER_URL.match(text) and not re.search(r"\s", text):
            raise Refused(400, f"URLs are not fetched; send data:image/...;base64, got {text[:80]!r}")


def read_classes(names: Sequence[str] | None, trained: Sequence[str]) -> tuple[str, ...] | None:
    """The classes that a request names, as `dear predict` reads them; None: those of the adapter.

    >>> read_classes(["soup", "+cake"], ["pizza"]), read_classes(["soup", "cake"], ["pizza"])
    (('pizza', 'soup', 'cake'), ('soup', 'cake'))
    """
    if names is None:
        return None
    try:
        return resolve_classes(names, trained)
    except DearError as error:
        raise Refused(400, str(error)) from None
