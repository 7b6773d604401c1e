"""The tab Train: settings, progress, and the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import gradio as gr

from dear.clip.factory import list_backbones
from dear.data import list_datasets
from dear.errors import RunError, UsageError
from dear.heads.focus import AUTO, attribute_heads
from dear.methods import find_method, list_methods
from dear.report import figures
from dear.runs.spec import Spec
from dear.studio.parts import Context, TabUpdate, errors_as_message, plot_options, visitor_of
from dear.studio.state import StudioState
from dear.studio.training import AUTOMATIC, ROLE_CHOICES, TrainingStatus, status_html

NO_FOCUS = "none"
QUICK = "proker"  #: the method that answers in seconds; accuracy in docs/methods.md


def train_tab(context: Context, tab: Any) -> TabUpdate:
    """Build the tab."""
    state, trainer = context.state, context.trainer
    tasks = datasets(state)
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            data = gr.Dropdown(
                tasks,
                value=next(iter(tasks), None),
                allow_custom_value=state.local,
                label="Images"
                + (": a folder on this computer with one folder per class" if state.local else ""),
                elem_id="train-data",
            )
            method = gr.Dropdown(
                list_methods(),
                value=QUICK,
                label="Method",
                info=f"{QUICK} takes seconds; dear trains inside the backbone for minutes.",
                elem_id="train-method",
            )
            shots = gr.Slider(0, 64, 16, step=1, label="Images per class (0: all)", elem_id="train-shots")
            with gr.Row():
                start = gr.Button("Start", variant="primary", elem_id="train-start")
                stop = gr.Button("Stop", visible=False, elem_id="train-stop")
                resume = gr.Button("Resume", visible=False, elem_id="train-resume")
            with gr.Accordion("Options", open=False, elem_id="train-options"):
                backbone = gr.Dropdown(
                    _backbones(state),
                    value=state.clip.name,
                    allow_custom_value=state.local,
                    label="Backbone" + (": a name, or a folder on this computer" if state.local else ""),
                    elem_id="train-backbone",
                )
                roles = gr.Dropdown(
                    list(ROLE_CHOICES),
                    value=AUTOMATIC,
                    label="Head roles",
                    info="automatic: the map of the backbone, or discovered on these images",
                    elem_id="train-roles",
                )
                roles_file = gr.File(
                    label="Role map (roles.json)", file_count="single", elem_id="train-roles-file", height=130
                )
                focus = gr.Dropdown(
                    [NO_FOCUS, AUTO, *({} if state.roles is None else attribute_heads(state.roles))],
                    value=NO_FOCUS,
                    allow_custom_value=True,
                    label="Focus on the heads of a role",
                    info="auto: the role that helps most on these images, or none",
                    elem_id="train-focus",
                )
                epochs = gr.Slider(
                    0, 50, 0, step=1, label="Epochs (0: default of the method)", elem_id="train-epochs"
                )
                seed = gr.Number(1, label="Seed", precision=0, minimum=0, elem_id="train-seed")
        with gr.Column(scale=3, min_width=300):
            status = gr.HTML(status_html(trainer.status), elem_id="train-status")
            download = gr.DownloadButton("Download the run", visible=False, elem_id="train-download")
            accuracy = gr.Plot(
                label="Accuracy on test images", visible=False, **plot_options("train-accuracy")
            )
            loss = gr.Plot(label="Loss", visible=False, **plot_options("train-loss"))

    def watch() -> Iterator[list[Any]]:
        drawn = (-1, -1)
        while True:
            now = trainer.wait(0.7)
            size = (len(now.lines), len(now.accuracy))
            plots = [gr.skip(), gr.skip()] if size == drawn else _plots(now)
            drawn = size
            path = None
            if now.state == "finished":
                with suppress(RunError):  # another training started meanwhile
                    path = str(trainer.download())
            yield [
                status_html(now),
                *plots,
                gr.update(visible=path is not None, value=path),
                gr.update(visible=now.busy),
                gr.update(visible=now.state == "stopped"),
            ]
            if not now.busy:
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
        kind = find_method(name)
        training = Spec().changed(
            data=str(data or ""),
            method=name,
            shots=int(count),
            seed=int(number or 0),
            backbone=weights or "",
            recipe={"epochs": int(rounds)} if rounds else {},
            focus=None if focus in (None, "", NO_FOCUS) or not kind.can_focus else focus,
            unreadable="skip",
        )
        trainer.start(training, (file or choice) if kind.uses_roles else AUTOMATIC, visitor_of(request))

    @errors_as_message
    def end(request: gr.Request) -> None:
        if not trainer.may_stop(visitor_of(request)):
            raise UsageError("only the visitor who started this training can stop it")
        trainer.stop(0)

    quiet: dict[str, Any] = {"show_progress": "hidden"}
    # Watching only waits, so any number of visitors may do so at once.
    waiting = {**quiet, "concurrency_limit": None}
    fields = [data, method, shots, epochs, seed, backbone, roles, roles_file, focus]
    watched = [status, loss, accuracy, download, stop, resume]
    started = start.click(begin, fields, None, api_name="train", **quiet)
    resumed = resume.click(errors_as_message(trainer.resume), None, None, **quiet)
    stop.click(end, None, None, queue=False, **quiet)
    gr.on([method.change, context.page.load], _applicable, method, [roles, roles_file, focus], **quiet)
    events = [event.success(watch, None, watched, **waiting) for event in (started, resumed)]
    return TabUpdate([], list, (*events, context.page.load(watch, None, watched, **waiting)))


def datasets(state: StudioState) -> list[str]:
    """Datasets to choose from: the studio's data, or the tasks of the attribute world."""
    return [state.data] if state.data else [name for name in list_datasets() if name.startswith("world:")]


def _applicable(name: str) -> list[Any]:
    """Show the options that apply to a method."""
    kind = find_method(name)
    roles, focus = gr.update(visible=kind.uses_roles), gr.update(visible=kind.can_focus)
    return [roles, roles, focus]


def _backbones(state: StudioState) -> list[str]:
    """Backbones to choose from; visitors of an open studio cannot start downloads."""
    return list(dict.fromkeys([state.clip.name, *(list_backbones() if state.local else ["mini"])]))


def _plots(status: TrainingStatus) -> list[Any]:
    """Loss and accuracy as figures, once there are any."""
    curve = figures.training_curve(status.lines, status.steps) if status.lines else None
    points = [{"step": step, **dict(row)} for step, row in status.accuracy]
    reached = figures.accuracy_curve(points, status.steps) if points else None
    return [gr.update(value=figure, visible=figure is not None) for figure in (curve, reached)]
