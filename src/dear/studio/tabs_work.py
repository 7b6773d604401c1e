"""The tabs that make and compare models: Train and Compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import gradio as gr

from dear.clip.factory import list_backbones
from dear.data import list_datasets
from dear.errors import RunError, UsageError
from dear.heads.focus import AUTO, attribute_heads
from dear.methods import list_methods
from dear.report import figures
from dear.runs.spec import Spec
from dear.studio import compare as comparing
from dear.studio.parts import Work, errors_as_message, errors_as_output, plot_look, visitor_of
from dear.studio.state import StudioState
from dear.studio.tabs_look import Refreshed
from dear.studio.training import AUTOMATIC, ROLE_CHOICES, Trainer, Watched, status_html

NO_FOCUS = "none"


@dataclass(frozen=True)
class _TrainParts:
    """Components of the tab Train: the fields in the order of `begin`, the buttons, and what is watched."""

    fields: list[Any]
    start: Any
    stop: Any
    resume: Any
    watched: list[Any]  # status, loss, accuracy, download


def _train_layout(state: StudioState, trainer: Trainer) -> _TrainParts:
    tasks = _tasks()
    where = "a task of the attribute world, or a folder on this computer" if state.local else "a task"
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            data = gr.Dropdown(
                tasks,
                value=tasks[0],
                allow_custom_value=True,
                label=f"Images: {where}",
                elem_id="train-data",
            )
            method = gr.Dropdown(list_methods(), value="dear", label="Method", elem_id="train-method")
            backbone = gr.Dropdown(
                backbone_choices(state),
                value=state.clip.name,
                allow_custom_value=state.local,
                label="Backbone" + (": a name, or a folder on this computer" if state.local else ""),
                elem_id="train-backbone",
            )
            roles = gr.Dropdown(
                list(ROLE_CHOICES),
                value=AUTOMATIC,
                label="Roles of the heads (methods that use roles)",
                info="automatic: the map of the backbone, or found on these images where it has none",
                elem_id="train-roles",
            )
            roles_file = gr.File(
                label="… or a role map (roles.json)",
                file_count="single",
                elem_id="train-roles-file",
                height=140,
            )
            focus = gr.Dropdown(
                focus_choices(state),
                value=NO_FOCUS,
                allow_custom_value=True,
                label="Focus on the heads of a role (methods that learn from the image feature)",
                info="auto: the role that serves these images best, or none",
                elem_id="train-focus",
            )
            shots = gr.Slider(0, 64, 16, step=1, label="Images per class (0: all)", elem_id="train-shots")
            epochs = gr.Slider(
                0, 50, 0, step=1, label="Epochs (0: as many as the images need)", elem_id="train-epochs"
            )
            seed = gr.Number(1, label="Seed", precision=0, minimum=0, elem_id="train-seed")
            with gr.Row():
                start = gr.Button("Start", variant="primary", elem_id="train-start")
                stop = gr.Button("Stop", elem_id="train-stop")
                resume = gr.Button("Resume", elem_id="train-resume")
            download = gr.DownloadButton("Download the adapter", interactive=False, elem_id="train-download")
        with gr.Column(scale=3, min_width=300):
            status = gr.HTML(status_html(trainer.watched), elem_id="train-status")
            loss = gr.Plot(label="Loss", visible=False, **plot_look("train-loss"))
            accuracy = gr.Plot(label="Accuracy on test images", visible=False, **plot_look("train-accuracy"))
    fields = [data, method, shots, epochs, seed, backbone, roles, roles_file, focus]
    return _TrainParts(fields, start, stop, resume, [status, loss, accuracy, download])


def train_tab(state: StudioState, trainer: Trainer, page: Any) -> list[Any]:
    """Build the tab Train. Returns the events after which the studio may have a new model."""
    parts = _train_layout(state, trainer)

    def watch() -> Iterator[list[Any]]:
        seen = (-1, -1)
        while True:
            watched = trainer.wait(0.7)
            now = (len(watched.lines), len(watched.accuracy))
            plots = [gr.skip(), gr.skip()] if now == seen else training_plots(watched)
            seen = now
            path = None
            if watched.state == "finished":
                with suppress(RunError):  # somebody began the next training just now
                    path = str(trainer.download())
            yield [status_html(watched), *plots, gr.update(interactive=path is not None, value=path)]
            if not watched.busy:
                return

    @errors_as_message
    def begin(
        data: str,
        name: str,
        count: int,
        rounds: int,
        number: int,
        weights: str | None,
        choice: str,
        file: str | None,
        focus: str | None,
        request: gr.Request,
    ) -> None:
        training = Spec().changed(
            data=str(data or ""),
            method=name,
            shots=int(count),
            seed=int(number or 0),
            backbone=weights or "",
            recipe={"epochs": int(rounds)} if rounds else {},
            focus=None if focus in (None, "", NO_FOCUS) else focus,
        )
        trainer.start(training, file or choice, visitor_of(request))

    @errors_as_message
    def end(request: gr.Request) -> None:
        if not trainer.may_stop(visitor_of(request)):
            raise UsageError("this training was started by somebody else; only they can stop it")
        trainer.stop(0)

    resumed = errors_as_message(trainer.resume)
    quiet: dict[str, Any] = {"show_progress": "hidden"}
    # Watching only waits: everybody may do so at once, or the second visitor would see nothing until the end.
    waiting = {**quiet, "concurrency_limit": None}
    began = parts.start.click(begin, parts.fields, None, api_name="train", **quiet)
    again = parts.resume.click(resumed, None, None, **quiet)
    parts.stop.click(end, None, None, queue=False, **quiet)
    events = [event.success(watch, None, parts.watched, **waiting) for event in (began, again)]
    return [*events, page.load(watch, None, parts.watched, **waiting)]


def backbone_choices(state: StudioState) -> list[str]:
    """Backbones to choose from; visitors of other computers cannot make this one download any."""
    names = [name for name in list_backbones() if name != state.clip.name] if state.local else ["mini"]
    return list(dict.fromkeys([state.clip.name, *names]))


def focus_choices(state: StudioState) -> list[str]:
    """None, auto, and the roles of the studio's map."""
    return [NO_FOCUS, AUTO, *({} if state.roles is None else attribute_heads(state.roles))]


