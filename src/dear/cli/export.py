"""`dear export`: an adapted model as one ONNX file, or folded into a plain CLIP."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from dear.cli.options import Classes, ClassesFile, Json, OwnBackbone, Run, Threads, read_class_list
from dear.cli.printing import print_json, say
from dear.errors import UsageError


def export(
    run: Run,
    onnx: Annotated[str | None, Option(help="The ONNX file to write.")] = None,
    merged: Annotated[
        str | None,
        Option(help="The folder to write a plain CLIP to (purify, clip-lora, zeroshot --without)."),
    ] = None,
    encoder_only: Annotated[
        bool, Option("--encoder-only", help="The adapted image encoder alone: features, not scores.")
    ] = False,
    classes: Classes = None,
    classes_file: ClassesFile = None,
    backbone: OwnBackbone = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write an adapted model as one ONNX file, or folded into a plain CLIP.

    The ONNX file takes an image and gives class scores: tokens, masks, projections, fusion and class weights
    are inside; its metadata hold classes and preprocessing. It is compared with PyTorch before it is written.

    A plain CLIP has the frozen model's size and cost, and is a backbone like any other.

    Example: `dear export run --onnx model.onnx`, then `dear predict --onnx model.onnx photo.jpg`

    Example: `dear export run --merged folder`, then `dear zeroshot --backbone folder --data photos`
    """
    from dear.runs.class_lists import resolve_classes
    from dear.runs.model import Model

    if (onnx is None) == (merged is None):
        raise UsageError("say what to write: --onnx FILE or --merged FOLDER")
    names = read_class_list(classes, classes_file)
    model = Model.load(run, backbone)
    if merged is not None:
        from dear.clip.checkpoint import save_hf

        if classes is not None or classes_file is not None or encoder_only:
            raise UsageError(
                "a plain CLIP has no classes: leave out --classes, --classes-file and --encoder-only"
            )
        plain = model.method.merge()
        save_hf(plain, merged)
        count = sum(p.numel() for p in plain.parameters())
        facts = {"path": merged, "numbers": count, "template": model.template}
        words = f"{merged}: a plain CLIP of {count:,} parameters, as many as the frozen one; prompts are "
        words += f'"{model.template}"'
    else:
        from dear.export.onnx import export_onnx

        if names is not None:
            model = model.with_classes(resolve_classes(names, model.classes))
        written = export_onnx(model, str(onnx), encoder_only=encoder_only)
        facts = {
            "path": str(written.path),
            "outputs": list(written.outputs),
            "bytes": written.size,
            "difference": written.difference,
        }
        words = f"{written.path}: {written.size / 1e6:.1f} MB, input pixels, outputs "
        words += f"{', '.join(written.outputs)}; largest difference from PyTorch {written.difference:.1g}"
    if as_json:
        print_json(facts)
        return
    say(words)
    if merged is None and model.reference is not None and not encoder_only:
        say("notice: the file never answers “none of these”; for `dear predict --reject` use the run folder")
