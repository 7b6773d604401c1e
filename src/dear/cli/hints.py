"""Error messages of the command line: which option or command is the remedy for an error of the library."""

from __future__ import annotations

import re
from collections.abc import Collection

from dear.errors import DearError

HINTS: dict[str, str] = {
    "adapt": "`dear adapt --out FOLDER` writes a run folder",
    "adapt-resume": "continue it with `dear adapt --resume` and the options it was started with",
    "allow-other-roles": "`dear roles discover` writes a map, --allow-other-roles uses this one",
    "backbone": "name it with --backbone",
    "backbones": "`dear backbones` prints them",
    "batch": "set a smaller one with --batch",
    "calibrate": "`dear adapt` calibrates unless --no-calibrate is given",
    "choose-adapt": "add --adapt, or remove --out",
    "cluster": "without it, --engine local computes in this process",
    "data-check": "`dear data check NAME --data-root FOLDER` says what must lie where",
    "data-root": "name it with --data-root",
    "datasets": "use --datasets",
    "device": "--device cpu uses the computer's own memory",
    "discover": "`dear roles discover` writes one",
    "encoder-only": "leave out --encoder-only",
    "engine": "choose it with --engine ray",
    "evaluate": "`dear evaluate` accepts new classes",
    "export": "`dear export RUN --onnx FILE` writes one",
    "parquet": "`dear predict RUN FOLDER --csv FILE` writes a table without it",
    "port": "choose it with --port",
    "recipe": "for instance --recipe lr=1e-4 or --recipe precision=float32",
    "report-data": "name them with --data",
    "resume": "continue with --resume",
    "roles": "`dear roles discover` writes one; give it with --roles",
    "role-images": "name them with --images, or add --from weights",
    "rule": "--rule table2 takes the paper's map",
    "targets": "datasets to test on are named with --targets",
    "unreadable": "--unreadable skip leaves them out",
}
"""The remedy for each hint key that the library's errors carry."""


def error_message(error: DearError, options: Collection[str] | None = None) -> str:
    """An error as the command line prints it: its own sentence, then the option that helps.

    The hint of the error itself counts, else that of the error which caused it. A remedy by an option that is
    not among the `options` of the command is left out.

    >>> error_message(DearError("run: holds a run that was not completed", hint="resume"))
    'run: holds a run that was not completed; continue with --resume'
    """
    text = str(error)
    cause: BaseException | None = error
    while cause is not None:
        remedy = HINTS.get(getattr(cause, "hint", None) or "")
        if remedy is not None:
            named = re.findall(r"--[a-z-]+", re.sub("`.*?`", "", remedy))
            fits = options is None or set(named) <= set(options)
            return f"{text}; {remedy}" if fits else text
        cause = cause.__cause__
    return text
