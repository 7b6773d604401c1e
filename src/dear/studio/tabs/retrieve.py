"""The tab Retrieve: nearest images in one attribute."""

from __future__ import annotations

from html import escape
from typing import Any

import gradio as gr

from dear.studio.classify import open_uploads
from dear.studio.parts import (
    EVERY_SELECTION,
    LATEST,
    Context,
    TabUpdate,
    Work,
    errors_as_output,
    gallery_options,
    visitor_of,
)
from dear.studio.retrieve import ImageSearch, attributes
from dear.studio.state import StudioState, gallery_html
from dear.tasks.retrieve import names_caveat

_HINT = "<p>Drop an image or click an example: similar images appear here.</p>"


def _hint(state: StudioState) -> str:
    caveat = names_caveat(state.model.method)
    return _HINT + (f"<p>{escape(caveat)}</p>" if caveat else "")


def retrieve_tab(context: Context, tab: Any) -> TabUpdate:
    """Build the tab."""
    state, samples = context.state, context.samples
    search, work = ImageSearch(state), Work()
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            names = attributes(state)
            attribute = gr.Radio(
                names, value=next(iter(names), None), label="Similar in", elem_id="retrieve-attribute"
            )
            query = gr.File(label="Query image", file_count="single", height=130, elem_id="retrieve-file")
            example = gr.Gallery(
                samples.files(state.version),
                label="Examples",
                allow_preview=False,
                **gallery_options(8, "retrieve-examples"),
            )
            with gr.Row():
                go = gr.Button("Find", variant="primary", elem_id="retrieve-go")
                work.button("retrieve")
            with gr.Accordion("Options", open=False, visible=state.local):
                folder = gr.Textbox(
                    label="Folder to search on this computer; empty: the images of the studio",
                    elem_id="retrieve-folder",
                )
        with gr.Column(scale=3, min_width=300):
            shown_query = gr.HTML(elem_id="retrieve-query")
            nearest_images = gr.HTML(_hint(state), elem_id="retrieve-images", elem_classes=["dear-room"])
    picked = gr.State(None)

    def run(
        path: str | None,
        number: int | None,
        name: str,
        where: str | None,
        version: int,
        request: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        if not path and number is not None:
            image, title = samples.images(version)[number]
        else:
            title, image = open_uploads([path] if path else [])[0]
        nearest = search.find(image, name, where or "", progress=work.callback(progress, visitor_of(request)))
        answers = [(one, f"{cosine:.3f} {label}") for one, label, cosine in nearest]
        return [
            gallery_html("Query", [(image, title)]),
            gallery_html(f"Most similar in {name}, with the cosine", answers),
        ]

    def pick(event: gr.SelectData) -> list[Any]:
        return [event.index, None]  # the example replaces a file

    def values() -> list[Any]:
        names = attributes(state)
        choices = gr.update(choices=names, value=next(iter(names), None))
        return [choices, samples.files(state.version), None, "", _hint(state)]

    inputs, outputs = [query, picked, attribute, folder, context.version], [shown_query, nearest_images]
    find = errors_as_output(run, lambda problem: ["", problem])
    shown: dict[str, Any] = {
        "show_progress_on": [nearest_images],
        "trigger_mode": LATEST,
        "concurrency_id": "retrieve",
    }
    go.click(find, inputs, outputs, api_name="retrieve", **shown)
    chosen = example.select(pick, None, [picked, query], show_progress="hidden", trigger_mode=EVERY_SELECTION)
    chosen.then(find, inputs, outputs, **shown)
    uploaded = query.upload(lambda: None, None, picked, show_progress="hidden")
    uploaded.then(find, inputs, outputs, **shown)
    return TabUpdate([attribute, example, picked, *outputs], values)
