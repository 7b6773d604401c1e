"""The tab Audit: the evidence about one concept, and answers without it."""

from __future__ import annotations

from typing import Any

import gradio as gr

from dear.heads.names import CONCEPTS
from dear.studio.audit import Auditor, answers_html, audit_html
from dear.studio.classify import open_uploads
from dear.studio.parts import Context, TabUpdate, Work, errors_as_output, visitor_of

_HINT = "<p>Does a concept predict the labels, and does the model use it? The evidence appears here.</p>"


def audit_tab(context: Context, tab: Any) -> TabUpdate:
    """Build the tab."""
    state = context.state
    auditor, work, comparing = Auditor(state), Work(), Work()
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            concept = gr.Dropdown(
                list(CONCEPTS),
                value="Location",
                allow_custom_value=True,
                label='Concept, or your own: "background: lab bench, outdoors"',
                elem_id="audit-concept",
            )
            with gr.Row():
                go = gr.Button("Audit", variant="primary", elem_id="audit-go")
                work.button("audit")
            with gr.Accordion("Your own images without the concept", open=False, elem_id="audit-images"):
                files = gr.File(label="Images", file_count="multiple", height=130, elem_id="audit-files")
                without = gr.Checkbox(True, label="Answer without the concept, too", elem_id="audit-without")
                answers_box = gr.HTML(elem_id="audit-answers")
            with gr.Accordion("Options", open=False):
                data = gr.Textbox(
                    label="Training images: a folder, a table, or world:NAME; empty: those of the model",
                    elem_id="audit-data",
                )
        with gr.Column(scale=3, min_width=300):
            evidence = gr.HTML(_HINT, elem_id="audit-evidence", elem_classes=["dear-room"])

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
        images = open_uploads(paths)
        return [answers_html(name, auditor.answers(images, name, where or "", callback, ticked), ticked)]

    go.click(
        errors_as_output(run), [concept, data], [evidence], show_progress_on=[evidence], api_name="audit"
    )
    gr.on(
        [files.change, without.change, concept.change],
        errors_as_output(compare),
        [files, without, concept, data],
        [answers_box],
        show_progress_on=[answers_box],
    )
    return TabUpdate([evidence, answers_box], lambda: [_HINT, ""])
