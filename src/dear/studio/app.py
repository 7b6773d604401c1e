"""The studio's page and its server, for this computer only unless another host is named."""

from __future__ import annotations

import ipaddress
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio reads it when it is imported

import gradio as gr

from dear.clip.factory import pick_device
from dear.errors import UsageError
from dear.report.page import asset, render
from dear.studio.parts import Context, Samples, TabUpdate
from dear.studio.retrieve import attributes
from dear.studio.state import StudioState, open_state
from dear.studio.tabs.audit import audit_tab
from dear.studio.tabs.classify import classify_tab
from dear.studio.tabs.compare import compare_tab
from dear.studio.tabs.heads import heads_tab
from dear.studio.tabs.label import label_tab
from dear.studio.tabs.retrieve import retrieve_tab
from dear.studio.tabs.train import train_tab
from dear.studio.training import Trainer
from dear.utils.memory import trim_memory

#: title, function that builds the tab, and whether it applies to the model of the studio
TABS: tuple[tuple[str, Callable[[Context, Any], TabUpdate], Callable[[StudioState], bool]], ...] = (
    ("Classify", classify_tab, lambda state: True),
    ("Label", label_tab, lambda state: state.local),
    ("Train", train_tab, lambda state: True),
    ("Audit", audit_tab, lambda state: True),
    ("Heads", heads_tab, lambda state: True),
    ("Retrieve", retrieve_tab, lambda state: bool(attributes(state))),
    ("Compare", compare_tab, lambda state: bool(state.models)),
)
# A link with `data-tab` opens a tab; on narrow screens its button may be in a menu.
_LINKS = """<script>document.addEventListener('click', (event) => {
  const link = event.target.closest('a[data-tab]');
  if (!link) return;
  event.preventDefault();
  const named = (button) => button.innerText.trim() === link.dataset.tab;
  const buttons = document.querySelectorAll('button[role=tab], .overflow-dropdown button');
  [...buttons].find(named)?.click();
  window.scrollTo(0, 0);
});</script>"""
# The page may talk to this server alone: no fonts, scripts or statistics from anywhere else.
_POLICY = (
    b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    b"style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; media-src 'self' data: blob:; "
    b"font-src 'self' data:; worker-src 'self' blob:; frame-ancestors 'none'; form-action 'self'"
)
_FOREIGN = b"This studio answers pages of this computer only; start it with --host to serve others."


