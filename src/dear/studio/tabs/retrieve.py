"""The tab Retrieve: nearest images in one attribute."""

from __future__ import annotations

from typing import Any

import gradio as gr

from dear.heads.names import CORE
from dear.studio.classify import open_uploads
from dear.studio.parts import Samples, TabUpdate, Work, errors_as_output, gallery_look, visitor_of
from dear.studio.retrieve import ImageSearch
from dear.studio.state import StudioState, gallery_html


def retrieve_tab(state: StudioState, samples: Samples, version: Any) -> TabUpdate:
    """Build the tab."""
    search, work = ImageSearch(state), Work()
    attributes = _attributes(state)
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            attribute = gr.Radio(
                attributes, value=attributes[0], label="Find images similar in", elem_id="retrieve-attribute"
            )
            query = gr.File(label="A query image", file_count="single", elem_id="retrieve-file")
            example = gr.Gallery(
                samples.shown(state.version),
                label="… or click an example",
                allow_preview=False,
                **gallery_look(6, "retrieve-examples"),
            )
            folder = gr.Textbox(
                label="Folder of images on this computer; empty: the images of the studio",
                visible=state.local,
                elem_id="retrieve-folder",
            )
            with gr.Row():
                go = gr.Button("Find", variant="primary", elem_id="retrieve-go")
                work.button("retrieve")
        with gr.Column(scale=3, min_width=300):
            asked = gr.HTML(elem_id="retrieve-query")
            found = gr.HTML(
                "<p>Choose a query; similar images appear here.</p>",
                elem_id="retrieve-found",
                elem_classes=["dear-room"],
            )
    picked = gr.State(None)

    def run(
        path: str | None,
        number: int | None,
        wanted: str,
        where: str,
        seen: int,
        request: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        if not path and number is not None:
            image, name = samples.at(seen)[number]
        else:
            name, image = open_uploads([path] if path else [])[0]
        alike = search.find(image, wanted, where, progress=work.callback(progress, visitor_of(request)))
        answers = [(one, f"{cosine:.3f} {label}") for one, label, cosine in alike]
        return [
            gallery_html("Query", [(image, name)]),
            gallery_html(f"Most similar in {wanted}, with the cosine", answers),
        ]

    def pick(event: gr.SelectData) -> list[Any]:
        return [event.index, None]  # the example counts now, not a file from before

    def values() -> list[Any]:
        names = _attributes(state)
        return [gr.update(choices=names, value=names[0]), samples.shown(state.version), None, "", ""]

    inputs, outputs = [query, picked, attribute, folder, version], [asked, found]
    find, shown = errors_as_output(run, lambda problem: ["", problem]), {"show_progress_on": [found]}
    go.click(find, inputs, outputs, api_name="retrieve", **shown)
    chosen = example.select(pick, None, [picked, query], show_progress="hidden")
    chosen.then(find, inputs, outputs, **shown)
    query.upload(lambda: None, None, picked, show_progress="hidden")
    return TabUpdate([attribute, example, picked, *outputs], values)


def _attributes(state: StudioState) -> list[str]:
    return list(state.roles.core) if state.roles is not None else list(CORE)
