"""The application of a service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import escape
from typing import Any

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from dear.errors import DearError
from dear.serve.errors import Refused
from dear.serve.middleware import LOG, RequestMiddleware, error_response
from dear.serve.routes import openapi_schema, serving_routes
from dear.serve.service import Service

_CLOSE_SECONDS = 2.0  # for what remains when the server has answered or given up all requests
_DOCS_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>dear serve</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code { background: #8882; padding: .1em .3em } td { padding: .2rem 1rem .2rem 0; vertical-align: top }
</style><h1>dear serve</h1>
<p>The same description for programs: <a href="openapi.json">openapi.json</a>.
Images come as multipart field <code>files</code> or as JSON, <code>{"images": ["base64"]}</code>;
a refusal is a status and <code>{"error": {"message": "one sentence"}}</code>.</p>
<p><code>curl -F files=@photo.jpg -F top=3 http://HOST/v1/models/NAME/classify</code></p>
<table>"""


def make_app(service: Service, start_decoders: bool = False) -> Starlette:
    """The application of a service, which it closes when it stops.

    With `start_decoders` the processes that decode images start before the first request.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if start_decoders:
            service.decoder.start()
        yield
        await anyio.to_thread.run_sync(service.close, _CLOSE_SECONDS)

    handlers: dict[Any, Any] = {
        Refused: _handle_refusal,
        DearError: _handle_library_error,
        HTTPException: _handle_http_exception,
        TimeoutError: _handle_timeout,
    }
    app = Starlette(routes=serving_routes(), lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    schema = openapi_schema()
    app.state.service = service
    app.state.openapi, app.state.docs = msgspec.json.encode(schema), docs_page(schema).encode()
    paths = {route.endpoint: route.path for route in app.routes if isinstance(route, Route)}
    app.add_middleware(RequestMiddleware, metrics=service.metrics, traffic=service.traffic, paths=paths)
    return app


async def _handle_refusal(request: Request, error: Refused) -> JSONResponse:
    return error_response(error)


async def _handle_timeout(request: Request, error: TimeoutError) -> JSONResponse:
    seconds = request.app.state.service.settings.limits.seconds
    return error_response(Refused(503, f"no answer within {seconds:g} seconds; try again", retry_after=1))


async def _handle_library_error(request: Request, error: DearError) -> JSONResponse:
    """An error of the library that no route expects: its sentence may name files of the server."""
    number = request.state.request_id
    LOG.error(json.dumps({"request": number, "failed": True, "reason": str(error)}), exc_info=error)
    return error_response(Refused(500, f"the service failed; its log names request {number}"))


async def _handle_http_exception(request: Request, error: HTTPException) -> JSONResponse:
    """A refusal by the framework, in the service's form."""
    path, status = request.url.path[:100], error.status_code
    sentences = {
        404: f"no route {path!r}; see /docs",
        405: f"{path!r} does not accept {request.method}; see /docs",
    }
    return error_response(Refused(status, sentences.get(status, str(error.detail))), **(error.headers or {}))


def docs_page(openapi: dict[str, Any]) -> str:
    """The page at /docs: HTML of an OpenAPI description, without a script or anything from elsewhere."""
    rows, schemas = [], openapi["components"]["schemas"]
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            form = content.get("multipart/form-data", {}).get("schema", {}).get("$ref", "")
            form = schemas.get(form.rpartition("/")[2], {}).get("properties", {})
            fields = ", ".join(f"<code>{escape(name)}</code>" for name in form)
            address = f"<code>{escape(method.upper())} {escape(path)}</code>"
            rows.append(f"<tr><td>{address}<td>{escape(operation.get('description', ''))}<br>{fields}")
    return _DOCS_HEAD + "\n".join(rows) + "</table></html>"
