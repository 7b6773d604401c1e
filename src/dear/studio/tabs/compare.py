"""The tab Compare: two models on the same images."""

from __future__ import annotations

from typing import Any

import gradio as gr

from dear.studio.compare import compare_models, model_names
from dear.studio.parts import Context, TabUpdate, Work, errors_as_output, visitor_of
from dear.studio.tabs.train import datasets


def compare_tab(context: Context, tab: Any) -> TabUpdate:
    """Build the tab."""
    state, work = context.state, Work()
    names = model_names(state)
    options: dict[str, Any] = {"allow_custom_value": state.local, "min_width": 260}
    with gr.Row():
        where = ", or a run folder on this computer" if state.local else ""
        first = gr.Dropdown(
            names, value=names[0], label=f"First model{where}", elem_id="runs-first", **options
        )
        second = gr.Dropdown(
            names, value=names[-1], label=f"Second model{where}", elem_id="runs-second", **options
        )
        data = gr.Dropdown(
            ["", *datasets(state)],
            value="",
            allow_custom_value=state.local,
            label="Test images; empty: the images of the studio",
            elem_id="runs-data",
        )
    with gr.Row():
        go = gr.Button("Compare", variant="primary", elem_id="runs-go")
        work.button("runs")
    answer = gr.HTML(elem_id="runs-answer", elem_classes=["dear-room"])

    def run(
        one: str,
        two: str,
        images: str | None,
        request: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        callback = work.callback(progress, visitor_of(request))
        return [compare_models(state, one, two, images or "", callback)]

    def values() -> list[Any]:
        names = model_names(state)
        return [gr.update(choices=names), gr.update(choices=names, value=names[-1]), ""]

    go.click(
        errors_as_output(run),
        [first, second, data],
        answer,
        show_progress_on=[answer],
        api_name="compare_models",
    )
    return TabUpdate([first, second, answer], values)
