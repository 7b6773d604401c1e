"""From measured heads to roles: the rules `quantile` and `dominant` (the rule `table2` is data).

`derive_roles` changes a role map by name, as ablations do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from dear.errors import RoleError, UsageError
from dear.heads.names import CONCEPTS, CORE, GENERAL, Head
from dear.heads.role import Role
from dear.heads.roles import RoleMap

ROLE_CHANGES = ("uniform", "shuffled", "quantile", "dominant", "concepts", "from")


@dataclass(frozen=True)
class HeadDescription:
    """A head's phrases, and the share of them in each concept, largest first: the input of a rule."""

    phrases: tuple[str, ...]
    shares: Mapping[str, float]

    @classmethod
    def of(cls, phrases: Sequence[str], concepts: Sequence[str]) -> HeadDescription:
        """From the concept of each phrase (eq. 3)."""
        return cls(tuple(phrases), concept_shares(concepts))

    @property
    def leading(self) -> tuple[str, float]:
        """The concept with the largest share, and that share; on a tie the one of the earlier phrase.

        >>> HeadDescription.of(("b", "a"), ("Shape", "Color")).leading
        ('Shape', 0.5)
        """
        return next(iter(self.shares.items()), ("", 0.0))

    @property
    def entropy(self) -> float:
        """Concept Entropy in bits (eq. 4)."""
        return concept_entropy(self.shares)

    def role(self, kind: str, concept: str | None) -> Role:
        """The head's role, with everything that was measured."""
        # Six decimals, so that a map and its file are the same.
        shares = {name: round(share, 6) for name, share in self.shares.items()}
        return Role(kind, concept, round(self.entropy, 6), shares, self.phrases)


#: of each rule: name, default and highest value of its threshold
_THRESHOLDS = {"dominant": ("tau", 0.35, 1.0), "quantile": ("q", 0.20, 0.5)}


def quantile(
    heads: Mapping[Head, HeadDescription], q: float = 0.20, core: tuple[str, ...] = CORE
) -> dict[Head, Role]:
    """Roles by rank of Concept Entropy: lowest share `q` specialized, highest `q` generalization, rest mixed.

    `round(q · heads)` heads go to each end. A specialized head belongs to the concept of its largest share:
    core if that is a core concept, else other. Entropies of 20 phrases tie often; ties are broken by the
    larger leading share, then by layer and head, so that the counts are exact and the map is reproducible.
    """
    check_rule("quantile", q)
    order = sorted(heads, key=lambda key: (round(heads[key].entropy, 9), -heads[key].leading[1], key))
    count = round(q * len(order))
    table: dict[Head, Role] = {}
    for rank, key in enumerate(order):
        head = heads[key]
        if rank < count:
            table[key] = _specialized(head, core)
        elif rank >= len(order) - count:
            table[key] = head.role("generalization", None)
        else:
            table[key] = head.role("mixed", None)
    return table


def dominant(
    heads: Mapping[Head, HeadDescription], tau: float = 0.35, core: tuple[str, ...] = CORE
) -> dict[Head, Role]:
    """Roles by leading share: at least `tau` of the phrases in one concept, else mixed.

    Core concept: core. Style: generalization. Any other concept: other. The default requires 7 of 20
    phrases: a head that drew its phrases evenly from twelve concepts would have 7 in some one concept in
    less than one case of a hundred.
    """
    check_rule("dominant", tau)
    table: dict[Head, Role] = {}
    for key, head in heads.items():
        concept, share = head.leading
        if share < tau - 1e-6:
            table[key] = head.role("mixed", None)
        elif concept == GENERAL and GENERAL not in core:
            table[key] = head.role("generalization", concept)
        else:
            table[key] = _specialized(head, core)
    return table


def _specialized(head: HeadDescription, core: tuple[str, ...]) -> Role:
    concept, _ = head.leading
    return head.role("core" if concept in core else "other", concept)


def assign_roles(
    heads: Mapping[Head, HeadDescription],
    rule: str = "dominant",
    value: float | None = None,
    core: tuple[str, ...] = CORE,
) -> tuple[dict[Head, Role], dict[str, float]]:
    """Roles by the rule of that name, with its default q or tau unless `value` is set; and the parameters.

    Heads without any phrase (their output never varies) are mixed under every rule.
    """
    threshold = check_rule(rule, value)
    without_phrases = {key: head.role("mixed", None) for key, head in heads.items() if not head.shares}
    with_phrases = {key: head for key, head in heads.items() if head.shares}
    if rule == "quantile":
        return quantile(with_phrases, threshold, core) | without_phrases, {"q": threshold}
    return dominant(with_phrases, threshold, core) | without_phrases, {"tau": threshold}


def check_rule(rule: str, value: float | None = None) -> float:
    """The threshold of the rule of that name: `value`, or its default; refused if it is out of range.

    >>> check_rule("dominant")
    0.35
    """
    if rule not in _THRESHOLDS:
        raise RoleError(
            f"rule must be {' or '.join(_THRESHOLDS)}, got {rule!r} (RoleMap.table2() is the paper's map)",
            hint="rule",
        )
    name, default, highest = _THRESHOLDS[rule]
    threshold = default if value is None else value
    if not 0 < threshold <= highest:
        raise RoleError(f"{name} of the rule {rule} must be above 0 and at most {highest:g}, got {threshold}")
    return threshold


