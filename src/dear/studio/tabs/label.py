"""The tab Label: starts the labeling page (`dear label start`) on a folder and links to it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gradio as gr

from dear.errors import UsageError
from dear.report.page import render
from dear.studio.parts import Context, TabUpdate, Work, errors_as_output, visitor_of
from dear.studio.state import StudioState
from dear.tasks.labeling.server import LabelingServer, serving
from dear.tasks.labeling.start import start_session
from dear.utils.progress import Progress


class Labeler:
    """Labeling pages of a studio: one per table of labels, until the studio ends."""

    def __init__(self, state: StudioState) -> None:
        self.state, self._open = state, ExitStack()
        self._servers: dict[Path, LabelingServer] = {}

    def start(self, pool: str, classes: str, out: str, progress: Progress | None = None) -> LabelingServer:
        """The page on the images of a folder or table; answers go to the table `out`.

        Raises:
            UsageError: the studio serves other computers, or a field is empty.
            DataError: the folder holds no readable image.
        """
        if not self.state.local:
            raise UsageError("labeling needs a studio on this computer, got one that serves others")
        if not pool.strip() or not out.strip():
            raise UsageError("labeling needs the images and the table of labels, got an empty field")
        path = Path(out.strip()).expanduser().absolute()
        if path not in self._servers:
            names = [name.strip() for name in classes.split(",") if name.strip()]
            clip = self.state.clip
            session, _ = start_session(pool.strip(), path, classes=names, backbone=clip, progress=progress)
            self._servers[path] = self._open.enter_context(serving(session))
        return self._servers[path]

    def close(self) -> None:
        """End all pages; answers are on disk already."""
        self._open.close()
        self._servers.clear()


def label_tab(context: Context, tab: Any) -> TabUpdate:
    """Build the tab."""
    labeler, work = Labeler(context.state), Work()
    with gr.Column(min_width=280):
        pool = gr.Textbox(
            label="Images to label: a folder, or a table with a column path", elem_id="label-pool"
        )
        classes = gr.Textbox(
            label="Class names with commas between; more can be added later", elem_id="label-classes"
        )
        out = gr.Textbox(value="labels.csv", label="Table of labels", elem_id="label-out")
        with gr.Row():
            go = gr.Button("Start labeling", variant="primary", elem_id="label-go")
            work.button("labeling")
        link = gr.HTML(elem_id="label-found")

    def run(
        images: str,
        names: str,
        table: str,
        request: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        server = labeler.start(images, names, table, work.callback(progress, visitor_of(request)))
        session = server.session
        return [render("studio/label.html", url=server.url, images=len(session.paths), out=session.file.path)]

    go.click(errors_as_output(run), [pool, classes, out], [link], show_progress_on=[link], api_name="label")
    return TabUpdate([], lambda: [])
