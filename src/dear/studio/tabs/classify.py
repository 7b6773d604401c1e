"""The tab Classify: any images and any class names, and the panel Why."""

from __future__ import annotations

from typing import Any

import gradio as gr

from dear.images.views import open_image
from dear.report import figures
from dear.runs.class_lists import format_class_list
from dear.studio import classify
from dear.studio.parts import (
    Samples,
    TabUpdate,
    Work,
    errors_as_output,
    gallery_look,
    plot_look,
    visitor_of,
)
from dear.studio.state import StudioState

_HINT = "<p>Choose images; the answers appear here.</p>"


def classify_tab(state: StudioState, samples: Samples, version: Any) -> TabUpdate:
    """Build the tab."""
    work = Work()
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            files = gr.File(label="Drop images here", file_count="multiple", elem_id="classify-files")
            with gr.Accordion("Camera", open=False):
                camera = gr.Image(label="Camera", sources=["webcam"], type="pil", elem_id="classify-camera")
            example = gr.Gallery(
                samples.shown(state.version),
                label="… or click an example",
                allow_preview=False,
                **gallery_look(6, "classify-examples"),
            )
            names = gr.Textbox(
                format_class_list(state.classes, "\n"),
                label="Class names, one per line; +name adds to the trained ones",
                lines=6,
                max_lines=14,
                elem_id="classify-names",
            )
            template = gr.Textbox(state.template, label="Prompt around a name", elem_id="classify-template")
            refuse = gr.Slider(
                0,
                50,
                0,
                step=1,
                label="“None of these”: percent of images of trained classes that may be refused (0: none)",
                elem_id="classify-reject",
            )
            with gr.Row():
                go = gr.Button("Classify", variant="primary", elem_id="classify-go")
                work.button("classify")
        with gr.Column(scale=3, min_width=300):
            cards = gr.HTML(_HINT, elem_id="classify-answers", elem_classes=["dear-room"])
            shares = gr.Plot(
                label="What each attribute added to the decision",
                visible=False,
                **plot_look("classify-shares"),
            )
            source = gr.Markdown(elem_id="classify-source")
            first = gr.State([])  # the first image that was classified, for the panel
            with gr.Accordion("Why?", open=False, elem_id="classify-why-panel"):
                why = gr.Button("Why this answer for the first image?", elem_id="classify-why")
                with gr.Row():
                    phrase = gr.Textbox(
                        label="Where is …?", placeholder="wheels", max_lines=1, elem_id="classify-phrase"
                    )
                    where = gr.Button("Show where", elem_id="classify-where")
                reason = gr.HTML("", elem_id="classify-reason", elem_classes=["dear-room"])

    def answer(
        images: list[classify.Named],
        complaints: list[str],
        text: str,
        prompt: str,
        percent: float,
        callback: Any,
    ) -> list[Any]:
        classes = classify.parse_classes(text, state.find_model(callback).classes)
        reject = percent / 100 if percent else None
        verdicts = classify.classify(state, images, classes, prompt, progress=callback, reject=reject)
        trusted, advice = classify.which_to_trust(state.find_model(), classes)
        rows = classify.share_rows(verdicts)
        figure = gr.update(value=figures.decision_shares(rows) if rows else None, visible=bool(rows))
        html = classify.verdicts_html(verdicts, trusted, advice, complaints)
        return [html, figure, f"Adapted model: {state.source}.", images[:1]]

    def run(
        paths: list[str] | None,
        photo: Any,
        text: str,
        prompt: str,
        percent: float,
        request: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        shots = [] if photo is None else [("camera", open_image(photo))]
        found, complaints = classify.readable_uploads(paths or []) if paths or not shots else ([], [])
        callback = work.callback(progress, visitor_of(request))
        return answer([*found, *shots], complaints, text, prompt, percent, callback)

    def pick(
        event: gr.SelectData,
        text: str,
        prompt: str,
        percent: float,
        seen: int,
        request: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        image, name = samples.at(seen)[event.index]
        callback = work.callback(progress, visitor_of(request))
        return answer([(name, image)], [], text, prompt, percent, callback)

    def explain(images: list[classify.Named], text: str, prompt: str) -> list[Any]:
        classes = classify.parse_classes(text, state.find_model().classes)
        return [classify.why_html(state, images, classes, prompt)]

    def locate(images: list[classify.Named], words: str) -> list[Any]:
        return [classify.where_html(state, images, words)]

    def empty(problem: str) -> list[Any]:
        return [problem, gr.update(value=None, visible=False), "", []]

    def values() -> list[Any]:
        return [
            format_class_list(state.classes, "\n"),
            state.template,
            samples.shown(state.version),
            *empty(_HINT),
        ]

    outputs, options = [cards, shares, source, first], [names, template, refuse]
    shown = {"show_progress_on": [cards]}
    classified = errors_as_output(run, empty)
    go.click(classified, [files, camera, *options], outputs, api_name="classify", **shown)
    example.select(errors_as_output(pick, empty), [*options, version], outputs, **shown)
    why.click(errors_as_output(explain), [first, names, template], [reason], api_name="why")
    gr.on([where.click, phrase.submit], errors_as_output(locate), [first, phrase], [reason], api_name="where")
    return TabUpdate([names, template, example, *outputs], values)
