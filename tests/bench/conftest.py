"""A tiny backbone on disk, and images whose color tells the class, in a table with splits and domains."""

import csv

import pytest
import torch
from PIL import Image

from dear.clip import Clip, ClipConfig, TextConfig, VisionConfig
from dear.clip.checkpoint import save_hf
from dear.heads.names import CORE
from dear.heads.role import Role
from dear.heads.roles import RoleMap

COLORS = {
    "red": (200, 30, 30),
    "green": (30, 200, 30),
    "blue": (30, 30, 200),
    "yellow": (200, 200, 30),
    "grey": (120, 120, 120),
}
DOMAINS = ("day", "dusk", "night")


@pytest.fixture(scope="session")
def backbone(tmp_path_factory):
    """Folder of a random CLIP of 6 layers, which `dear.load` can read in any process."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    shape = ClipConfig(
        VisionConfig(width=24, layers=6, heads=4, image_size=24, patch_size=8),
        TextConfig(width=16, layers=6, heads=2),
        embed_dim=12,
    )
    clip = Clip(shape, name="tiny")
    torch.set_rng_state(state)
    folder = tmp_path_factory.mktemp("backbone") / "tiny"
    save_hf(clip, folder)
    return str(folder)


@pytest.fixture(scope="session")
def table(tmp_path_factory):
    """A CSV table: 5 classes x 3 domains, 8 training and 4 test images each."""
    folder = tmp_path_factory.mktemp("colors")
    generator = torch.Generator().manual_seed(5)
    rows = []
    for split, each in (("train", 8), ("test", 4)):
        for domain, light in zip(DOMAINS, (1.0, 0.8, 0.6), strict=True):
            for name, color in COLORS.items():
                for number in range(each):
                    path = f"{split}-{domain}-{name}-{number}.png"
                    base = torch.tensor(color).mul(light).view(3, 1, 1)
                    noise = torch.randn(3, 30, 26, generator=generator) * 40
                    pixels = (base + noise).clamp(0, 255).to(torch.uint8)
                    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / path)
                    rows.append({"path": path, "label": name, "split": split, "domain": domain})
    with open(folder / "colors.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["path", "label", "split", "domain"])
        writer.writeheader()
        writer.writerows(rows)
    return str(folder / "colors.csv")


@pytest.fixture(scope="session")
def roles_file(tmp_path_factory):
    """Roles for layers 4 to 6 of four heads, with measured shares to apply rules to."""
    kinds = ["core", "generalization", "mixed", "other"] * 3
    table = {}
    for place, (layer, head) in enumerate((a, b) for a in (4, 5, 6) for b in range(4)):
        kind = kinds[place]
        leading = CORE[place % 5] if kind != "other" else "Animal"
        share = 0.3 + 0.05 * place
        shares = {leading: share, "Style": 1 - share}
        concept = leading if kind in ("core", "other") else None
        table[layer, head] = Role(kind, concept, 0.9, shares, ("a", "b"))
    path = tmp_path_factory.mktemp("roles") / "roles.json"
    RoleMap(table, 4, rule="dominant", parameters={"tau": 0.35}).save(path)
    return str(path)
