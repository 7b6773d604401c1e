"""Analysis of attention heads: contributions, phrases, concepts and roles."""

from dear.heads.ablate import AblationTask, layer_effects, role_effects
from dear.heads.collect import HeadContributions, collect_contributions
from dear.heads.concepts import Concepts, cluster_concepts, fixed_concepts, tagged_concepts
from dear.heads.contributions import Contributions, decompose, head_maps, head_outputs
from dear.heads.corpus import Corpus, Phrase, load_corpus
from dear.heads.discover import discover_roles
from dear.heads.moments import Moments, compute_moments
from dear.heads.role import Role
from dear.heads.roles import RoleMap
from dear.heads.rules import concept_entropy, concept_shares, dominant, quantile, reassign_roles
from dear.heads.textspan import Spans, textspan, textspan_moments

__all__ = [
    "AblationTask",
    "Concepts",
    "Contributions",
    "Corpus",
    "HeadContributions",
    "Moments",
    "Phrase",
    "Role",
    "RoleMap",
    "Spans",
    "cluster_concepts",
    "collect_contributions",
    "compute_moments",
    "concept_entropy",
    "concept_shares",
    "decompose",
    "discover_roles",
    "dominant",
    "fixed_concepts",
    "head_maps",
    "head_outputs",
    "layer_effects",
    "load_corpus",
    "quantile",
    "reassign_roles",
    "role_effects",
    "tagged_concepts",
    "textspan",
    "textspan_moments",
]  # fmt: skip
