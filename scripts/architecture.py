"""Writes the mermaid diagram of docs/architecture.md from the layers contract in pyproject.toml.

python scripts/architecture.py
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
_BLOCK = re.compile(r"```mermaid\n.*?```\n", re.DOTALL)


def diagram() -> str:
    """One box per package, one row per layer; arrows point to what a layer may import."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    rows = [[name.strip() for name in layer.split("|")] for layer in layers]
    lines = ["```mermaid", "flowchart TB"]
    lines += [f'  {name}["dear.{name}"]' for row in rows for name in row]
    for upper, lower in zip(rows, rows[1:], strict=False):
        lines += [f"  {name} --> {other}" for name in upper for other in lower]
    return "\n".join([*lines, "```", ""])


if __name__ == "__main__":
    PAGE.write_text(_BLOCK.sub(lambda _: diagram(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PAGE.name}: written")
