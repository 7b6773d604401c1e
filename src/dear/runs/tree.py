"""A tree of classes: probabilities are summed upward, and an answer names a class or an inner node.

The answer for an image is the deepest node whose probability is at least `certain`: "siamese", or "cat" where
the breed is not certain. With a share of images that may be rejected, an image whose score is below the
threshold of that share is answered with an inner node, and with "none of these" only below the threshold of
a quarter of the share. Needs no PyTorch, so that an exported model answers with the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dear.errors import UsageError

# Measured on 40 classes of Caltech101 (docs/results/data.md): named nodes are right for 87% of the images,
# where classes are for 74%, with 90% of the information; 0.9 adds 1.6 points for another 5% of it.
CERTAIN = 0.8  #: probability from which a node is named
# The same for 0.05 to 0.5: at most 1 point of coverage, 2 points of answered images of no class.
REJECTED = 0.25  #: part of the rejected share that is answered with "none of these", not with an inner node

Floats = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Tree:
    """Classes and the nodes above them; a class that the tree does not name is at the top."""

    parents: Mapping[str, str]  #: of classes and inner nodes that have one
    classes: tuple[str, ...]

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The classes, then the nodes above them."""
        return tuple(
            dict.fromkeys([*self.classes, *(node for name in self.classes for node in self.path(name))])
        )

    def path(self, node: str) -> tuple[str, ...]:
        """From the top down to a node, itself included.

        >>> Tree({"siamese": "cat", "cat": "animal"}, ("siamese",)).path("siamese")
        ('animal', 'cat', 'siamese')
        """
        path = [node]
        while path[-1] in self.parents:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    @cached_property
    def members(self) -> Floats:
        """Whether each class is at or below each node, [C, N]."""
        index_of = {node: number for number, node in enumerate(self.nodes)}
        members = np.zeros((len(self.classes), len(self.nodes)))
        for row, name in enumerate(self.classes):
            members[row, [index_of[node] for node in self.path(name)]] = 1
        return members

    @cached_property
    def depths(self) -> IntArray:
        """Level of each node from the top, from 1, [N]."""
        return np.array([len(self.path(node)) for node in self.nodes], dtype=np.int64)

    def levels(self) -> list[IntArray]:
        """Node of each class [C] at every level; the class itself below its own level."""
        index_of = {node: number for number, node in enumerate(self.nodes)}
        paths = [self.path(name) for name in self.classes]
        return [
            np.array([index_of[path[min(level, len(path)) - 1]] for path in paths], dtype=np.int64)
            for level in range(1, max(map(len, paths)) + 1)
        ]

    def sums(self, probabilities: Any) -> Floats:
        """Probabilities [n, N] of all nodes from those of the classes [n, C], an array or a tensor.

        >>> Tree({"a": "x", "b": "x"}, ("a", "b", "c")).sums(np.array([[0.25, 0.5, 0.25]])).tolist()
        [[0.25, 0.5, 0.25, 0.75]]
        """
        sums: Floats = np.asarray(probabilities, dtype=np.float64) @ self.members
        return sums

    def deepest(self, sums: Floats, certain: float, inner_only: Mask | None = None) -> IntArray:
        """Index of the deepest certain node of each row of `sums` [n, N], the likeliest of several; -1: none.

        Where `inner_only` [n] is True, only nodes above the classes are allowed.
        """
        allowed = sums >= certain
        if inner_only is not None:
            allowed[inner_only, : len(self.classes)] = False
        rank = np.where(allowed, self.depths + sums.clip(max=0.999), 0)  # deeper first, then likelier
        return np.where(rank.max(axis=1) > 0, rank.argmax(axis=1), -1)

    def answers(
        self, probabilities: Any, certain: float, below_threshold: Any = None, below_none: Any = None
    ) -> tuple[list[tuple[str, float]], Mask | None]:
        """The answered node of each image with its probability, and which images are rejected.

        Args:
            probabilities: of the classes, [n, C].
            certain: least probability of a named node; if none has it, the likeliest top node is named.
            below_threshold: whether each image scores below the threshold of rejection [n]; then no class is
                named.
            below_none: whether it scores below that of "none of these" [n]; only with `below_threshold`.
        """
        sums = self.sums(probabilities)
        inner_only = None if below_threshold is None else np.asarray(below_threshold, dtype=bool)
        nodes = self.deepest(sums, certain, inner_only)
        rejected = None
        if inner_only is not None:
            rejected = inner_only & ((nodes < 0) | np.asarray(below_none, dtype=bool))
        top = np.where(self.depths > 1, -1.0, sums).argmax(axis=1)
        nodes = np.where(nodes < 0, top, nodes)
        rows = enumerate(nodes.tolist())
        return [(self.nodes[node], float(sums[row, node])) for row, node in rows], rejected


def check_certain(certain: float | None, tree: Tree | None) -> float:
    """The least probability of a named node, `CERTAIN` for None.

    Raises:
        UsageError: it is out of bounds, or there is no tree.
    """
    if certain is not None and tree is None:
        raise UsageError("certain needs a run with a tree of classes, and this run has none; leave it out")
    if certain is not None and not 0.5 <= certain <= 1:
        raise UsageError(f"certain must be from 0.5 to 1, got {certain}")
    return CERTAIN if certain is None else certain


@dataclass(frozen=True)
class TreeFigures:
    """Accuracy of one mode by level of the tree, and of the deepest certain nodes."""

    levels: tuple[float, ...]  #: share of images whose node at each level, from the top, is right
    certain: float  #: the least probability of a named node
    accuracy: float  #: share of named nodes that are the true class or above it
    named: tuple[float, ...]  #: share of images that are answered with a node of each level
    unnamed: float  #: share of images without a certain node

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "levels": list(self.levels),
            "certain": self.certain,
            "accuracy": self.accuracy,
            "named": list(self.named),
            "unnamed": self.unnamed,
        }


def tree_figures(tree: Tree, probabilities: Any, labels: Any) -> TreeFigures:
    """Figures of probabilities [n, C] for labels [n], arrays or tensors."""
    sums, truth = tree.sums(probabilities), np.asarray(labels)
    shares = []
    for nodes in tree.levels():
        kept = np.unique(nodes)
        answers = kept[sums[:, kept].argmax(axis=1)]
        shares.append(float((answers == nodes[truth]).mean()))
    nodes_of_images = tree.deepest(sums, CERTAIN)
    has_node = nodes_of_images >= 0
    correct = tree.members[truth[has_node], nodes_of_images[has_node]] > 0
    depth = tree.depths[nodes_of_images.clip(min=0)]
    return TreeFigures(
        tuple(shares),
        CERTAIN,
        float(correct.mean()) if len(correct) else float("nan"),
        tuple(float((has_node & (depth == level)).mean()) for level in range(1, len(shares) + 1)),
        float((~has_node).mean()),
    )
