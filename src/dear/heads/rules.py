"""From measured heads to roles: the rules `quantile` and `dominant` (the rule `table2` is data)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dear.errors import RoleError
from dear.heads.entropy import concept_entropy, concept_shares
from dear.heads.names import CORE, GENERAL
from dear.heads.roles import Role

Key = tuple[int, int]


@dataclass(frozen=True)
class Measured:
    """What a rule may look at: a head's phrases and the concept of each."""

    phrases: tuple[str, ...]
    concepts: tuple[str, ...]

    @property
    def shares(self) -> dict[str, float]:
        """Share of the phrases in each concept (eq. 3)."""
        return concept_shares(self.concepts)

    @property
    def entropy(self) -> float:
        """Concept Entropy in bits (eq. 4)."""
        return concept_entropy(self.shares)

    def role(self, kind: str, concept: str | None) -> Role:
        """The head's role, with everything that was measured."""
        # Six decimals, so that a map and its file are the same.
        shares = {name: round(share, 6) for name, share in self.shares.items()}
        return Role(kind, concept, round(self.entropy, 6), shares, self.phrases)


def leading(head: Measured) -> tuple[str, float]:
    """The concept with the largest share, and that share; on a tie the concept named earlier in the list.

    >>> leading(Measured(("b", "a"), ("Shape", "Color")))
    ('Shape', 0.5)
    """
    shares = head.shares
    best = max(shares.values())
    return next((c, best) for c in head.concepts if shares[c] == best)


def quantile(heads: Mapping[Key, Measured], q: float = 0.20, core: tuple[str, ...] = CORE) -> dict[Key, Role]:
    """Roles by rank of Concept Entropy: lowest share `q` specialised, highest `q` generalisation, rest mixed.

    `round(q · heads)` heads go to each end. A specialised head belongs to the concept of its largest share:
    core if that is a core concept, else other. Entropies of 20 phrases tie often; ties are broken by the
    larger leading share, then by layer and head, so that the counts are exact and the map is reproducible.

    Raises:
        RoleError: q is not above 0 and at most one half.
    """
    if not 0 < q <= 0.5:
        raise RoleError(f"quantile q = {q} must lie above 0 and not above 0.5")
    order = sorted(heads, key=lambda key: (round(heads[key].entropy, 9), -leading(heads[key])[1], key))
    count = round(q * len(order))
    table: dict[Key, Role] = {}
    for rank, key in enumerate(order):
        head = heads[key]
        if rank < count:
            table[key] = _specialised(head, core)
        elif rank >= len(order) - count:
            table[key] = head.role("generalization", None)
        else:
            table[key] = head.role("mixed", None)
    return table


def dominant(
    heads: Mapping[Key, Measured], tau: float = 0.35, core: tuple[str, ...] = CORE
) -> dict[Key, Role]:
    """Roles by leading share: at least `tau` of the phrases in one concept, else mixed.

    Core concept: core. Style: generalization. Any other concept: other. The default asks for 7 of 20
    phrases: a head that drew its phrases evenly from twelve concepts would have 7 in some one concept in
    less than one case of a hundred.

    Raises:
        RoleError: tau is not above 0 and at most 1.
    """
    if not 0 < tau <= 1:
        raise RoleError(f"dominant tau = {tau} must lie above 0 and not above 1")
    table: dict[Key, Role] = {}
    for key, head in heads.items():
        concept, share = leading(head)
        if share < tau - 1e-9:
            table[key] = head.role("mixed", None)
        elif concept == GENERAL and GENERAL not in core:
            table[key] = head.role("generalization", concept)
        else:
            table[key] = _specialised(head, core)
    return table


def _specialised(head: Measured, core: tuple[str, ...]) -> Role:
    """Core if the leading concept is core, else other."""
    concept, _ = leading(head)
    return head.role("core" if concept in core else "other", concept)
