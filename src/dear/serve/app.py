"""The routes of the service."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from torch import Tensor

from dear import __version__
from dear.errors import DearError
from dear.runs.folder import load_run
from dear.serve.archive import check_run_name, unpack_run
from dear.serve.decode import Upload
from dear.serve.errors import Refused
from dear.serve.galleries import search_by
from dear.serve.guard import Guard, body_of
from dear.serve.keys import EVERY, Keys
from dear.serve.requests import Asked, json_schema, read_request
from dear.serve.service import Service
from dear.serve.store import Adapter, Card

REJECT_SHARE = 0.05  #: of images of known classes that a request with `reject` may refuse


def make_app(service: Service, keys: Keys | None = None) -> FastAPI:
    """The application of a service; it closes the service when it stops."""
    keys = keys or Keys()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.get_running_loop().run_in_executor(None, service.close)

    app = FastAPI(title="dear", version=__version__, lifespan=life, openapi_tags=[])
    app.state.service = service
    app.add_middleware(Guard, limits=service.settings.limits, metrics=service.metrics)
    app.add_exception_handler(DearError, _told)
    app.add_exception_handler(HTTPException, _told_http)
    _add_health(app, service)
    _add_models(app, service, keys)
    _add_answers(app, service, keys)
    _add_embeddings(app, service, keys)
    _add_management(app, service, keys)
    return app


async def _told(request: Request, error: DearError) -> JSONResponse:
    """An error as a status and one sentence."""
    if not isinstance(error, Refused):
        error = Refused(400, str(error))
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(body_of(error), error.http_status, headers)


async def _told_http(request: Request, error: HTTPException) -> JSONResponse:
    """What the framework refuses, in the same form."""
    path = request.url.path
    sentences = {
        404: f"nothing is at {path}; /docs describes the addresses",
        405: f"{path} does not take {request.method}; /docs describes the addresses",
    }
    refused = Refused(error.status_code, sentences.get(error.status_code, str(error.detail)))
    return JSONResponse(body_of(refused), refused.http_status, error.headers)


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health/live", summary="The process answers.")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/health/ready", summary="Requests are answered.")
    async def ready() -> dict[str, Any]:
        if not service.ready:
            raise Refused(503, "the service is stopping")
        return {"status": "ready", "adapters": len(service.store.cards()), "backbone": service.clip.name}

    @app.get("/metrics", summary="Counters in Prometheus' format.")
    async def metrics() -> Response:
        service.update_gauges()
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


def _allow(keys: Keys, request: Request, name: str) -> None:
    """Refuse a request whose key does not open the adapter."""
    opened = keys.opened(request.headers.get("authorization"))
    if EVERY not in opened and name not in opened:
        raise Refused(403, f"this key does not open the adapter {name!r}")


def _add_models(app: FastAPI, service: Service, keys: Keys) -> None:
    @app.get("/v1/models", summary="The adapters this key opens.")
    async def models(request: Request) -> dict[str, Any]:
        opened = keys.opened(request.headers.get("authorization"))
        cards = [card for card in service.store.cards() if EVERY in opened or card.name in opened]
        return {"models": [_plain(card) for card in cards]}

    @app.get("/v1/models/{name}", summary="One adapter.")
    async def model(request: Request, name: str) -> dict[str, Any]:
        _allow(keys, request, name)
        return _plain(service.store.card(name))


def _add_answers(app: FastAPI, service: Service, keys: Keys) -> None:
    async def asked_of(request: Request, name: str) -> tuple[list[Upload], Asked, Adapter]:
        """Images, options and the adapter of a request that its key allows."""
        _allow(keys, request, name)
        service.store.card(name)  # before the body is read
        uploads, asked = await read_request(request, service.settings.limits)
        if not uploads:
            raise Refused(400, "the request holds no image; send at least one")
        return uploads, asked, await service.adapter(name)

    def reply(adapter: Adapter, uploads: list[Upload], answers: Iterable[dict[str, Any]]) -> dict[str, Any]:
        named = [{"image": upload.name, **one} for upload, one in zip(uploads, answers, strict=True)]
        return {"model": adapter.card.name, "version": adapter.card.version, "answers": named}

    @app.post(
        "/v1/models/{name}/classify",
        summary="Classes of images, likeliest first.",
        openapi_extra=json_schema("top", "classes", "reject"),
    )
    async def classify(request: Request, name: str) -> dict[str, Any]:
        uploads, asked, adapter = await asked_of(request, name)
        classes = None if asked.classes is None else tuple(asked.classes)
        share = REJECT_SHARE if asked.reject else None
        found, names, refused = await service.answers(uploads, adapter, classes, share)
        answers: list[dict[str, Any]] = [{"classes": _likeliest(row, names, asked.top)} for row in found]
        if asked.reject:  # none of these classes; the nearest ones stand beside it
            answers = [{**one, "rejected": none} for one, none in zip(answers, refused, strict=True)]
        return reply(adapter, uploads, answers)

    @app.post(
        "/v1/models/{name}/retrieve",
        summary="Images of a stored gallery that are most like an image, per attribute.",
        openapi_extra=json_schema("gallery", "by", "attribute", "top"),
    )
    async def retrieve(request: Request, name: str) -> dict[str, Any]:
        uploads, asked, adapter = await asked_of(request, name)
        gallery = service.galleries.named(asked.gallery)
        search = search_by(adapter, asked.by, service.clip)
        found = await service.matches(uploads, search, gallery, asked.attribute, asked.top)
        answers = (
            {"attributes": {a: [asdict(one) for one in own] for a, own in best.items()}} for best in found
        )
        return {"gallery": gallery, **reply(adapter, uploads, answers)}


def _likeliest(row: Tensor, names: tuple[str, ...], top: int) -> list[dict[str, Any]]:
    """The likeliest classes by probabilities [C]."""
    best = row.topk(min(top, len(names)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{"name": names[number], "probability": value} for number, value in pairs]


def _add_embeddings(app: FastAPI, service: Service, keys: Keys) -> None:
    @app.get("/v1/galleries", summary="The stored galleries.")
    async def galleries(request: Request) -> dict[str, Any]:
        keys.opened(request.headers.get("authorization"))
        return {"galleries": list(service.galleries.names)}

    @app.post(
        "/v1/embeddings",
        summary="Unit features of images and texts under the frozen backbone.",
        openapi_extra=json_schema("texts"),
    )
    async def embeddings(request: Request) -> dict[str, Any]:
        keys.opened(request.headers.get("authorization"))
        uploads, asked = await read_request(request, service.settings.limits)
        if not uploads and not asked.texts:
            raise Refused(400, "the request holds neither images nor texts")
        images = (await service.answers(uploads, None))[0] if uploads else []
        texts = (await service.text_features(asked.texts)).tolist() if asked.texts else []
        return {
            "backbone": service.clip.name,
            "images": [
                {"image": u.name, "embedding": row.tolist()} for u, row in zip(uploads, images, strict=True)
            ],
            "texts": [{"text": t, "embedding": row} for t, row in zip(asked.texts, texts, strict=True)],
        }


def _add_management(app: FastAPI, service: Service, keys: Keys) -> None:
    def allow(request: Request, name: str) -> None:
        keys.check_management(request.headers.get("authorization"))
        check_run_name(name)

    def install(content: bytes, name: str) -> Card:
        """Unpack, load for trial, and put in the place of the old run."""
        folder = service.store.folder
        fresh = unpack_run(content, folder, name, service.settings.limits.upload_bytes)
        old = folder / f".{fresh.name}.old"
        try:
            load_run(fresh, service.clip)  # a run that cannot be loaded never gets a name
            if (folder / name).exists():
                os.replace(folder / name, old)
            os.replace(fresh, folder / name)
        except DearError as error:
            raise Refused(400, f"the run cannot be served: {error}") from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
        return service.store.load(name).card

    @app.get("/v1/management/problems", summary="Runs that are not served, and why.")
    async def problems(request: Request) -> dict[str, Any]:
        keys.check_management(request.headers.get("authorization"))
        return {"problems": service.store.problems()}

    @app.post("/v1/models/{name}/load", summary="Serve a run of the folder, loaded at once.")
    async def load(request: Request, name: str) -> dict[str, Any]:
        allow(request, name)
        adapter = await asyncio.get_running_loop().run_in_executor(None, service.store.load, name)
        return _plain(adapter.card)

    @app.post("/v1/models/{name}/unload", summary="Stop serving a run; its folder stays.")
    async def unload(request: Request, name: str) -> dict[str, Any]:
        allow(request, name)
        service.store.unload(name)
        return {"unloaded": name}

    @app.put("/v1/models/{name}/upload", summary="Put a run into the folder: a zip archive as the body.")
    async def upload(request: Request, name: str) -> dict[str, Any]:
        allow(request, name)
        content = await request.body()
        return _plain(await asyncio.get_running_loop().run_in_executor(None, install, content, name))


def _plain(card: Card) -> dict[str, Any]:
    return {
        "name": card.name,
        "version": card.version,
        "method": card.method,
        "classes": list(card.classes),
        "trained": card.trained,
        "figures": dict(card.figures),
    }
