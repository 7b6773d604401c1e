"""What the tabs share: errors as sentences, work that can be stopped, the look of galleries and plots."""

from __future__ import annotations

import functools
import hashlib
import io
import threading
import traceback
from collections.abc import Callable
from html import escape
from typing import Any, TypeVar, cast

import gradio as gr
from PIL import Image

from dear._io.files import write_atomic
from dear.errors import DearError
from dear.studio.desk import Desk, Stopped, Tell

F = TypeVar("F", bound=Callable[..., Any])


def spoken(function: F) -> F:
    """What a person can mend becomes a sentence on the page; our own faults go to the terminal."""

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except gr.Error:
            raise
        except Exception as error:
            raise _sentence(error) from None

    return cast(F, wrapped)


def _sentence(error: Exception) -> Any:
    if isinstance(error, Stopped):
        return gr.Error("Stopped.", title="Stopped", duration=4, print_exception=False)
    if isinstance(error, DearError):
        return gr.Error(escape(str(error)), title="That did not work", duration=20, print_exception=False)
    traceback.print_exception(error)
    return gr.Error(
        "Something broke inside dear; the terminal says what.", title="Sorry", print_exception=False
    )


class Work:
    """Long work of a tab: shows progress, and ends when its Stop button was pressed."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def tell(self, progress: Any) -> Tell:
        """A callback for work that begins now."""
        self.stop.clear()

        def told(what: str, done: int, total: int | None) -> None:
            if self.stop.is_set():
                raise Stopped
            progress((done, total) if total else None, desc=what)

        return told

    def button(self, name: str) -> Any:
        """A Stop button that ends the work at its next step."""
        button = gr.Button("Stop", variant="secondary", elem_id=f"{name}-stop")
        button.click(self.stop.set, queue=False, show_progress="hidden")
        return button


def shown(desk: Desk, image: Image.Image) -> str:
    """An image as a file to show, written once and whole.

    gradio, given an image, writes over the file of an equal one even while it is sent to somebody else.
    """
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=90)
    content = buffer.getvalue()
    path = desk.folder / "shown" / f"{hashlib.sha256(content).hexdigest()[:32]}.webp"
    if not path.exists():
        write_atomic(path, content)
    return str(path)


def samples_of(desk: Desk, count: int = 12) -> list[tuple[Any, str]]:
    """Images to click on, spread over those on the desk, with their names."""
    images = desk.images
    chosen = [
        (place * 2 + 1) * len(images) // (2 * min(count, len(images)))
        for place in range(min(count, len(images)))
    ]
    return [(images.image(i), images.classes[int(images.labels[i])]) for i in chosen]


def gallery_look(columns: int, name: str) -> dict[str, Any]:
    """Options that all galleries share."""
    return {
        "elem_classes": ["dear-gallery"],
        "columns": columns,
        "object_fit": "cover",
        "height": "auto",
        "elem_id": name,
        "interactive": False,
        "buttons": [],
    }


def plot_look(name: str) -> dict[str, Any]:
    """Options that all plots share."""
    return {"elem_id": name, "elem_classes": ["dear-plot"]}
