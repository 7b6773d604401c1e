"""The tab Audit: the evidence about one concept, and answers without it."""

from __future__ import annotations

from typing import Any

import gradio as gr

from dear.heads.names import CONCEPTS
from dear.studio.audit import Auditor, answers_html, audit_html
from dear.studio.classify import open_uploads
from dear.studio.parts import TabUpdate, Work, errors_as_output, visitor_of
from dear.studio.state import StudioState

_HINT = "<p>Choose a concept; what goes with the labels, and what the model makes of it, appears here.</p>"


def audit_tab(state: StudioState) -> TabUpdate:
    """Build the tab."""
    auditor, work, comparing = Auditor(state), Work(), Work()
    with gr.Row(elem_id="audit-grid"):  # on narrow screens the evidence comes before the own images
        with gr.Column(min_width=280):
            concept = gr.Dropdown(
                list(CONCEPTS),
                value="Location",
                allow_custom_value=True,
                label='Concept, or your own: "background: lab bench, outdoors"',
                elem_id="audit-concept",
            )
            data = gr.Textbox(
                label="Training images: a folder, a table or world:NAME; empty: the images of the studio",
                elem_id="audit-data",
            )
            with gr.Row():
                go = gr.Button("Audit", variant="primary", elem_id="audit-go")
                work.button("audit")
        with gr.Column(min_width=300, elem_id="audit-evidence"):
            found = gr.HTML(_HINT, elem_id="audit-found", elem_classes=["dear-room"])
        with gr.Column(min_width=280):
            files = gr.File(label="Your own images", file_count="multiple", elem_id="audit-files")
            without = gr.Checkbox(label="Answer them without the concept, too", elem_id="audit-without")
            own = gr.HTML(elem_id="audit-answers")

    def run(
        name: str,
        where: str,
        request: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        callback = work.callback(progress, visitor_of(request))
        return [audit_html(auditor.find(name, where or "", callback))]

    def compare(
        paths: list[str] | None,
        ticked: bool,
        name: str,
        where: str,
        request: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        if not paths:
            return [""]
        callback = comparing.callback(progress, visitor_of(request))
        opened = open_uploads(paths)
        return [answers_html(name, auditor.answers(opened, name, where or "", callback, ticked), ticked)]

    go.click(errors_as_output(run), [concept, data], [found], show_progress_on=[found], api_name="audit")
    gr.on(
        [files.change, without.change, concept.change],
        errors_as_output(compare),
        [files, without, concept, data],
        [own],
        show_progress_on=[own],
    )
    return TabUpdate([found, own], lambda: [_HINT, ""])