def reassign_roles(roles: RoleMap, rule: str, value: float | None = None) -> RoleMap:
    """The same measured heads under another rule or threshold: nothing is computed on images again."""
    if not any(role.shares for role in roles.table.values()):
        raise RoleError(f"the rule {rule!r} needs measured shares; a role map of {roles.rule!r} has none")
    heads = {key: HeadDescription(role.phrases, role.shares) for key, role in roles}
    table, parameters = assign_roles(heads, rule, value, roles.core)
    replaced = ("q", "tau", "of", "seed")
    others = {name: value for name, value in roles.parameters.items() if name not in replaced}
    return replace(roles, table=table, rule=rule, parameters=others | parameters)


def derive_roles(roles: RoleMap, spec: str) -> RoleMap:
    """The map that `spec` derives from `roles`: changes joined by "+", each applied to the one before.

    Args:
        roles: the map to start from.
        spec: "" (as it is), "uniform:mixed", "uniform:generalization", "shuffled:SEED", "quantile:Q",
            "dominant:TAU", "concepts:K" (K core concepts), "from:LAYER" (covers layers from LAYER on;
            heads that were never measured are mixed).

    >>> derive_roles(RoleMap.table2(), "concepts:3").core
    ('Location', 'Object', 'Texture')
    >>> derive_roles(RoleMap.table2(), "from:8+uniform:mixed").counts()["mixed"]
    60
    """
    for part in filter(None, spec.split("+")):
        roles = _apply(roles, part)
    return roles


def _apply(roles: RoleMap, part: str) -> RoleMap:
    name, _, value = part.partition(":")
    try:
        if name == "uniform":
            uniform = RoleMap.uniform(value, roles.layers, roles.heads, roles.core)
            return replace(uniform, backbone=roles.backbone, fingerprint=roles.fingerprint, depth=roles.depth)
        if name == "shuffled":
            return roles.shuffled(int(value))
        if name in ("quantile", "dominant"):
            return reassign_roles(roles, name, float(value))
        if name == "concepts":
            return with_concepts(roles, int(value))
        if name == "from":
            return from_layer(roles, int(value))
    except ValueError:
        raise UsageError(f"roles {part!r}: {value!r} is not a number") from None
    raise UsageError(f"roles {part!r}: choose from {', '.join(kind + ':…' for kind in ROLE_CHANGES)}")


def with_concepts(roles: RoleMap, count: int) -> RoleMap:
    """The map with `count` core concepts instead of the present ones.

    Fewer: those of the core concepts that lead the most heads. More: the core ones and those of the other
    concepts (never Style) that lead the most heads. Specialized heads whose concept is core are core heads,
    the others are isolated; generalization and mixed heads stay.
    """
    most = len(CONCEPTS) - 1
    if not 1 <= count <= most:
        raise UsageError(f"concepts:{count}: between 1 and {most} concepts can be core")
    specialized = [role.concept for _, role in roles if role.kind in ("core", "other")]
    if count == len(roles.core):
        return roles
    order = {concept: number for number, concept in enumerate(CONCEPTS)}

    def rank(concept: str) -> tuple[bool, int, int]:
        return concept not in roles.core, -specialized.count(concept), order.get(concept, len(order))

    concepts = dict.fromkeys((*roles.core, *(concept for concept in CONCEPTS if concept != GENERAL)))
    core = tuple(sorted(concepts, key=rank)[:count])
    table = {
        key: replace(role, kind="core" if role.concept in core else "other")
        if role.kind in ("core", "other")
        else role
        for key, role in roles
    }
    return replace(roles, table=table, core=core, parameters={**roles.parameters, "concepts": count})


def from_layer(roles: RoleMap, first: int) -> RoleMap:
    """The map for layers `first` and above: lower layers are dropped, layers never measured are mixed."""
    last = roles.layers[-1]
    if not 1 <= first <= last:
        raise UsageError(f"from:{first}: the role map ends at layer {last}")
    table = {
        (layer, head): roles.table.get((layer, head), Role("mixed"))
        for layer in range(first, last + 1)
        for head in range(roles.heads)
    }
    return replace(roles, table=table, parameters={**roles.parameters, "from": first})


def concept_shares(concepts: Iterable[str]) -> dict[str, float]:
    """Share of a head's phrases in each concept, largest first, ties by first appearance (eq. 3).

    >>> concept_shares(["Color", "Color", "Shape", "Color"])
    {'Color': 0.75, 'Shape': 0.25}
    """
    counts = Counter(concepts)
    return {concept: count / counts.total() for concept, count in counts.most_common()}


def concept_entropy(shares: Mapping[str, float]) -> float:
    """Entropy of a head's shares in bits: 0 when all phrases belong to one concept (eq. 4).

    >>> concept_entropy({"Color": 1.0})
    0.0
    >>> concept_entropy({"Color": 0.25, "Shape": 0.25, "Object": 0.25, "Text": 0.25})
    2.0
    """
    return sum(-share * math.log2(share) for share in shares.values() if share > 0) + 0.0
