"""The tab Classify: images, the answers next to them, and why."""

from __future__ import annotations

from typing import Any

import gradio as gr

from dear.images.open import open_image
from dear.runs.class_lists import format_class_list
from dear.studio import classify
from dear.studio.parts import EVERY_SELECTION, LATEST, Context, TabUpdate, errors_as_output, gallery_options
from dear.studio.state import StudioState

_HINT = "<p>Drop an image or click an example: the answer appears here.</p>"


def classify_tab(context: Context, tab: Any) -> TabUpdate:
    """Build the tab."""
    state, samples = context.state, context.samples
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            files = gr.File(label="Images", file_count="multiple", height=130, elem_id="classify-files")
            go = gr.Button("Classify", variant="primary", elem_id="classify-go")
            example = gr.Gallery(
                samples.files(state.version),
                label="Examples",
                allow_preview=False,
                **gallery_options(8, "classify-examples"),
            )
            with gr.Accordion("Options", open=False, elem_id="classify-options"):
                names = gr.Textbox(elem_id="classify-names", lines=6, max_lines=14, **_names(state))
                template = gr.Textbox(elem_id="classify-template", **_template(state))
                refuse = gr.Slider(0, 50, step=1, elem_id="classify-reject", **_reject(state))
                camera = gr.Image(label="Camera", sources=["webcam"], type="pil", elem_id="classify-camera")
        with gr.Column(scale=3, min_width=300):
            cards = gr.HTML(_HINT, elem_id="classify-answers", elem_classes=["dear-room"])
            first = gr.State([])  # the first image that was classified, for the panel
            with gr.Accordion("Why this answer?", open=False, elem_id="classify-why-panel"):
                why = gr.Button("Explain the first image", elem_id="classify-why")
                with gr.Row():
                    phrase = gr.Textbox(
                        label="Where is …?", placeholder="wheels", max_lines=1, elem_id="classify-phrase"
                    )
                    where = gr.Button("Show where", elem_id="classify-where")
                reason = gr.HTML("", elem_id="classify-reason", elem_classes=["dear-room"])

    def answer(
        images: list[classify.Named], complaints: list[str], text: str, prompt: str, percent: float
    ) -> list[Any]:
        classes = classify.parse_classes(text, state.model.classes)
        share = percent / 100 if percent else None
        reject = share if classify.can_reject(state.model, classes) else None
        verdicts = classify.classify(state, images, classes, prompt, reject=reject)
        sentences = classify.notices(state.model, classes, share)
        return [classify.verdicts_html(verdicts, sentences, complaints), images[:1], ""]

    def run(paths: list[str] | None, photo: Any, text: str, prompt: str, percent: float) -> list[Any]:
        photos = [] if photo is None else [("camera", open_image(photo))]
        images, complaints = classify.readable_uploads(paths or []) if paths or not photos else ([], [])
        return answer([*images, *photos], complaints, text, prompt, percent)

    def pick(event: gr.SelectData, text: str, prompt: str, percent: float, version: int) -> list[Any]:
        image, name = samples.images(version)[event.index]
        return [*answer([(name, image)], [], text, prompt, percent), None]  # the example replaces files

    def explain(images: list[classify.Named], text: str, prompt: str) -> list[Any]:
        classes = classify.parse_classes(text, state.model.classes)
        return [classify.why_html(state, images, classes, prompt)]

    def locate(images: list[classify.Named], words: str) -> list[Any]:
        return [classify.where_html(state, images, words)]

    def empty(problem: str) -> list[Any]:
        return [problem, [], ""]

    def values() -> list[Any]:
        updates = [gr.update(**_names(state)), gr.update(**_template(state)), gr.update(**_reject(state))]
        return [*updates, samples.files(state.version), *empty(_HINT)]

    outputs, options = [cards, first, reason], [names, template, refuse]
    # One queue, so that the answer to the last action is shown last.
    shown: dict[str, Any] = {"show_progress_on": [cards], "concurrency_id": "classify"}
    classified = errors_as_output(run, empty)
    gr.on(
        [go.click, files.upload],
        classified,
        [files, camera, *options],
        outputs,
        api_name="classify",
        trigger_mode=LATEST,
        **shown,
    )
    picked = errors_as_output(pick, lambda problem: [*empty(problem), None])
    example.select(
        picked, [*options, context.version], [*outputs, files], trigger_mode=EVERY_SELECTION, **shown
    )
    explained: dict[str, Any] = {"trigger_mode": LATEST, "concurrency_id": "explain"}
    why.click(errors_as_output(explain), [first, names, template], [reason], api_name="why", **explained)
    located = errors_as_output(locate)
    gr.on([where.click, phrase.submit], located, [first, phrase], [reason], api_name="where", **explained)
    return TabUpdate([*options, example, *outputs], values)


def _names(state: StudioState) -> dict[str, Any]:
    """The class names; those of a method that learns its classes cannot be edited."""
    free = state.model.method.open_classes
    label = "Class names, one per line; +name adds one" if free else "Classes that the model learned"
    return {"value": format_class_list(state.model.classes, "\n"), "label": label, "interactive": free}


def _template(state: StudioState) -> dict[str, Any]:
    """The prompt around a name, where class names can be edited."""
    free = state.model.method.open_classes
    return {"value": state.model.template, "label": "Prompt around a name", "visible": free}


def _reject(state: StudioState) -> dict[str, Any]:
    """The share of images that may be rejected, where the model can reject any."""
    return {
        "value": round(100 * classify.REJECT),
        "label": "“None of these”: percent of images of trained classes that may be rejected (0: off)",
        "visible": state.model.calibration is not None and not state.model.method.several,
    }