def training_plots(watched: Watched) -> list[Any]:
    """Loss and accuracy as figures, shown once there is something to see."""
    curve = figures.training_curve(watched.lines, watched.steps) if watched.lines else None
    points = [{"step": step, **dict(row)} for step, row in watched.accuracy]
    reached = figures.accuracy_curve(points, watched.steps) if points else None
    return [gr.update(value=figure, visible=figure is not None) for figure in (curve, reached)]


def _tasks() -> list[str]:
    return [name for name in list_datasets() if name.startswith("world:")]


def compare_tab(state: StudioState) -> Refreshed:
    """Build the tab Compare: two models on the same images, and result files as tables and plots."""
    refreshed = _compare_models(state)
    gr.Markdown("### Results of a benchmark grid")
    _compare_results(state)
    return refreshed


def _compare_models(state: StudioState) -> Refreshed:
    work = Work()
    gr.Markdown("### Two models on the same images")
    names = comparing.model_names(state)
    own: dict[str, Any] = {"allow_custom_value": state.local, "min_width": 260}
    with gr.Row():
        where = ", or a run folder on this computer" if state.local else ""
        first = gr.Dropdown(names, value=names[0], label=f"First model{where}", elem_id="runs-first", **own)
        second = gr.Dropdown(
            names, value=names[-1], label=f"Second model{where}", elem_id="runs-second", **own
        )
        data = gr.Dropdown(
            ["", *_tasks()],
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
        return [comparing.compare_models(state, one, two, images or "", callback)]

    go.click(
        errors_as_output(run, lambda problem: [problem]),
        [first, second, data],
        answer,
        show_progress_on=[answer],
        api_name="compare_models",
    )

    def values() -> list[Any]:
        names = comparing.model_names(state)
        return [gr.update(choices=names), gr.update(choices=names, value=names[-1]), ""]

    return Refreshed([first, second, answer], values)


def _compare_results(state: StudioState) -> None:
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

    def page(shown: dict[str, comparing.Shown], name: str) -> list[Any]:
        one = shown[name]
        filled = [gr.update(value=figure, label=head, visible=True) for head, figure in one.figures[:3]]
        return [one.table, *filled, *[gr.update(visible=False)] * (3 - len(filled))]

    def run(uploads: list[str] | None, where: str) -> list[Any]:
        shown = comparing.compare(comparing.result_files(state, uploads or [], where))
        names = list(shown)
        return [
            shown,
            gr.update(choices=names, value=names[0], visible=len(names) > 1),
            *page(shown, names[0]),
        ]

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
