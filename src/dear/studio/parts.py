"""Shared by the tabs: errors as sentences, work that can be stopped, options of galleries and plots."""

from __future__ import annotations

import functools
import io
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar, cast

import gradio as gr
from PIL import Image

from dear.errors import DearError
from dear.report.page import render
from dear.studio.state import Stopped, StudioState, name_of
from dear.studio.training import Trainer
from dear.utils.digest import of_parts
from dear.utils.files import write_atomic
from dear.utils.progress import Progress

F = TypeVar("F", bound=Callable[..., Any])
_MOST_VISITORS = 1000
_SAMPLES = 8

# gradio ignores an event whose function still runs, unless `trigger_mode` says otherwise.
LATEST = "always_last"  #: runs once more afterwards, with the values that the page has then
EVERY_SELECTION = "multiple"  #: runs for each; what was selected is part of the event, so none can be merged


@dataclass(frozen=True)
class Context:
    """What every tab is built from."""

    state: StudioState
    samples: Samples
    trainer: Trainer
    version: Any  #: gr.State: the version of the state that this visitor's page shows
    page: Any  #: gr.Blocks


@dataclass(frozen=True)
class TabUpdate:
    """Components of a tab that change with the model, their new values, and events that bring a new model."""

    components: list[Any]
    values: Callable[[], list[Any]]
    events: tuple[Any, ...] = ()


def errors_as_message(function: F) -> F:
    """Show errors that a person can correct as a sentence on the page; others go to the terminal."""

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except gr.Error:
            raise
        except Exception as error:
            title = "Stopped" if isinstance(error, Stopped) else "That did not work"
            sentence = escape(_sentence(error))
            raise gr.Error(sentence, title=title, duration=20, print_exception=False) from None

    return cast(F, wrapped)


def errors_as_output(function: F, empty: Callable[[str], list[Any]] = lambda problem: [problem]) -> F:
    """As `errors_as_message`, but the sentence replaces the previous answers.

    `empty` returns the outputs for an error, from the HTML of its sentence.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Exception as error:
            return empty(render("studio/problem.html", sentence=_sentence(error)))

    return cast(F, wrapped)


def _sentence(error: Exception) -> str:
    if isinstance(error, Stopped):
        return "Stopped."
    if isinstance(error, DearError):
        return str(error)
    traceback.print_exception(error)
    return "An error inside dear; the terminal has the details."


class Work:
    """Long work of a tab: shows progress, and ends when the visitor who started it presses Stop."""

    def __init__(self) -> None:
        self._stops: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def callback(self, progress: Any, visitor: str) -> Progress:
        """A callback for work that starts now; earlier work of the same visitor in this tab ends."""
        stop = threading.Event()
        with self._lock:
            previous = self._stops.pop(visitor, None)
            self._stops[visitor] = stop
            while len(self._stops) > _MOST_VISITORS:
                del self._stops[next(iter(self._stops))]
        if previous is not None:
            previous.set()

        def report(what: str, done: int, total: int | None) -> None:
            if stop.is_set():
                raise Stopped
            progress((done, total) if total else None, desc=what)

        return report

    def stop(self, visitor: str) -> None:
        """End the work of one visitor at its next step."""
        with self._lock:
            event = self._stops.get(visitor)
        if event is not None:
            event.set()

    def button(self, name: str) -> Any:
        """A Stop button for the visitor who presses it."""
        button = gr.Button("Stop", variant="secondary", elem_id=f"{name}-stop")

        def press(request: gr.Request) -> None:
            self.stop(visitor_of(request))

        button.click(press, queue=False, show_progress="hidden")
        return button


def visitor_of(request: Any) -> str:
    """Which open page a request comes from."""
    return str(getattr(request, "session_hash", None) or "")


def image_file(state: StudioState, image: Image.Image) -> str:
    """An image as a file to show, written once and atomically.

    gradio would overwrite the file of an equal image, even while it is sent to another visitor.
    """
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=90)
    content = buffer.getvalue()
    path = state.folder / "shown" / f"{of_parts(content).hex()[:32]}.webp"
    if not path.exists():
        write_atomic(path, content)
    return str(path)


class Samples:
    """Example images with their names, for every version of the state that a page may still show."""

    def __init__(self, state: StudioState) -> None:
        self.state = state
        self._cached: dict[int, list[tuple[Image.Image, str]]] = {}

    def images(self, version: int) -> list[tuple[Image.Image, str]]:
        """Images spread evenly over the studio's images."""
        if version not in self._cached:
            images = self.state.images
            count = min(_SAMPLES, len(images))
            chosen = [(place * 2 + 1) * len(images) // (2 * count) for place in range(count)]
            self._cached[version] = [(images.image(i), name_of(images, i)) for i in chosen]
        return self._cached[version]

    def files(self, version: int) -> list[tuple[str, str]]:
        """The same as files, for gradio's gallery; the names are the alternative texts."""
        return [(image_file(self.state, image), name) for image, name in self.images(version)]


def gallery_options(columns: int, name: str) -> dict[str, Any]:
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


def plot_options(name: str) -> dict[str, Any]:
    """Options that all plots share."""
    return {"elem_id": name, "elem_classes": ["dear-plot"]}
