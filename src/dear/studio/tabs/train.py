"""The tab Train: settings, and the training as it goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import gradio as gr

from dear.clip.factory import list_backbones
from dear.data import list_datasets
from dear.errors import RunError, UsageError
from dear.heads.focus import AUTO, attribute_heads
from dear.methods import list_methods
from dear.report import figures
from dear.runs.spec import Spec
from dear.studio.parts import errors_as_message, plot_look, visitor_of
from dear.studio.state import StudioState
from dear.studio.training import AUTOMATIC, ROLE_CHOICES, Trainer, TrainingStatus, status_html

NO_FOCUS = "none"


def train_tab(state: StudioState, trainer: Trainer, page: Any) -> list[Any]:
    """Build the tab. Returns the events after which the studio may have a new model."""
    tasks = world_tasks()
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
                _backbones(state),
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
                [NO_FOCUS, AUTO, *({} if state.roles is None else attribute_heads(state.roles))],
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
            status = gr.HTML(status_html(trainer.status), elem_id="train-status")
            loss = gr.Plot(label="Loss", visible=False, **plot_look("train-loss"))
            accuracy = gr.Plot(label="Accuracy on test images", visible=False, **plot_look("train-accuracy"))

    def watch() -> Iterator[list[Any]]:
        seen = (-1, -1)
        while True:
            now = trainer.wait(0.7)
            size = (len(now.lines), len(now.accuracy))
            plots = [gr.skip(), gr.skip()] if size == seen else _plots(now)
            seen = size
            path = None
            if now.state == "finished":
                with suppress(RunError):  # somebody began the next training just now
                    path = str(trainer.download())
            yield [status_html(now), *plots, gr.update(interactive=path is not None, value=path)]
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

    quiet: dict[str, Any] = {"show_progress": "hidden"}
    # Watching only waits: everybody may do so at once, or the second visitor would see nothing until the end.
    waiting = {**quiet, "concurrency_limit": None}
    fields = [data, method, shots, epochs, seed, backbone, roles, roles_file, focus]
    watched = [status, loss, accuracy, download]
    began = start.click(begin, fields, None, api_name="train", **quiet)
    again = resume.click(errors_as_message(trainer.resume), None, None, **quiet)
    stop.click(end, None, None, queue=False, **quiet)
    events = [event.success(watch, None, watched, **waiting) for event in (began, again)]
    return [*events, page.load(watch, None, watched, **waiting)]


def world_tasks() -> list[str]:
    """The tasks of the attribute world."""
    return [name for name in list_datasets() if name.startswith("world:")]


def _backbones(state: StudioState) -> list[str]:
    """Backbones to choose from; visitors of other computers cannot make this one download any."""
    return list(dict.fromkeys([state.clip.name, *(list_backbones() if state.local else ["mini"])]))


def _plots(status: TrainingStatus) -> list[Any]:
    """Loss and accuracy as figures, shown once there is something to see."""
    curve = figures.training_curve(status.lines, status.steps) if status.lines else None
    points = [{"step": step, **dict(row)} for step, row in status.accuracy]
    reached = figures.accuracy_curve(points, status.steps) if points else None
    return [gr.update(value=figure, visible=figure is not None) for figure in (curve, reached)]
