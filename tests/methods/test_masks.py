"""Role masks against the sentences that define them."""

from __future__ import annotations

import pytest
import torch
from tiny import mixed_roles

from dear.errors import RoleError, UsageError
from dear.heads.names import CORE
from dear.heads.roles import RoleMap
from dear.methods.role_masks import draw_mask, layer_mask


@pytest.mark.parametrize("isolation", ["bidirectional", "readonly"])
@pytest.mark.parametrize("attributes", [CORE, ("Texture",), ("Smell", "Shape")])
def test_who_reads_whom(isolation: str, attributes: tuple[str, ...]) -> None:
    roles = RoleMap.table2()
    for layer in range(9, 13):
        mask = layer_mask(roles, layer, attributes, isolation)
        full = mask.additive(4, torch.device("cpu"), torch.float64)
        assert torch.isfinite(full).any(dim=-1).all()  # no row is empty
        for head in range(12):
            role, see = roles[layer, head], torch.isfinite(full[head])
            assert see[:4, :4].all()
            apart = role.kind in ("generalization", "other") or (
                role.kind == "core" and role.concept not in attributes
            )
            if role.kind == "mixed":
                assert see.all()
            elif apart:
                assert not see[:4, 4:].any()
                assert see[4:, :4].all() == (isolation == "readonly")
                assert see[4:, :4].any() == (isolation == "readonly")
                assert see[4:, 4:].all()
            else:
                visible = [name == role.concept for name in attributes]
                assert all(row.tolist() == visible for row in see[:, 4:])
                assert see[:, :4].all()


def test_the_image_shows_every_cell() -> None:
    roles = mixed_roles(range(5, 6), heads=4)
    mask = layer_mask(roles, 5)
    lines = draw_mask(mask).splitlines()
    assert len(lines) == 4 * (2 + 6)
    assert [line for line in lines if line.startswith("head")] == [f"head {i}" for i in range(4)]
    assert "".join(lines).count("#") == int(mask.visible.sum())
    assert lines[1].split() == ["or", "Co", "Sh", "Te", "Ob", "Lo"]


def test_errors_name_the_thing() -> None:
    with pytest.raises(RoleError, match="layer 3"):
        layer_mask(RoleMap.table2(), 3)
    with pytest.raises(UsageError, match=r"isolation .*'both'"):
        layer_mask(RoleMap.table2(), 9, isolation="both")
