"""The tabs Heads, Classify, Retrieve and Audit; each returns the components that change with the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from dear._io.image_file import open_image
from dear.heads.names import CORE
from dear.report import figures
from dear.studio import classify as asking
from dear.studio import heads as watching
from dear.studio import why as reasons
from dear.studio.audit import CHOICES, Auditor, answers_html, audit_html
from dear.studio.parts import Samples, Work, errors_as_output, gallery_look, plot_look, visitor_of
from dear.studio.search import ImageSearch
from dear.studio.state import StudioState, gallery_html

_CLICK = """
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-head]');
  if (!button) return;
  const pressed = element.querySelectorAll('button[aria-pressed=true]');
  pressed.forEach((other) => other.setAttribute('aria-pressed', 'false'));
  button.setAttribute('aria-pressed', 'true');
  trigger('select', {value: button.dataset.head, index: 0});
});
element.addEventListener('keydown', (event) => {
  const button = event.target.closest('button[data-head]');
  const step = {ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [1, 0], ArrowDown: [-1, 0]}[event.key];
  if (!button || !step) return;
  const [layer, head] = button.dataset.head.split('-').map(Number);
  const next = element.querySelector(`button[data-head="${layer + step[0]}-${head + step[1]}"]`);
  if (next) { next.focus(); event.preventDefault(); }
});
"""
_HINT = "<p>Choose images; the answers appear here.</p>"
_AUDIT_HINT = (
    "<p>Choose a concept; what goes with the labels, and what the model makes of it, appears here.</p>"
)


@dataclass(frozen=True)
class Refreshed:
    """Components of a tab that change when the studio takes another model, and their new values."""

    components: list[Any]
    values: Callable[[], list[Any]]


def heads_tab(state: StudioState) -> tuple[Callable[..., list[Any]], list[Any]]:
    """Build the tab Heads. Returns the function that fills the tab, and its outputs."""
    viewer, work = watching.Viewer(state), Work()
    chosen = gr.State("")
    gr.Markdown(
        "Each cell is one attention head. Choose one (mouse, or Tab and the arrow keys) to see what it does."
    )
    grid = gr.HTML("<p>Looking at the heads …</p>", js_on_load=_CLICK, elem_id="heads-map")
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            about = gr.HTML(elem_id="head-about", elem_classes=["dear-room"])
            work.button("heads")
        with gr.Column(scale=3, min_width=280):
            most = gr.HTML(elem_id="head-most")
            seen = gr.HTML(elem_id="head-attention")
            with gr.Accordion("Images that activate it least", open=False):
                least = gr.HTML(elem_id="head-least")
    with gr.Accordion("Where does it look in my image?", open=False), gr.Row():
        own = gr.File(label="An image", file_count="single", elem_id="look-file")
        looked = gr.HTML(elem_id="look-answer")

    def show(key_text: str, progress: Any, visitor: str) -> list[Any]:
        callback = work.callback(progress, visitor)
        roles = state.find_roles(callback)
        key = watching.parse_key(key_text, roles) if key_text else watching.first_key(roles)
        view = viewer.view(key, callback)
        return [f"{key[0]}-{key[1]}", watching.describe_html(view), *watching.galleries_html(view)]

    def begin(request: gr.Request, progress: gr.Progress = gr.Progress()) -> list[Any]:  # noqa: B008 (gradio's way)
        first = show("", progress, visitor_of(request))
        roles = state.find_roles()
        return [watching.map_html(roles, watching.parse_key(first[0], roles)), *first]

    def select(
        event: gr.SelectData,
        request: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        return show(str(event.value), progress, visitor_of(request))

    def look(path: str | None, key_text: str) -> list[Any]:
        if not path:
            return [""]
        roles = state.find_roles()
        key = watching.parse_key(key_text, roles) if key_text else watching.first_key(roles)
        name, image = asking.open_uploads([path])[0]
        return [gallery_html(f"Where head {key[0]}-{key[1]} looks", [(viewer.look(key, image), name)])]

    outputs = [chosen, about, most, seen, least]
    grid.select(
        errors_as_output(select, lambda problem: ["", problem, "", "", ""]),
        None,
        outputs,
        show_progress_on=[about],
    )
    gr.on(
        [own.change, chosen.change], errors_as_output(look, lambda problem: [problem]), [own, chosen], looked
    )
    return errors_as_output(begin, lambda problem: [problem, "", "", "", "", ""]), [grid, *outputs]


@dataclass(frozen=True)
class _ClassifyParts:
    """Components of the tab Classify: inputs, the button, and outputs."""

    files: Any
    camera: Any
    example: Any
    names: Any
    template: Any
    refuse: Any
    go: Any
    outputs: list[Any]  # cards of answers, shares of the attributes, which model answered, the images
    why: Any
    phrase: Any
    where: Any
    reason: Any


def _classify_layout(state: StudioState, samples: Samples, work: Work) -> _ClassifyParts:
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
                "\n".join(state.classes),
                label="Class names, one per line; any words will do",
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
            classified = gr.State([])
            with gr.Accordion("Why?", open=False, elem_id="classify-why-panel"):
                why = gr.Button("Why this answer for the first image?", elem_id="classify-why")
                with gr.Row():
                    phrase = gr.Textbox(
                        label="Where is …?", placeholder="wheels", max_lines=1, elem_id="classify-phrase"
                    )
                    where = gr.Button("Show where", elem_id="classify-where")
                reason = gr.HTML("", elem_id="classify-reason", elem_classes=["dear-room"])
    outputs = [cards, shares, source, classified]
    inputs = (files, camera, example, names, template, refuse, go)
    return _ClassifyParts(*inputs, outputs, why, phrase, where, reason)


def _classified(
    state: StudioState,
    images: list[tuple[str, Any]],
    complaints: list[str],
    text: str,
    prompt: str,
    percent: float,
    callback: Any,
) -> list[Any]:
    classes = asking.parse_classes(text)
    reject = percent / 100 if percent else None
    verdicts = asking.classify(state, images, classes, prompt, progress=callback, reject=reject)
    trusted, advice = asking.which_to_trust(state.find_model(), classes)
    rows = asking.share_rows(verdicts)
    figure = gr.update(value=figures.decision_shares(rows) if rows else None, visible=bool(rows))
    html = asking.verdicts_html(verdicts, trusted, advice, complaints)
    return [html, figure, f"Adapted model: {state.source}.", images[:1]]


def _why_panel(state: StudioState, parts: _ClassifyParts) -> None:
    """What the buttons of the panel Why do with the first image that was classified."""

    def why(images: list[tuple[str, Any]], text: str, prompt: str) -> list[Any]:
        return [reasons.why_html(state, images, asking.parse_classes(text), prompt)]

    def where(images: list[tuple[str, Any]], phrase: str) -> list[Any]:
        return [reasons.where_html(state, images, phrase)]

    last = parts.outputs[-1]
    parts.why.click(
        errors_as_output(why, lambda problem: [problem]),
        [last, parts.names, parts.template],
        [parts.reason],
        api_name="why",
    )
    gr.on(
        [parts.where.click, parts.phrase.submit],
        errors_as_output(where, lambda problem: [problem]),
        [last, parts.phrase],
        [parts.reason],
        api_name="where",
    )


def classify_tab(state: StudioState, samples: Samples, version: Any) -> Refreshed:
    """Build the tab Classify: any images and any class names."""
    work = Work()
    parts = _classify_layout(state, samples, work)

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
        found, complaints = asking.readable_uploads(paths or []) if paths or not shots else ([], [])
        callback = work.callback(progress, visitor_of(request))
        return _classified(state, [*found, *shots], complaints, text, prompt, percent, callback)

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
        return _classified(state, [(name, image)], [], text, prompt, percent, callback)

    def empty(problem: str) -> list[Any]:
        return [problem, gr.update(value=None, visible=False), "", []]

    outputs, shown = parts.outputs, {"show_progress_on": parts.outputs[:1]}
    options = [parts.names, parts.template, parts.refuse]
    parts.go.click(
        errors_as_output(run, empty),
        [parts.files, parts.camera, *options],
        outputs,
        api_name="classify",
        **shown,
    )
    parts.example.select(errors_as_output(pick, empty), [*options, version], outputs, **shown)
    _why_panel(state, parts)

    def values() -> list[Any]:
        return ["\n".join(state.classes), state.template, samples.shown(state.version), *empty(_HINT)]

    return Refreshed([parts.names, parts.template, parts.example, *outputs], values)


@dataclass(frozen=True)
class _RetrieveParts:
    """Components of the tab Retrieve: inputs, the button, and outputs."""

    attribute: Any
    query: Any
    example: Any
    folder: Any
    go: Any
    outputs: list[Any]  # the query, what was found


def _retrieve_layout(state: StudioState, samples: Samples, work: Work) -> _RetrieveParts:
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
            shown = gr.HTML(elem_id="retrieve-query")
            found = gr.HTML(
                "<p>Choose a query; similar images appear here.</p>",
                elem_id="retrieve-found",
                elem_classes=["dear-room"],
            )
    return _RetrieveParts(attribute, query, example, folder, go, [shown, found])


def retrieve_tab(state: StudioState, samples: Samples, version: Any) -> Refreshed:
    """Build the tab Retrieve: nearest images in one attribute."""
    search, work = ImageSearch(state), Work()
    parts = _retrieve_layout(state, samples, work)
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
        chosen = samples.at(seen)[number] if not path and number is not None else None
        image, name = chosen if chosen is not None else asking.open_uploads([path] if path else [])[0][::-1]
        alike = search.find(image, wanted, where, progress=work.callback(progress, visitor_of(request)))
        answers = [(one, f"{cosine:.3f} {label}") for one, label, cosine in alike]
        return [
            gallery_html("Query", [(image, name)]),
            gallery_html(f"Most similar in {wanted}, with the cosine", answers),
        ]

    def pick(event: gr.SelectData) -> list[Any]:
        return [event.index, None]  # the example counts now, not a file from before

    inputs = [parts.query, picked, parts.attribute, parts.folder, version]
    outputs, shown = parts.outputs, {"show_progress_on": parts.outputs[1:]}
    find = errors_as_output(run, lambda problem: ["", problem])
    parts.go.click(find, inputs, outputs, api_name="retrieve", **shown)
    chosen = parts.example.select(pick, None, [picked, parts.query], show_progress="hidden")
    chosen.then(find, inputs, outputs, **shown)
    parts.query.upload(lambda: None, None, picked, show_progress="hidden")

    def values() -> list[Any]:
        names = _attributes(state)
        return [gr.update(choices=names, value=names[0]), samples.shown(state.version), None, "", ""]

    return Refreshed([parts.attribute, parts.example, picked, *outputs], values)


def _attributes(state: StudioState) -> list[str]:
    return list(state.roles.core) if state.roles is not None else list(CORE)


def audit_tab(state: StudioState) -> Refreshed:
    """Build the tab: the evidence about one concept, and answers without it."""
    auditor, work, comparing = Auditor(state), Work(), Work()
    with gr.Row(elem_id="audit-grid"):  # on narrow screens the evidence comes before the own images
        with gr.Column(min_width=280):
            concept = gr.Dropdown(
                list(CHOICES),
                value="Location",
                allow_custom_value=True,
                label='Concept, or your own: "background: lab bench, outdoors"',
                elem_id="audit-concept",
            )
            data = gr.Textbox(
                label="Training images: a folder, a table or world:NAME; empty: the images of the studio",
                elem_id="audit-data",
            )
            with gr.Row():
                go = gr.Button("Audit", variant="primary", elem_id="audit-go")
                work.button("audit")
        with gr.Column(min_width=300, elem_id="audit-evidence"):
            found = gr.HTML(_AUDIT_HINT, elem_id="audit-found", elem_classes=["dear-room"])
        with gr.Column(min_width=280):
            files = gr.File(label="Your own images", file_count="multiple", elem_id="audit-files")
            without = gr.Checkbox(label="Answer them without the concept, too", elem_id="audit-without")
            own = gr.HTML(elem_id="audit-answers")

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
        opened = asking.open_uploads(paths)
        return [answers_html(name, auditor.answers(opened, name, where or "", callback, ticked), ticked)]

    audit = errors_as_output(run, lambda problem: [problem])
    go.click(audit, [concept, data], [found], show_progress_on=[found], api_name="audit")
    gr.on(
        [files.change, without.change, concept.change],
        errors_as_output(compare, lambda problem: [problem]),
        [files, without, concept, data],
        [own],
        show_progress_on=[own],
    )
    return Refreshed([found, own], lambda: [_AUDIT_HINT, ""])
