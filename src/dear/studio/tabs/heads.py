"""The tab Heads: the map of heads, and what one head does."""

from __future__ import annotations

from typing import Any

import gradio as gr

from dear.studio.classify import open_uploads
from dear.studio.heads import HeadViewer, describe_html, first_key, galleries_html, map_html, parse_key
from dear.studio.parts import EVERY_SELECTION, Context, TabUpdate, Work, errors_as_output, visitor_of
from dear.studio.state import gallery_html

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


_HINT = "<p>Finding what each head reacts to. This takes a minute or more the first time.</p>"


def heads_tab(context: Context, tab: Any) -> TabUpdate:
    """Build the tab. It is filled when it is opened, because roles may have to be discovered first."""
    state = context.state
    viewer, work = HeadViewer(state), Work()
    chosen = gr.State("")
    gr.Markdown(
        "Each cell is one attention head, named after its role. The number is its Concept Entropy in bits: "
        "low means one concept. Click a cell, or use the arrow keys, to see what the head does."
    )
    grid = gr.HTML(_HINT, js_on_load=_CLICK, elem_id="heads-map")
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            about = gr.HTML(elem_id="head-about", elem_classes=["dear-room"])
            work.button("heads")
        with gr.Column(scale=3, min_width=280):
            most = gr.HTML(elem_id="head-most")
            attention = gr.HTML(elem_id="head-attention")
            with gr.Accordion("Images that activate it least", open=False):
                least = gr.HTML(elem_id="head-least")
    with gr.Accordion("Where does this head look in my image?", open=False), gr.Row():
        upload = gr.File(label="Image", file_count="single", height=130, elem_id="look-file")
        answer = gr.HTML(elem_id="look-answer")

    def show(key_text: str, progress: Any, visitor: str) -> list[Any]:
        callback = work.callback(progress, visitor)
        roles = state.find_roles(callback)
        key = parse_key(key_text, roles) if key_text else first_key(roles)
        view = viewer.view(key, callback)
        return [f"{key[0]}-{key[1]}", describe_html(view), *galleries_html(view)]

    def fill(
        key_text: str,
        request: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        if key_text:  # the heads of this model are shown already
            return [gr.skip()] * 6
        first = show("", progress, visitor_of(request))
        roles = state.find_roles()
        return [map_html(roles, parse_key(first[0], roles)), *first]

    def select(
        event: gr.SelectData,
        request: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        return show(str(event.value), progress, visitor_of(request))

    def locate(path: str | None, key_text: str) -> list[Any]:
        if not path:
            return [""]
        roles = state.find_roles()
        key = parse_key(key_text, roles) if key_text else first_key(roles)
        name, image = open_uploads([path])[0]
        return [gallery_html(f"Where head {key[0]}-{key[1]} looks", [(viewer.attention(key, image), name)])]

    outputs = [chosen, about, most, attention, least]
    grid.select(
        errors_as_output(select, lambda problem: ["", problem, "", "", ""]),
        None,
        outputs,
        show_progress_on=[about],
        trigger_mode=EVERY_SELECTION,
    )
    gr.on([upload.change, chosen.change], errors_as_output(locate), [upload, chosen], answer)
    filled = tab.select(
        errors_as_output(fill, lambda problem: [problem, "", "", "", "", ""]),
        chosen,
        [grid, *outputs],
        show_progress_on=[grid],
        api_name="heads",
    )
    return TabUpdate([grid, *outputs], lambda: [_HINT, "", "", "", "", ""], (filled,))
