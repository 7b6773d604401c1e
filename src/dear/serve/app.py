"""The routes of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import anyio
import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from dear import __version__
from dear.serve.archive import check_run_name
from dear.serve.decode import Upload
from dear.serve.docs_page import docs_page
from dear.serve.errors import Refused
from dear.serve.galleries import search_by
from dear.serve.guard import Guard
from dear.serve.keys import MANAGEMENT, Caller
from dear.serve.requests import Options, json_schema, read_request, received, requested_classes
from dear.serve.service import Answer, Service
from dear.serve.store import Adapter, Card

REJECT_SHARE = 0.05  #: of images of known classes that a request with `reject` may refuse
_CLOSE_SECONDS = 2.0  # for what is left when the server has answered or given up all requests
T = TypeVar("T")


class PlainRoute(APIRoute):  # type: ignore[misc]
    """A route that FastAPI describes; its function is called with the request and the names in the path.

    FastAPI itself would look for parameters, dependencies and a response model at every request.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["method"] not in self.methods:
            raise HTTPException(405, headers={"Allow": ", ".join(self.methods)})
        found = await self.endpoint(Request(scope, receive), **scope["path_params"])
        response = found if isinstance(found, Response) else _json(found)
        await response(scope, receive, send)


def make_app(service: Service, start_decoders: bool = False) -> FastAPI:
    """The application of a service, which it closes when it stops.

    With `start_decoders` the processes that decode images start before the first request.
    """

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        if start_decoders:
            service.decoder.start()
        yield
        await anyio.to_thread.run_sync(service.close, _CLOSE_SECONDS)

    app = FastAPI(
        title="dear",
        version=__version__,
        lifespan=life,
        openapi_tags=[],
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # `dear.serve.tracing` has its own
    )
    app.router.route_class = PlainRoute
    # In the place of FastAPI's own layers, which are for other kinds of routes.
    app.middleware_stack = Guard(app.router, service.metrics, service.traffic)
    app.state.service = service
    _add_answers(app, service)  # first: the router tries one after the other
    _add_embeddings(app, service)
    _add_operation(app, service)
    _add_models(app, service)
    _add_management(app, service)
    return app


def _caller(service: Service, request: Request, model: str | None = None) -> Caller:
    """Whose request it is; refused where its key does not open the adapter."""
    client = request.client.host if request.client else "unknown"
    caller = service.keys.caller(request.headers.get("authorization"), client)
    request.scope["state"].update(caller=caller.name, key=caller.name if service.keys.required else None)
    if model is not None and not caller.opens(model):
        raise Refused(403, f"this key does not open the adapter {model!r}")
    return caller


def _add_operation(app: FastAPI, service: Service) -> None:
    @app.get("/health/live", summary="The process answers.")
    async def live(request: Request) -> dict[str, str]:
        return {"status": "live"}

    @app.get("/health/ready", summary="Requests are answered; with a key also how many adapters there are.")
    async def ready(request: Request) -> dict[str, Any]:
        reason = service.unready()
        if reason is not None:
            raise Refused(503, reason, retry_after=1)
        try:
            service.keys.check_any(request.headers.get("authorization"))
        except Refused:
            return {"status": "ready"}
        return {"status": "ready", "adapters": len(service.store.cards()), "backbone": service.clip.name}

    @app.get("/metrics", summary="Counters in Prometheus' format.")
    async def metrics(request: Request) -> Response:
        if not service.settings.open_metrics:
            service.keys.check_any(request.headers.get("authorization"))
        service.update_gauges()
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return HTMLResponse(docs_page(app.openapi()), headers=policy)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", summary="The adapters this key opens.")
    async def models(request: Request) -> dict[str, Any]:
        caller = _caller(service, request)
        with service.traffic.request(caller):
            return {"models": [_plain(card) for card in service.store.cards() if caller.opens(card.name)]}

    @app.get("/v1/models/{name}", summary="One adapter.")
    async def model(request: Request, name: str) -> dict[str, Any]:
        _caller(service, request, name)
        return _plain(service.store.card(name))


def _per_image(
    uploads: Sequence[Upload], found: Sequence[T | Refused], show: Callable[[T], Any]
) -> list[Any]:
    """What is said of each image; of one that cannot be read the reason, unless there is no other."""
    refused = [one for one in found if isinstance(one, Refused)]
    if refused and len(refused) == len(found):
        raise refused[0]
    return [
        {"image": upload.name, **({"error": str(one)} if isinstance(one, Refused) else show(one))}
        for upload, one in zip(uploads, found, strict=True)
    ]


def _asks_why(request: Request) -> bool:
    """Whether a request asks for the parts of its answers' scores."""
    explain = request.query_params.get("explain") if request.scope["query_string"] else None
    if explain not in (None, "roles"):
        raise Refused(400, f"explain={explain[:40]}: the service explains answers by roles (explain=roles)")
    return explain is not None