class LocalOnly:
    """ASGI middleware that protects a local studio from other pages.

    Pages may load nothing from other servers. A local studio refuses requests whose Host is another name (DNS
    rebinding) or whose Origin is another page.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], local: bool = True) -> None:
        self.app, self.local = app, local

    def is_foreign(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether Host or Origin are no addresses, or, for a local studio, those of another page."""
        named = {name: value.decode("latin-1") for name, value in headers if name in (b"host", b"origin")}
        try:
            host = urlsplit(f"//{named.get(b'host', '')}").hostname or ""
            origin = urlsplit(named[b"origin"]).hostname or "" if b"origin" in named else host
        except ValueError:  # a bracket that is not closed, say
            return True
        return self.local and not (is_local(host) and is_local(origin))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Refuse requests from elsewhere, and add the policy to every answer."""
        if scope["type"] == "http" and self.is_foreign(scope["headers"]):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": _FOREIGN})
            return

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", _POLICY),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                ]
            await send(message)

        await self.app(scope, receive, answer if scope["type"] == "http" else send)


def build(state: StudioState, trainer: Trainer | None = None) -> Any:
    """The page as gradio Blocks."""
    with gr.Blocks(title="dear studio", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        version = gr.State(state.version)
        header = gr.HTML(header_html(state), elem_id="studio-header")
        context = Context(state, Samples(state), trainer or Trainer(state), version, page)
        tabs, parts = [], []
        with gr.Tabs():
            for name, build_tab, applies in TABS:
                with gr.Tab(name, id=name, visible=applies(state)) as tab:
                    parts.append(build_tab(context, tab))
                tabs.append(tab)

        def visible() -> list[Any]:
            return [gr.update(visible=applies(state)) for _, _, applies in TABS]

        outputs = [*tabs, version, header, *(one for part in parts for one in part.components)]

        def refresh(shown: int) -> list[Any]:
            """Show the new model of the studio; a page that shows it already stays as it is."""
            if shown == state.version:
                return [*visible(), *[gr.skip()] * (len(outputs) - len(tabs))]
            values = [value for part in parts for value in part.values()]
            return [*visible(), state.version, header_html(state), *values]

        quiet: dict[str, Any] = {"show_progress": "hidden"}
        page.load(refresh, version, outputs, **quiet)
        for event in (event for part in parts for event in part.events):
            event.then(refresh, version, outputs, **quiet)
    return page


def header_html(state: StudioState) -> str:
    """The model, its backbone, and its classes."""
    return render(
        "studio/header.html",
        backbone=state.clip.name,
        source=state.source,
        classes=state.model.classes,
    )


def is_local(host: str) -> bool:
    """Whether only this computer can reach a server that listens on `host`.

    >>> is_local("127.0.0.1"), is_local("localhost"), is_local("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def serving(
    run: str | os.PathLike[str] | None = None,
    *,
    backbone: str | None = None,
    data: str | None = None,
    host: str = "127.0.0.1",
    port: int = 7860,
    max_upload_mb: int = 20,
    device: str = "auto",
) -> Iterator[str]:
    """Serve the studio; yields its address. Afterwards the server is closed and its folder deleted.

    Args:
        run: run folder; without it and `backbone`, the embedded backbone and examples are shown.
        backbone: what `load` takes; None: that of the run, or mini.
        data: images to classify and train on: a folder, a table, or `world:NAME`.
        host: address to listen on; visitors can name folders only if it is a loopback address.
        port: port to listen on; 0 finds a free one.
        max_upload_mb: largest upload.
        device: "auto", "cpu", "cuda", …
    """
    if not 1 <= max_upload_mb <= 1000:
        raise UsageError(f"max_upload_mb must be 1 to 1000, got {max_upload_mb}")
    if not 0 <= port <= 65535:
        raise UsageError(f"port must be 0 (a free one) to 65535, got {port}")
    # a folder for this user only (mode 700)
    with tempfile.TemporaryDirectory(prefix="dear-studio-", ignore_cleanup_errors=True) as folder:
        source = None if run is None else os.fspath(run)
        chosen = pick_device(device)
        state = open_state(Path(folder), source, backbone, data, chosen, local=is_local(host))
        with serving_state(state, host, port, max_upload_mb) as url:
            yield url


@contextmanager
def serving_state(
    state: StudioState, host: str = "127.0.0.1", port: int = 0, max_upload_mb: int = 20
) -> Iterator[str]:
    """Serve the studio on an open state; yields its address."""
    before = os.environ.get("GRADIO_TEMP_DIR")
    os.environ["GRADIO_TEMP_DIR"] = str(state.folder / "uploads")  # gradio keeps uploads and answers there
    trainer = Trainer(state)
    page = build(state, trainer)
    try:
        with trim_memory():
            yield _launch(page, host, port, max_upload_mb)
    finally:
        trainer.stop()
        state.servers.close()
        page.close(verbose=False)
        if before is None:
            os.environ.pop("GRADIO_TEMP_DIR", None)
        else:
            os.environ["GRADIO_TEMP_DIR"] = before


def _launch(page: Any, host: str, port: int, max_upload_mb: int) -> str:
    from fastapi.middleware import Middleware

    system = ["system-ui", "sans-serif"]
    style = asset("components.css") + resources.files("dear.studio").joinpath("studio.css").read_text("utf-8")
    try:
        _, url, _ = page.queue().launch(
            server_name=host,
            server_port=port or _free_port(host),
            prevent_thread_lock=True,
            share=False,
            quiet=True,
            show_error=False,
            ssr_mode=False,
            pwa=False,
            footer_links=[],
            max_file_size=max_upload_mb * 2**20,
            theme=gr.themes.Default(primary_hue="blue", font=system, font_mono=["ui-monospace", "monospace"]),
            css=style,
            head=_LINKS,
            app_kwargs={
                "middleware": [Middleware(LocalOnly, local=is_local(host))],
                "docs_url": None,
                "redoc_url": None,
            },
        )
    except OSError as error:
        raise UsageError(
            f"the studio cannot listen on {host}:{port} ({error}); try another port", hint="port"
        ) from None
    return str(url)


def _free_port(host: str) -> int:
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
