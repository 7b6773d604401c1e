"""Role maps made from a given one by name: what ablations change about the roles."""

from __future__ import annotations

from dataclasses import replace

from dear.errors import UsageError
from dear.heads.names import CONCEPTS, GENERAL
from dear.heads.roles import Role, RoleMap
from dear.heads.rules import rerule
from dear.train.config import roles_digest

KINDS = ("uniform", "shuffled", "quantile", "dominant", "concepts", "from")


def derive(roles: RoleMap, spec: str) -> RoleMap:
    """The map that `spec` makes of `roles`: changes joined by "+", each applied to the one before.

    Args:
        roles: the map to start from.
        spec: "" (as it is), "uniform:mixed", "uniform:generalization", "shuffled:SEED", "quantile:Q",
            "dominant:TAU", "concepts:K" (K core concepts), "from:LAYER" (covers layers from LAYER on;
            heads that were never measured are mixed).

    Raises:
        UsageError: the spec is none of these.
        RoleError: the map holds no measured shares to apply a rule to.

    >>> derive(RoleMap.table2(), "concepts:3").core
    ('Location', 'Object', 'Texture')
    >>> derive(RoleMap.table2(), "from:8+uniform:mixed").counts()["mixed"]
    60
    """
    for part in filter(None, spec.split("+")):
        roles = _apply(roles, part)
    return roles


def mark(roles: RoleMap) -> str:
    """Hash of what a method sees of a map: the kind of each head and, of core heads, the concept.

    >>> table2 = RoleMap.table2()
    >>> mark(derive(table2, "concepts:5")) == mark(table2) != mark(derive(table2, "concepts:3"))
    True
    """
    return roles_digest(roles)


def _apply(roles: RoleMap, part: str) -> RoleMap:
    name, _, value = part.partition(":")
    try:
        if name == "uniform":
            made = RoleMap.uniform(value, roles.layers, roles.heads, roles.core)
            return replace(made, backbone=roles.backbone, fingerprint=roles.fingerprint, depth=roles.depth)
        if name == "shuffled":
            return roles.shuffled(int(value))
        if name in ("quantile", "dominant"):
            return rerule(roles, name, float(value))
        if name == "concepts":
            return with_concepts(roles, int(value))
        if name == "from":
            return from_layer(roles, int(value))
    except ValueError:
        raise UsageError(f"roles {part!r}: {value!r} is not a number") from None
    raise UsageError(f"roles {part!r}: choose from {', '.join(kind + ':…' for kind in KINDS)}")


def with_concepts(roles: RoleMap, count: int) -> RoleMap:
    """The map with `count` core concepts instead of its own.

    Fewer: those of the core concepts that lead the most heads. More: the core ones and those of the other
    concepts (never Style) that lead the most heads. Specialized heads whose concept is core are core heads,
    the others are isolated; generalization and mixed heads stay.

    Raises:
        UsageError: there are not that many concepts.
    """
    most = len(CONCEPTS) - 1
    if not 1 <= count <= most:
        raise UsageError(f"concepts:{count}: between 1 and {most} concepts can be core")
    specialized = [role.concept for _, role in roles if role.kind in ("core", "other")]
    if count == len(roles.core):
        return roles
    order = {concept: place for place, concept in enumerate(CONCEPTS)}

    def rank(concept: str) -> tuple[int, int]:
        return -specialized.count(concept), order.get(concept, len(order))

    own = sorted(roles.core, key=rank)
    others = sorted((c for c in CONCEPTS if c not in roles.core and c != GENERAL), key=rank)
    chosen = (own + others)[:count]
    core = tuple(chosen)

    def again(role: Role) -> Role:
        if role.kind not in ("core", "other"):
            return role
        return replace(role, kind="core" if role.concept in core else "other")

    table = {key: again(role) for key, role in roles}
    return replace(roles, table=table, core=core, parameters={**roles.parameters, "concepts": count})


def from_layer(roles: RoleMap, first: int) -> RoleMap:
    """The map for layers `first` and above: lower layers are dropped, layers never measured are mixed.

    Raises:
        UsageError: no layer of the map is left.
    """
    last = roles.layers[-1]
    if not 1 <= first <= last:
        raise UsageError(f"from:{first}: the role map ends at layer {last}")
    table = {
        (layer, head): roles.table.get((layer, head), Role("mixed"))
        for layer in range(first, last + 1)
        for head in range(roles.heads)
    }
    return replace(roles, table=table, parameters={**roles.parameters, "from": first})
