"""The routes of the service: each gets a request and reads it itself, as Starlette's do.

FastAPI describes them (`/openapi.json`). Its handling would take about a quarter of the event loop's time for
a request of one image.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
from fastapi import APIRouter, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, Response
from starlette.routing import Route
from torch import Tensor

from dear import __version__
from dear.runs.answer import Answer
from dear.serve.archive import check_run_name
from dear.serve.decoding import Upload
from dear.serve.errors import Refused
from dear.serve.galleries import search_by
from dear.serve.keys import MANAGEMENT, Caller
from dear.serve.requests import O, read_classes, receive_body
from dear.serve.schemas import (
    Classified,
    ClassifyOptions,
    Compared,
    CompareOptions,
    EmbeddingList,
    EmbeddingsOptions,
    GalleryList,
    ModelCard,
    ModelList,
    Problems,
    Refusal,
    Retrieved,
    RetrieveOptions,
    Status,
    Unloaded,
    request_body,
    request_schemas,
)
from dear.serve.service import Image, Service
from dear.serve.store import Adapter

REJECT_SHARE = 0.05  #: of images of known classes that a request with `reject` may refuse
MOST_MODELS = 16  #: adapters of one request
_PAGE_BYTES = 2**17  # of a page of adapters; a page has at least one
_DESCRIPTION: dict[str, Any] = {
    "responses": {"4XX": {"model": Refusal}, "5XX": {"model": Refusal}},
    "generate_unique_id_function": lambda route: route.name,
}
router = APIRouter(**_DESCRIPTION)
_NAME = {
    "name": "name",
    "in": "path",
    "description": "name of an adapter",
    "required": True,
    "schema": {"type": "string"},
}
_EXPLAIN = {
    "name": "explain",
    "in": "query",
    "description": "roles: the score of each answer as a sum over roles of heads",
    "schema": {"type": "string", "enum": ["roles"]},
}
_LIMIT = {
    "name": "limit",
    "in": "query",
    "description": "most adapters of a page",
    "schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
}
_AFTER = {
    "name": "after",
    "in": "query",
    "description": "name after which the page begins",
    "schema": {"type": "string"},
}


def service_of(request: Request) -> Service:
    """The service of an application."""
    return cast(Service, request.app.state.service)


def identify(request: Request) -> tuple[Service, Caller]:
    """The service, and who sends a request; refused if the key has no access to the adapter of the path."""
    service = service_of(request)
    caller = service.keys.caller(request.headers.get("authorization"), _client(request))
    state = request.scope["state"]
    state["caller"], state["key"] = caller.name, caller.name if service.keys.required else None
    service.traffic.count(caller)
    if "name" in request.path_params:
        _require_access(caller, request.path_params["name"])
    return service, caller


async def read_images(
    request: Request, service: Service, caller: Caller, options: type[O]
) -> tuple[list[Upload], O]:
    """Images and options of a request about an adapter that exists."""
    if "name" in request.path_params:
        service.store.card(request.path_params["name"])  # before the body is read
    uploads, values = await service.reader.read(request, options, caller.name)
    if not uploads:
        raise Refused(400, "the request has no image; send at least one")
    return uploads, values


def manage(request: Request) -> Service:
    """The service; refused without the management key."""
    service = service_of(request)
    service.keys.check_management(request.headers.get("authorization"))
    request.scope["state"].update(caller=MANAGEMENT, key=MANAGEMENT)
    if "name" in request.path_params:
        check_run_name(request.path_params["name"])
    return service


def _client(request: Request) -> str:
    return request.client.host if request.client else "unknown"


def _require_access(caller: Caller, model: str) -> None:
    if not caller.can_access(model):
        raise Refused(403, f"this key has no access to adapter {model[:100]!r}")


# -- answers ------------------------------------------------------------------------------------------


@router.post(
    "/v1/models/{name}/classify",
    response_model=Classified,
    openapi_extra=request_body(ClassifyOptions, _NAME, _EXPLAIN),
)
async def classify(request: Request) -> Response:
    """Classes of images, most probable first."""
    service, caller = identify(request)
    explain = request.query_params.get("explain")
    if explain not in (None, "roles"):
        raise Refused(400, f"explain must be 'roles', got {explain[:80]!r}")
    with service.traffic.request(caller):
        uploads, options = await read_images(request, service, caller, ClassifyOptions)
        async with asyncio.timeout(service.settings.limits.seconds):
            images = await service.decoder.decode(uploads, caller.name)
            name = request.path_params["name"]
            adapter, bodies = await _classify(service, caller, name, images, options, explain is not None)
    return _json(_reply(adapter, _per_image(uploads, bodies)))


@router.post("/v1/classify", response_model=Compared, openapi_extra=request_body(CompareOptions))
async def compare(request: Request) -> Response:
    """Classes of images by several adapters; every image is decoded once."""
    service, caller = identify(request)
    with service.traffic.request(caller):
        uploads, options = await read_images(request, service, caller, CompareOptions)
        if not 1 <= len(options.models) <= MOST_MODELS or len(set(options.models)) < len(options.models):
            raise Refused(
                400,
                f"models must be 1 to {MOST_MODELS} different names of adapters, got {len(options.models)}",
            )
        for name in options.models:
            _require_access(caller, name)
            service.store.card(name)
        async with asyncio.timeout(service.settings.limits.seconds):
            images = await service.decoder.decode(uploads, caller.name)
            results = [
                _reply(adapter, _per_image(uploads, bodies))
                for adapter, bodies in [
                    await _classify(service, caller, name, images, options) for name in options.models
                ]
            ]
    return _json({"results": results})


async def _classify(
    service: Service,
    caller: Caller,
    name: str,
    images: Sequence[Image],
    options: ClassifyOptions,
    explain: bool = False,
) -> tuple[Adapter, list[dict[str, Any] | Refused]]:
    """The adapter and its answers, one per image."""
    adapter = await service.adapter(name)
    classes = read_classes(options.classes, adapter.card.classes)
    answerer = await service.on_classes(adapter, classes, caller.name)
    share = REJECT_SHARE if options.reject else None
    answers = await service.answers(
        images, adapter, answerer, options.top, share, options.certain, caller.name
    )
    bars = await service.role_bars(images, answerer, caller.name) if explain else []
    best = [one.classes[0] for one in answers if not isinstance(one, Refused)]
    service.metrics.observe_answers(name, adapter.names, best)
    bodies = [one if isinstance(one, Refused) else _answer(one) for one in answers]
    for body, parts in zip(bodies, bars, strict=False):
        if isinstance(body, dict) and isinstance(parts, dict):
            body["explanation"] = parts
    return adapter, bodies


@router.post(
    "/v1/models/{name}/retrieve",
    response_model=Retrieved,
    openapi_extra=request_body(RetrieveOptions, _NAME),
)
async def retrieve(request: Request) -> Response:
    """Images of a stored gallery that are most like an image, per attribute."""
    service, caller = identify(request)
    with service.traffic.request(caller):
        uploads, options = await read_images(request, service, caller, RetrieveOptions)
        async with asyncio.timeout(service.settings.limits.seconds):
            adapter = await service.adapter(request.path_params["name"])
            gallery = service.galleries.resolve_name(options.gallery)
            search = search_by(adapter, options.by, service.clip)
            images = await service.decoder.decode(uploads, caller.name)
            where = (gallery, options.attribute, options.top)
            matches = await service.matches(images, search, *where, caller=caller.name)
    bodies = [one if isinstance(one, Refused) else {"attributes": one} for one in matches]
    return _json({"gallery": gallery, **_reply(adapter, _per_image(uploads, bodies))})


@router.post("/v1/embeddings", response_model=EmbeddingList, openapi_extra=request_body(EmbeddingsOptions))
async def embeddings(request: Request) -> Response:
    """Unit features of images and texts under the frozen backbone, in OpenAI's form."""
    service, caller = identify(request)
    with service.traffic.request(caller):
        uploads, options = await service.reader.read(request, EmbeddingsOptions, caller.name)
        is_image = [one.startswith("data:") for one in options.inputs]
        if not any(is_image):  # files of a form come first
            is_image = [True] * len(uploads) + is_image
        if not is_image:
            raise Refused(400, "input must be a text, a data: URL of an image, or a list of these, got none")
        service.check_embedding_model(options.model, options.dimensions)
        async with asyncio.timeout(service.settings.limits.seconds):
            images = await service.decoder.decode(uploads, caller.name)
            refused = [one for one in images if isinstance(one, Refused)]
            if refused:
                raise refused[0]
            image_rows = iter(await service.features(images, caller.name))
            features, tokens = await service.text_features(options.texts, caller.name)
    text_rows = iter(features)
    rows = [cast(Tensor, next(image_rows if image else text_rows)) for image in is_image]
    encode: Callable[[Tensor], Any] = _base64 if options.encoding_format == "base64" else Tensor.tolist
    data = [{"object": "embedding", "index": n, "embedding": encode(row)} for n, row in enumerate(rows)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return _json({"object": "list", "data": data, "model": service.backbone, "usage": usage})


def _per_image(uploads: Sequence[Upload], answers: Sequence[dict[str, Any] | Refused]) -> list[Any]:
    """The answer of each image; of one that cannot be read the reason, unless there is no other."""
    refused = [one for one in answers if isinstance(one, Refused)]
    if refused and len(refused) == len(answers):
        raise refused[0]
    return [
        {"image": upload.name, **({"error": str(one)} if isinstance(one, Refused) else one)}
        for upload, one in zip(uploads, answers, strict=True)
    ]


def _answer(answer: Answer) -> dict[str, Any]:
    body: dict[str, Any] = {"classes": [{"name": name, "probability": p} for name, p in answer.classes]}
    if answer.rejected is not None:
        body["rejected"] = answer.rejected
    if answer.labels is not None:
        body["labels"] = answer.labels
    if answer.node is not None:
        body["node"] = {"name": answer.node[0], "probability": answer.node[1]}
    return body


def _reply(adapter: Adapter, answers: list[Any]) -> dict[str, Any]:
    return {"model": adapter.card.name, "version": adapter.card.version, "answers": answers}


def _json(value: Any) -> Response:
    return _json_bytes(msgspec.json.encode(value))


def _json_bytes(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _base64(row: Tensor) -> str:
    return base64.b64encode(row.numpy().astype("<f4").tobytes()).decode()


# -- adapters -----------------------------------------------------------------------------------------


@router.get("/v1/models", response_model=ModelList, openapi_extra={"parameters": [_LIMIT, _AFTER]})
async def models(request: Request) -> Response:
    """Adapters that this key has access to, by name."""
    service, caller = identify(request)
    limit, after = request.query_params.get("limit", "100"), request.query_params.get("after", "")
    if not re.fullmatch("[1-9][0-9]{0,2}|1000", limit):
        raise Refused(400, f"limit must be from 1 to 1000, got {limit[:80]!r}")
    cards = [card for card in service.store.cards() if card.name > after and caller.can_access(card.name)]
    page: list[bytes] = []
    size = 0
    for card in cards[: int(limit)]:
        size += len(card.body)
        if page and size > _PAGE_BYTES:
            break
        page.append(card.body)
    more = b"true" if len(page) < len(cards) else b"false"
    return _json_bytes(b'{"object":"list","data":[' + b",".join(page) + b'],"has_more":' + more + b"}")


@router.get("/v1/models/{name}", response_model=ModelCard, openapi_extra={"parameters": [_NAME]})
async def model(request: Request) -> Response:
    """One adapter."""
    service, _ = identify(request)
    return _json_bytes(service.store.card(request.path_params["name"]).body)


@router.get("/v1/galleries", response_model=GalleryList)
async def galleries(request: Request) -> Response:
    """Names of the stored galleries."""
    service, _ = identify(request)
    return _json({"galleries": service.galleries.names})


@router.post("/v1/models/{name}/load", response_model=ModelCard, openapi_extra={"parameters": [_NAME]})
async def load(request: Request) -> Response:
    """Serve a run of the folder, loaded at once (management)."""
    service = manage(request)
    adapter = await service.manage(service.store.load, request.path_params["name"])
    return _json_bytes(adapter.card.body)


@router.post("/v1/models/{name}/unload", response_model=Unloaded, openapi_extra={"parameters": [_NAME]})
async def unload(request: Request) -> Response:
    """Stop serving a run; its folder stays (management)."""
    name = request.path_params["name"]
    manage(request).store.unload(name)
    return _json({"unloaded": name})


@router.put(
    "/v1/models/{name}/upload",
    response_model=ModelCard,
    openapi_extra={
        "parameters": [_NAME],
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        },
    },
)
async def upload(request: Request) -> Response:
    """Put a run into the folder: a zip archive of its files (management)."""
    service = manage(request)
    body = await receive_body(request, service.settings.limits)
    card = await service.manage(service.install, body, request.path_params["name"])
    return _json_bytes(card.body)


@router.get("/v1/management/problems", response_model=Problems)
async def problems(request: Request) -> Response:
    """Runs that are not served, and why (management)."""
    return _json({"problems": manage(request).store.problems()})


# -- operation ----------------------------------------------------------------------------------------


@router.get("/health/live", response_model=Status)
async def live(request: Request) -> Response:
    """The process answers."""
    return _json({"status": "live"})


@router.get("/health/ready", response_model=Status)
async def ready(request: Request) -> Response:
    """Requests are answered; a key also sees the number of adapters."""
    service = service_of(request)
    reason = service.unready_reason()
    if reason is not None:
        raise Refused(503, reason, retry_after=1)
    try:
        service.keys.any_caller(request.headers.get("authorization"), _client(request))
    except Refused:
        return _json({"status": "ready"})
    adapters = len(service.store.cards())
    return _json({"status": "ready", "adapters": adapters, "backbone": service.backbone})


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Counters in Prometheus' format; a key sees the adapters that it has access to."""
    service = service_of(request)
    can_access: Callable[[str], bool] | None = None
    if not service.settings.open_metrics:
        caller = service.keys.any_caller(request.headers.get("authorization"), _client(request))
        service.traffic.count(caller)
        can_access = caller.can_access
    return Response(service.metrics.text(can_access), media_type="text/plain; version=0.0.4")


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """The routes, for people."""
    policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return HTMLResponse(request.app.state.docs, headers=policy)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The routes, for programs."""
    return _json_bytes(request.app.state.openapi)


def openapi_schema() -> dict[str, Any]:
    """The OpenAPI description of all routes."""
    schema: dict[str, Any] = get_openapi(title="dear", version=__version__, routes=router.routes)
    bearer = {"type": "http", "scheme": "bearer", "description": "a key of the service"}
    schema["components"]["securitySchemes"] = {"key": bearer}
    schema["components"]["schemas"] |= request_schemas()
    for path, methods in schema["paths"].items():
        if not path.startswith("/health"):
            for method in methods.values():
                method["security"] = [{"key": []}]
    return schema


def serving_routes() -> list[Route]:
    """The routes that an application serves."""
    routes = [route for route in router.routes if isinstance(route, Route)]
    return [Route(one.path, one.endpoint, methods=one.methods) for one in routes]
