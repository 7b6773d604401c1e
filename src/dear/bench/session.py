"""The session that computes a cell: opens the data, trains, tests, and records how."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import torch

from dear.bench.cells import Cell, Data, Environment, Pool, draw_path
from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.data.unlabeled import REST, rest_of
from dear.errors import DearError, RoleError, RunError
from dear.heads.known_roles import known_roles, read_roles
from dear.heads.roles import RoleMap
from dear.heads.rules import derive_roles
from dear.runs.evaluation import Evaluation
from dear.runs.model import Model
from dear.runs.spec import roles_digest
from dear.train.fit import fit
from dear.train.setup.prepare import Job, prepare
from dear.utils.files import read_safetensors, write_safetensors


@lru_cache(maxsize=1)
def backbone(name: str, device: str) -> Clip:
    """The backbone, loaded once per process."""
    return load(name, device=device)


def starting_roles(clip: Clip, file: str | None) -> RoleMap | None:
    """The role map that a grid starts from: a file, "table2", or (None) the one known for the backbone."""
    return known_roles(clip) if file is None else read_roles(file)


class Session:
    """Computes one cell where its data and backbone are."""

    def __init__(self, cell: Cell, environment: Environment) -> None:
        self.cell, self.environment = cell, environment
        self.clip = backbone(environment.backbone, environment.device)
        if self.clip.identity != cell.spec.identity:
            raise RunError(
                f"{environment.backbone}: this is {self.clip.identity[:19]}…, but the cell was planned for "
                f"{cell.spec.identity[:19]}…; start the grid again with one backbone"
            )
        template = cell.setting.get("template")
        self.data = Data(cell.dataset, cell.setting, cell.seed, template, environment.data_root)
        self.record: dict[str, Any] = {}  #: facts about the cell in addition to its accuracies
        self.seconds = {"train": 0.0, "evaluate": 0.0}

    def open(self, split: str, dataset: str | None = None) -> ImageSet:
        """A split of the cell's dataset, or of another one."""
        return self.data.open(split, dataset)

    def draw(self, pool: Pool) -> ImageSet:
        """The images to train on, which are recorded."""
        cell, imported = self.cell, None
        if self.environment.draws is not None:
            imported = draw_path(self.environment.draws, cell.dataset, cell.shots, cell.seed)
        drawn = pool.draw(cell.shots, cell.seed, imported)
        lines = [
            json.dumps({"path": drawn.key(i), "label": y, "class": drawn.classes[y]}, ensure_ascii=False)
            for i, y in enumerate(drawn.labels.tolist())
        ]
        self.record["draw"] = {
            "images": len(drawn),
            "imported": imported is not None,
            "jsonl": "".join(line + "\n" for line in lines),
        }
        return drawn

    def roles(self) -> RoleMap | None:
        """The role map that the cell names, derived again and checked by its hash."""
        expected = self.cell.spec.roles_digest
        if expected is None:
            return None
        start = starting_roles(self.clip, self.environment.roles_file)
        if start is None:
            raise RoleError(
                f"the method {self.cell.spec.method!r} needs a role map of {self.clip.name}; "
                "compute one with discover_roles",
                hint="roles",
            )
        roles = derive_roles(start, self.cell.roles) if self.cell.roles else start
        if roles_digest(roles) != expected:
            raise RoleError("the role map was changed after the cell was planned; start the grid again")
        return roles

    def fit(self, pool: Pool, keep: bool = False) -> Model:
        """Train the cell's method on images of `pool`; its size and time are recorded.

        With `keep` the adapter is cached for other protocols, and one that they cached is used.
        """
        drawn, rest = self.draw(pool), None
        if self.cell.spec.unlabeled == REST:
            rest = rest_of(pool.draw(0, self.cell.seed), drawn)
        job = prepare(
            self.cell.spec, drawn, drawn=True, clip=self.clip, roles=self.roles(), unlabeled=rest
        )  # fmt: skip
        if job.pool is not None:
            self.record["unlabeled"] = job.pool.to_dict()
        self.record["epochs"] = job.recipe.epochs
        if job.focus is not None:
            self.record["focus"] = job.focus.role
        planned = self.cell.spec.data_digest
        if planned and planned != job.spec.data_digest:
            raise RunError(
                f"{self.cell.dataset}: its images changed after the cell was planned; start the grid again"
            )
        if keep and self._load_adapter(job):
            return self._record_size(Model(job.method))
        began = time.perf_counter()
        trained = fit(job)
        self.seconds["train"] += time.perf_counter() - began
        self.record["steps"] = trained.steps
        path = self._adapter_path(job)
        if keep and path is not None:
            facts = {"steps": str(trained.steps), "seconds": f"{self.seconds['train']:.3f}"}
            write_safetensors(path, job.method.adapter_state(), facts)
        return self._record_size(trained)

    def _adapter_path(self, job: Job) -> Path | None:
        """Where an adapter is cached for other protocols that train the same."""
        if self.environment.adapters is None:
            return None
        return Path(self.environment.adapters) / f"{self.cell.method}-{job.spec.key}.safetensors"

    def _load_adapter(self, job: Job) -> bool:
        """Load the adapter that another protocol trained, bit for bit; False where there is none."""
        path = self._adapter_path(job)
        if path is None or not path.exists():
            return False
        try:
            state, facts = read_safetensors(path, "adapter")
            job.method.load_adapter_state(state, str(path))
            self.record |= {"steps": int(facts["steps"]), "trained_before": True}
            self.seconds["train"] = float(facts["seconds"])
        except (DearError, KeyError, ValueError):  # damaged: train again and write it anew
            return False
        return True

    def _record_size(self, model: Model) -> Model:
        """Record the size of the method and the facts that it reports."""
        method = model.method
        state = {name: tensor.cpu().contiguous() for name, tensor in method.adapter_state().items()}
        self.record |= {
            "trainable_parameters": method.learned_parameters,
            "adapter_bytes": len(safetensors.torch.save(state)) if state else 0,
            "facts": method.learned_values(),
        }
        return model

    def test(self, model: Model, images: ImageSet) -> Evaluation | None:
        """Evaluate a model in every mode on a dataset, among exactly the dataset's own classes.

        None where the method cannot name classes that it was not trained on.
        """
        began = time.perf_counter()
        method = model.method
        if images.classes != method.classes or images.template != method.template:
            if not method.open_classes:
                return None
            method = method.with_classes(images.classes, images.template)
        precision = str(self.cell.spec.recipe.get("precision", "auto"))
        evaluation = Model(method, model.calibration, precision=precision).evaluate(images)
        self.seconds["evaluate"] += time.perf_counter() - began
        tested = self.record.setdefault("tested", {})
        tested[images.name] = tested.get(images.name, 0) + len(images)
        return evaluation

    def finish(self, modes: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
        """The whole result: accuracies by mode, then what was recorded, times and versions."""
        return {
            "modes": {mode: dict(values) for mode, values in modes.items()},
            **self.record,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "made_with": environment_facts(self.environment),
        }


def environment_facts(environment: Environment) -> dict[str, Any]:
    """Versions and machine: what a reader needs to judge a difference in the last digits."""
    from dear import __version__

    device = torch.device(environment.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "dear": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "hardware": name,
        "threads": environment.threads,
    }
