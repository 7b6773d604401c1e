"""Adapt CLIP-like vision-language models head by head.

Every command of `dear` is a function here under the command's name; where a package has that name, it is
`bench.run`, `export_run`, `report_run`. Names are imported when they are first used, so that `dear --help`
does not wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dear import bench, heads
    from dear.classifier import Classifier
    from dear.clip.config import ClipConfig
    from dear.clip.factory import list_backbones
    from dear.clip.model import Clip
    from dear.data import list_datasets, open_data
    from dear.export.task import export_run
    from dear.heads.discover import discover_roles
    from dear.heads.role import Role
    from dear.heads.roles import RoleMap
    from dear.methods import DeAR, list_methods
    from dear.runs.model import Model
    from dear.tasks.adapt import adapt
    from dear.tasks.audit.task import audit
    from dear.tasks.choose.task import choose
    from dear.tasks.demo.task import demo
    from dear.tasks.drift import drift
    from dear.tasks.embed.task import embed
    from dear.tasks.evaluate import evaluate, zeroshot
    from dear.tasks.explain.task import explain
    from dear.tasks.extend import extend
    from dear.tasks.labeling.next import label_next
    from dear.tasks.load import load
    from dear.tasks.predict import predict
    from dear.tasks.repair import repair
    from dear.tasks.retrieve import retrieve
    from dear.tasks.run_report.task import report_run
    from dear.tasks.share.task import bundle, pull, push
    from dear.utils.progress import notebook_progress

__version__ = "0.2.0"

#: name -> module that defines it
_HOMES = {
    "Classifier": "dear.classifier",
    "Clip": "dear.clip.model",
    "ClipConfig": "dear.clip.config",
    "DeAR": "dear.methods",
    "Model": "dear.runs.model",
    "Role": "dear.heads.role",
    "RoleMap": "dear.heads.roles",
    "adapt": "dear.tasks.adapt",
    "audit": "dear.tasks.audit.task",
    "bundle": "dear.tasks.share.task",
    "choose": "dear.tasks.choose.task",
    "demo": "dear.tasks.demo.task",
    "discover_roles": "dear.heads.discover",
    "drift": "dear.tasks.drift",
    "embed": "dear.tasks.embed.task",
    "evaluate": "dear.tasks.evaluate",
    "explain": "dear.tasks.explain.task",
    "export_run": "dear.export.task",
    "extend": "dear.tasks.extend",
    "label_next": "dear.tasks.labeling.next",
    "list_backbones": "dear.clip.factory",
    "list_datasets": "dear.data",
    "list_methods": "dear.methods",
    "load": "dear.tasks.load",
    "notebook_progress": "dear.utils.progress",
    "open_data": "dear.data",
    "predict": "dear.tasks.predict",
    "pull": "dear.tasks.share.task",
    "push": "dear.tasks.share.task",
    "repair": "dear.tasks.repair",
    "report_run": "dear.tasks.run_report.task",
    "retrieve": "dear.tasks.retrieve",
    "zeroshot": "dear.tasks.evaluate",
}
_PACKAGES = ("bench", "heads")
#: names that users of other libraries try first -> what they are looking for
_ALTERNATIVES = {
    "from_pretrained": "dear.load(source)",
    "classify": "dear.predict(run, images), or dear.zeroshot(images, classes) without a run",
    "fit": "dear.adapt(data, method=...)",
    "finetune": "dear.adapt(data, method=...)",
    "load_model": "dear.load(run)",
    "load_dataset": "dear.open_data(path)",
    "encode_image": "dear.load(backbone).encode_image(images), or dear.embed(images)",
    "encode_text": "dear.load(backbone).encode_text(texts)",
    "export": "dear.export_run(run, ...)",
    "report": "dear.report_run(run)",
    "serve": "dear.serve.task.serve(runs), or the command dear serve RUNS_FOLDER",
    "studio": "the command dear studio RUN",
}

__all__ = [
    "Classifier",
    "Clip",
    "ClipConfig",
    "DeAR",
    "Model",
    "Role",
    "RoleMap",
    "adapt",
    "audit",
    "bench",
    "bundle",
    "choose",
    "demo",
    "discover_roles",
    "drift",
    "embed",
    "evaluate",
    "explain",
    "export_run",
    "extend",
    "heads",
    "label_next",
    "list_backbones",
    "list_datasets",
    "list_methods",
    "load",
    "notebook_progress",
    "open_data",
    "predict",
    "pull",
    "push",
    "repair",
    "report_run",
    "retrieve",
    "zeroshot",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"dear.{name}")
    remedy = f"; use {_ALTERNATIVES[name]}" if name in _ALTERNATIVES else ""
    raise AttributeError(f"module 'dear' has no attribute {name!r}{remedy}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
