"""Cells made by hand."""

from dear.bench.cells import Cell
from dear.runs.spec import Spec


def make_cell(protocol, method, dataset, seed=1, shots=16, backbone="mini", identity="sha256:0", **changes):
    cell_fields = {name: changes.pop(name) for name in ("setting", "roles", "tested") if name in changes}
    spec = Spec().changed(
        method=method, data=dataset, seed=seed, shots=shots, backbone=backbone, identity=identity, **changes
    )
    return Cell(protocol=protocol, spec=spec, **cell_fields)
