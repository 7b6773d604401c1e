"""The tab Label: starts the labeling page (`dear label start`) on a folder and links to it."""

from __future__ import annotations

from typing import Any

import gradio as gr

from dear.report.page import render
from dear.studio.label import Labeler
from dear.studio.parts import Context, TabUpdate, Work, errors_as_output, visitor_of


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
        link = gr.HTML(elem_id="label-page")

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