def _add_answers(app: FastAPI, service: Service) -> None:
    async def read(request: Request, name: str) -> tuple[list[Upload], Options]:
        """Images and options of a request for an adapter."""
        service.store.card(name)  # before the body is read
        uploads, options = await read_request(request, service.settings.limits)
        if not uploads:
            raise Refused(400, "the request holds no image; send at least one")
        return uploads, options

    def reply(adapter: Adapter, answers: list[Any]) -> dict[str, Any]:
        return {"model": adapter.card.name, "version": adapter.card.version, "answers": answers}

    @app.post(
        "/v1/models/{name}/classify",
        summary="Classes of images, likeliest first.",
        openapi_extra=json_schema("top", "classes", "reject"),
    )
    async def classify(request: Request, name: str) -> Response:
        caller = _caller(service, request, name)
        explain = _asks_why(request)
        with service.traffic.request(caller):
            uploads, options = await read(request, name)
            with service.in_time():
                adapter = await service.adapter(name)
                classes = requested_classes(options.classes, adapter.card.classes)
                answerer = await service.on_classes(adapter, classes, caller.name)
                images = await service.decoder.decode(uploads, caller.name)
                share = REJECT_SHARE if options.reject else None
                found = await service.answers(images, adapter, answerer, options.top, share, caller.name)
                why = await service.role_bars(images, answerer, caller.name) if explain else []
        answers = _per_image(uploads, found, _shown)
        for answer, bars in zip(answers, why, strict=False):
            if not isinstance(bars, Refused):
                answer["explanation"] = bars
        best = [one.classes[0] for one in found if not isinstance(one, Refused)]
        service.metrics.observe_answers(name, adapter.names, best)
        return _json(reply(adapter, answers))

    @app.post(
        "/v1/models/{name}/retrieve",
        summary="Images of a stored gallery that are most like an image, per attribute.",
        openapi_extra=json_schema("gallery", "by", "attribute", "top"),
    )
    async def retrieve(request: Request, name: str) -> Response:
        caller = _caller(service, request, name)
        with service.traffic.request(caller):
            uploads, options = await read(request, name)
            with service.in_time():
                adapter = await service.adapter(name)
                gallery = service.galleries.named(options.gallery)
                search = search_by(adapter, options.by, service.clip)
                images = await service.decoder.decode(uploads, caller.name)
                wanted = (gallery, options.attribute, options.top)
                found = await service.matches(images, search, *wanted, caller=caller.name)
        answers = _per_image(
            uploads,
            found,
            lambda best: {"attributes": {a: [asdict(one) for one in own] for a, own in best.items()}},
        )
        return _json({"gallery": gallery, **reply(adapter, answers)})


def _json(value: Any) -> Response:
    """A response that is encoded at once: the framework would look at every number first."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def _shown(answer: Answer) -> dict[str, Any]:
    """An answer as it is told."""
    classes = [{"name": name, "probability": value} for name, value in answer.classes]
    return (
        {"classes": classes} if answer.rejected is None else {"classes": classes, "rejected": answer.rejected}
    )


def _add_embeddings(app: FastAPI, service: Service) -> None:
    @app.get("/v1/galleries", summary="The stored galleries.")
    async def galleries(request: Request) -> dict[str, Any]:
        _caller(service, request)
        return {"galleries": list(service.galleries.names)}

    @app.post(
        "/v1/embeddings",
        summary="Unit features of images and texts under the frozen backbone.",
        openapi_extra=json_schema("texts"),
    )
    async def embeddings(request: Request) -> Response:
        caller = _caller(service, request)
        with service.traffic.request(caller):
            uploads, options = await read_request(request, service.settings.limits)
            if not uploads and not options.texts:
                raise Refused(400, "the request holds neither images nor texts")
            with service.in_time():
                found = await service.features(
                    await service.decoder.decode(uploads, caller.name), caller.name
                )
                images = _per_image(uploads, found, lambda row: {"embedding": row.tolist()})
                features = await service.text_features(options.texts, caller.name) if options.texts else ()
        rows = zip(options.texts, features, strict=True)
        found_texts = [{"text": text, "embedding": row.tolist()} for text, row in rows]
        return _json({"backbone": service.clip.name, "images": images, "texts": found_texts})


def _add_management(app: FastAPI, service: Service) -> None:
    def allow(request: Request, name: str | None = None) -> None:
        service.keys.check_management(request.headers.get("authorization"))
        request.scope["state"].update(caller=MANAGEMENT, key=MANAGEMENT)
        if name is not None:
            check_run_name(name)

    @app.get("/v1/management/problems", summary="Runs that are not served, and why.")
    async def problems(request: Request) -> dict[str, Any]:
        allow(request)
        return {"problems": service.store.problems()}

    @app.post("/v1/models/{name}/load", summary="Serve a run of the folder, loaded at once.")
    async def load(request: Request, name: str) -> dict[str, Any]:
        allow(request, name)
        return _plain((await service.manage(service.store.load, name)).card)

    @app.post("/v1/models/{name}/unload", summary="Stop serving a run; its folder stays.")
    async def unload(request: Request, name: str) -> dict[str, Any]:
        allow(request, name)
        service.store.unload(name)
        return {"unloaded": name}

    @app.put("/v1/models/{name}/upload", summary="Put a run into the folder: a zip archive as the body.")
    async def upload(request: Request, name: str) -> dict[str, Any]:
        allow(request, name)
        body = await received(request, service.settings.limits)
        return _plain(await service.manage(service.install, body, name))


def _plain(card: Card) -> dict[str, Any]:
    return {name: value for name, value in asdict(card).items() if name != "kind"}
