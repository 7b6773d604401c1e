"""The studio's tabs: components and events; what they do stands in the modules beside this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from html import escape
from typing import Any

import gradio as gr

from dear._io.image_file import open_image
from dear.data import list_datasets
from dear.errors import RunError
from dear.methods import list_methods
from dear.report import figures
from dear.studio import classify as asking
from dear.studio import compare as comparing
from dear.studio import heads as watching
from dear.studio.desk import Desk
from dear.studio.parts import Work, gallery_look, plot_look, samples_of, shown, spoken
from dear.studio.search import Search, captions
from dear.studio.training import Plan, Trainer, Watched

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


def heads_tab(desk: Desk, page: Any) -> None:
    """The map; click a head to see what it does."""
    viewer, work = watching.Viewer(desk), Work()
    chosen = gr.State("")
    gr.Markdown(
        "Each cell is one attention head. Choose one (mouse, or Tab and the arrow keys) to see what it does."
    )
    grid = gr.HTML("<p>Looking at the heads …</p>", js_on_load=_CLICK, elem_id="heads-map")
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            about = gr.HTML(elem_id="head-about")
            work.button("heads")
        with gr.Column(scale=3, min_width=280):
            most = gr.Gallery(label="Images that excite it most", **gallery_look(6, "head-most"))
            seen = gr.Gallery(label="Where it looks in them", **gallery_look(6, "head-gaze"))
            with gr.Accordion("Images that excite it least", open=False):
                least = gr.Gallery(label="Least", **gallery_look(6, "head-least"))
    with gr.Accordion("Where does it look in my image?", open=False), gr.Row():
        own = gr.File(label="An image", file_count="single", elem_id="look-file")
        looked = gr.Image(label="Where the chosen head looks", interactive=False, buttons=[])

    @spoken
    def show(key_text: str, progress: Any) -> list[Any]:
        tell = work.tell(progress)
        roles = desk.find_roles(tell)
        key = watching.parse_key(key_text, roles) if key_text else watching.first_key(roles)
        view = viewer.view(key, tell)
        name = f"{key[0]}-{key[1]}"
        galleries = [[shown(desk, one) for one in part] for part in (view.most, view.most_seen, view.least)]
        return [name, watching.describe_html(view), *galleries]

    def begin(progress: gr.Progress = gr.Progress()) -> list[Any]:  # noqa: B008 (gradio's way)
        first = show("", progress)
        roles = desk.find_roles()
        return [watching.map_html(roles, watching.parse_key(first[0], roles)), *first]

    def select(event: gr.SelectData, progress: gr.Progress = gr.Progress()) -> list[Any]:  # noqa: B008
        return show(str(event.value), progress)

    @spoken
    def look(path: str | None, key_text: str) -> Any:
        if not path:
            return None
        roles = desk.find_roles()
        key = watching.parse_key(key_text, roles) if key_text else watching.first_key(roles)
        return shown(desk, viewer.look(key, asking.open_uploads([path])[0][1]))

    outputs = [chosen, about, most, seen, least]
    grid.select(select, None, outputs, show_progress_on=[about])
    gr.on([own.change, chosen.change], look, [own, chosen], looked)
    page.load(begin, None, [grid, *outputs], show_progress_on=[about])


def classify_tab(desk: Desk) -> None:
    """Any images and any class names."""
    work = Work()
    samples = samples_of(desk)
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            files = gr.File(label="Drop images here", file_count="multiple", elem_id="classify-files")
            with gr.Accordion("Camera", open=False):
                camera = gr.Image(label="Camera", sources=["webcam"], type="pil", elem_id="classify-camera")
            example = gr.Gallery(
                samples,
                label="… or click an example",
                allow_preview=False,
                **gallery_look(6, "classify-examples"),
            )
            names = gr.Textbox(
                "\n".join(desk.classes),
                label="Class names, one a line; any words will do",
                lines=6,
                max_lines=14,
                elem_id="classify-names",
            )
            template = gr.Textbox(desk.template, label="Prompt around a name", elem_id="classify-template")
            with gr.Row():
                go = gr.Button("Classify", variant="primary", elem_id="classify-go")
                work.button("classify")
        with gr.Column(scale=3, min_width=300):
            cards = gr.HTML("<p>Choose images; the answers appear here.</p>", elem_id="classify-answers")
            shares = gr.Plot(
                label="What each attribute added to the decision",
                visible=False,
                **plot_look("classify-shares"),
            )
            source = gr.Markdown(elem_id="classify-source")

    @spoken
    def ask(images: list[tuple[str, Any]], text: str, prompt: str, progress: Any) -> list[Any]:
        verdicts = asking.classify(desk, images, asking.parse_classes(text), prompt, tell=work.tell(progress))
        rows = asking.share_rows(verdicts)
        figure = gr.update(value=figures.decision_shares(rows) if rows else None, visible=bool(rows))
        return [asking.verdicts_html(verdicts), figure, f"Adapted model: {desk.source}."]

    @spoken
    def run(
        paths: list[str] | None,
        photo: Any,
        text: str,
        prompt: str,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        shots = [] if photo is None else [("camera", open_image(photo))]
        found = asking.open_uploads(paths or []) if paths or not shots else []
        return ask([*found, *shots], text, prompt, progress)

    def pick(
        event: gr.SelectData,
        text: str,
        prompt: str,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        image, name = samples[event.index]
        return ask([(name, image)], text, prompt, progress)

    outputs = [cards, shares, source]
    go.click(run, [files, camera, names, template], outputs, show_progress_on=[cards])
    example.select(pick, [names, template], outputs, show_progress_on=[cards])


def retrieve_tab(desk: Desk) -> None:
    """Nearest images in one attribute."""
    search, work = Search(desk), Work()
    samples = samples_of(desk)
    attributes = list(desk.roles.core) if desk.roles is not None else ["Color", "Shape", "Texture", "Object"]
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            attribute = gr.Radio(
                attributes, value=attributes[0], label="Find images alike in", elem_id="retrieve-attribute"
            )
            query = gr.File(label="A query image", file_count="single", elem_id="retrieve-file")
            example = gr.Gallery(
                samples,
                label="… or click an example",
                allow_preview=False,
                **gallery_look(6, "retrieve-examples"),
            )
            folder = gr.Textbox(
                label="Folder of images on this computer; empty: the images on the desk",
                visible=desk.local,
                elem_id="retrieve-folder",
            )
            with gr.Row():
                go = gr.Button("Find", variant="primary", elem_id="retrieve-go")
                work.button("retrieve")
        with gr.Column(scale=3, min_width=300):
            asked = gr.Image(
                label="Query", interactive=False, height=150, buttons=[], elem_id="retrieve-query"
            )
            found = gr.Gallery(label="Most alike, with the cosine", **gallery_look(4, "retrieve-found"))
    picked = gr.State(None)

    @spoken
    def run(
        path: str | None,
        number: int | None,
        wanted: str,
        where: str,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        chosen = samples[number][0] if not path and number is not None else None
        image = chosen if chosen is not None else asking.open_uploads([path] if path else [])[0][1]
        alike = captions(search.find(image, wanted, where, tell=work.tell(progress)))
        return [shown(desk, image), [(shown(desk, one), words) for one, words in alike]]

    def pick(event: gr.SelectData) -> list[Any]:
        return [event.index, None]  # the example counts now, not a file from before

    inputs, outputs = [query, picked, attribute, folder], [asked, found]
    go.click(run, inputs, outputs, show_progress_on=[found])
    example.select(pick, None, [picked, query], show_progress="hidden").then(
        run, inputs, outputs, show_progress_on=[found]
    )
    query.upload(lambda: None, None, picked, show_progress="hidden")


def train_tab(desk: Desk, trainer: Trainer, page: Any) -> None:
    """Train on a folder, watch, stop, resume, download."""
    tasks = [name for name in list_datasets() if name.startswith("world:")]
    where = "a task of the attribute world, or a folder on this computer" if desk.local else "a task"
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
            shots = gr.Slider(0, 64, 16, step=1, label="Images a class (0: all)", elem_id="train-shots")
            epochs = gr.Slider(1, 50, 10, step=1, label="Epochs", elem_id="train-epochs")
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

    @spoken
    def begin(spec: str, name: str, count: int, rounds: int, number: int) -> None:
        trainer.start(Plan(str(spec or ""), name, int(count), int(rounds), int(number or 0)))

    resumed = spoken(trainer.resume)
    parts = [status, loss, accuracy, download]
    quiet: dict[str, Any] = {"show_progress": "hidden"}
    # Watching only waits: everybody may do so at once, or the second visitor would see nothing until the end.
    waiting = {**quiet, "concurrency_limit": None}
    start.click(begin, [data, method, shots, epochs, seed], None, **quiet).success(
        watch, None, parts, **waiting
    )
    resume.click(resumed, None, None, **quiet).success(watch, None, parts, **waiting)
    stop.click(lambda: trainer.stop(0), None, None, queue=False, **quiet)
    page.load(watch, None, parts, **waiting)


def training_plots(watched: Watched) -> list[Any]:
    """Loss and accuracy as figures, shown once there is something to see."""
    curve = figures.training_curve(watched.lines, watched.steps) if watched.lines else None
    points = [{"step": step, **dict(row)} for step, row in watched.accuracy]
    reached = figures.accuracy_curve(points, watched.steps) if points else None
    return [gr.update(value=figure, visible=figure is not None) for figure in (curve, reached)]


def status_html(watched: Watched) -> str:
    """Where training stands, for eyes and for screen readers."""
    bar = f'<progress max="{watched.steps or 1}" value="{watched.step}"></progress>' if watched.busy else ""
    kind = "dear-status dear-failed" if watched.state == "failed" else "dear-status"
    return (
        f'<div class="{kind}" role="status" aria-live="polite" data-state="{watched.state}">{bar}'
        f"<p>{escape(watched.message)}</p></div>"
    )


def compare_tab(desk: Desk) -> None:
    """Result files as tables and plots."""
    with gr.Row():
        files = gr.File(
            label="Result files (.json) of dear bench", file_count="multiple", elem_id="compare-files"
        )
        folder = gr.Textbox(
            label="… or the folder of a grid on this computer", visible=desk.local, elem_id="compare-folder"
        )
    go = gr.Button("Compare", variant="primary", elem_id="compare-go")
    protocol = gr.Radio([], label="Protocol", visible=False, elem_id="compare-protocol")
    table = gr.HTML("<p>Tables and plots appear here.</p>", elem_id="compare-table")
    plots = [gr.Plot(visible=False, **plot_look(f"compare-plot-{number}")) for number in range(3)]
    kept = gr.State({})

    def page(shown: dict[str, comparing.Shown], name: str) -> list[Any]:
        one = shown[name]
        filled = [gr.update(value=figure, label=head, visible=True) for head, figure in one.figures[:3]]
        return [one.table, *filled, *[gr.update(visible=False)] * (3 - len(filled))]

    @spoken
    def run(uploads: list[str] | None, where: str) -> list[Any]:
        shown = comparing.compare(comparing.result_files(desk, uploads or [], where))
        names = list(shown)
        return [
            shown,
            gr.update(choices=names, value=names[0], visible=len(names) > 1),
            *page(shown, names[0]),
        ]

    go.click(run, [files, folder], [kept, protocol, table, *plots], show_progress_on=[table])
    protocol.input(page, [kept, protocol], [table, *plots], show_progress="hidden")
