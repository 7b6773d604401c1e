"""The tab Compare: two models on the same images, and result files as tables and plots."""

from __future__ import annotations

from typing import Any

import gradio as gr

from dear.studio.compare import Shown, compare, compare_models, model_names, result_files
from dear.studio.parts import TabUpdate, Work, errors_as_output, plot_look, visitor_of
from dear.studio.state import StudioState
from dear.studio.tabs.train import world_tasks


def compare_tab(state: StudioState) -> TabUpdate:
    """Build the tab."""
    update = _models(state)
    gr.Markdown("### Results of a benchmark grid")
    _results(state)
    return update


def _models(state: StudioState) -> TabUpdate:
    work = Work()
    gr.Markdown("### Two models on the same images")
    names = model_names(state)
    own: dict[str, Any] = {"allow_custom_value": state.local, "min_width": 260}
    with gr.Row():
        where = ", or a run folder on this computer" if state.local else ""
        first = gr.Dropdown(names, value=names[0], label=f"First model{where}", elem_id="runs-first", **own)
        second = gr.Dropdown(
            names, value=names[-1], label=f"Second model{where}", elem_id="runs-second", **own
        )
        data = gr.Dropdown(
            ["", *world_tasks()],
            value="",
            allow_custom_value=state.local,
            label="Labeled images; empty: the images of the studio",
            elem_id="runs-data",
        )
    with gr.Row():
        go = gr.Button("Compare the two", variant="primary", elem_id="runs-go")
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


def _results(state: StudioState) -> None:
    with gr.Row():
        files = gr.File(
            label="Result files (.json) of dear bench", file_count="multiple", elem_id="compare-files"
        )
        folder = gr.Textbox(
            label="… or the folder of a grid on this computer", visible=state.local, elem_id="compare-folder"
        )
    go = gr.Button("Compare", variant="primary", elem_id="compare-go")
    protocol = gr.Radio([], label="Protocol", visible=False, elem_id="compare-protocol")
    table = gr.HTML("<p>Tables and plots appear here.</p>", elem_id="compare-table")
    plots = [gr.Plot(visible=False, **plot_look(f"compare-plot-{number}")) for number in range(3)]
    results = gr.State({})

    def page(shown: dict[str, Shown], name: str) -> list[Any]:
        one = shown[name]
        filled = [gr.update(value=figure, label=head, visible=True) for head, figure in one.figures[:3]]
        return [one.table, *filled, *[gr.update(visible=False)] * (3 - len(filled))]

    def run(uploads: list[str] | None, where: str) -> list[Any]:
        shown = compare(result_files(state, uploads or [], where))
        names = list(shown)
        choice = gr.update(choices=names, value=names[0], visible=len(names) > 1)
        return [shown, choice, *page(shown, names[0])]

    def empty(problem: str) -> list[Any]:
        return [{}, gr.update(visible=False), problem, *[gr.update(visible=False)] * 3]

    go.click(
        errors_as_output(run, empty),
        [files, folder],
        [results, protocol, table, *plots],
        show_progress_on=[table],
        api_name="compare_results",
    )
    protocol.input(page, [results, protocol], [table, *plots], show_progress="hidden")
