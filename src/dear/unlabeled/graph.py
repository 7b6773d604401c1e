"""Nearest neighbors in blocks of bounded memory, and the graph along which labels propagate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NEIGHBORS = 5  #: of each image in the graph
TEXTS_ERROR = 0.05  #: of the test whether text scores answer labeled images
SHARPNESS = 8.0  #: an edge weighs exp(SHARPNESS * cosine)
_BLOCK_NUMBERS = 2**25  # cosines in memory at once: 128 MiB
_GPU_BLOCKS = 16  # times as many on a GPU: 2 GiB
_COLUMNS = 64  # of a row of cosines whose maximum is compared first


def centered_unit(features: Tensor, mean: Tensor) -> Tensor:
    """Features [n, E] minus a mean [E], at unit length.

    >>> centered_unit(torch.tensor([[3.0, 1.0]]), torch.tensor([0.0, 1.0])).tolist()
    [[1.0, 0.0]]
    """
    return F.normalize(features - mean, dim=1)


def nearest_neighbors(
    queries: Tensor, gallery: Tensor, count: int, query_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines [n, k] and rows [n, k] of the nearest images, nearest first.

    Only a block of the [n, m] cosines is in memory at a time, so memory does not grow with n times m.

    Args:
        queries: unit features [n, E].
        gallery: unit features [m, E].
        count: k; fewer where the gallery is smaller.
        query_rows: the row [n] of each query in the gallery, which is not its neighbor; -1: none.

    Example:
        >>> gallery = torch.eye(3)
        >>> nearest_neighbors(gallery[:1], gallery, 1)[1].tolist()
        [[0]]
        >>> nearest_neighbors(gallery[:1], gallery, 2, query_rows=torch.tensor([0]))[1].sort().values.tolist()
        [[1, 2]]
    """
    count = max(0, min(count, len(gallery) - (query_rows is not None)))
    cosines = queries.new_empty(len(queries), count)
    rows = torch.empty(len(queries), count, dtype=torch.int64, device=queries.device)
    numbers = _BLOCK_NUMBERS * (_GPU_BLOCKS if queries.is_cuda else 1)
    step = max(1, numbers // max(1, len(gallery)))
    for start in range(0, len(queries), step):
        block = queries[start : start + step] @ gallery.T
        if query_rows is not None:
            block_rows = query_rows[start : start + step]
            has_row = (block_rows >= 0).nonzero()[:, 0]
            block[has_row, block_rows[has_row]] = -torch.inf
        cosines[start : start + step], rows[start : start + step] = largest_in_rows(block, count)
    return cosines, rows


def largest_in_rows(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest values [n, k] of each row [n, m] and their columns [n, k], largest first.

    The k largest values lie in the k groups of columns with the largest maxima, so that only these groups are
    searched: four times as fast as `topk` of rows of 100,000 values on a CPU.

    >>> largest_in_rows(torch.tensor([[3.0, 9.0, 5.0]]), 2)[1].tolist()
    [[1, 2]]
    """
    columns = values.shape[1]
    groups = columns // _COLUMNS
    if groups <= 4 * count:
        nearest = values.topk(count, dim=1)
        return nearest.values, nearest.indices
    grouped = groups * _COLUMNS
    # [n, groups * columns] -> [n, groups, columns] -> [n, groups] -> [n, k]
    best = values[:, :grouped].unflatten(1, (groups, _COLUMNS)).amax(dim=2).topk(count, dim=1).indices
    inside = torch.arange(_COLUMNS, device=values.device)
    rest = torch.arange(grouped, columns, device=values.device).expand(len(values), -1)
    # [n, k, columns] -> [n, k * columns]
    candidates = torch.cat([(best[:, :, None] * _COLUMNS + inside).flatten(1), rest], dim=1)
    nearest = values.gather(1, candidates).topk(count, dim=1)
    return nearest.values, candidates.gather(1, nearest.indices)


def neighbor_graph(unit_features: Tensor, neighbors: int = NEIGHBORS) -> Tensor:
    """The row-normalized, symmetrized graph of nearest neighbors: sparse [n, n].

    Two images are joined where either is among the other's nearest neighbors; the weight is
    exp(SHARPNESS * cosine), half of it where only one of them is. A row without neighbors stays empty.

    >>> graph = neighbor_graph(F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]), dim=1), 1)
    >>> graph.to_dense().sum(dim=1).tolist()
    [1.0, 1.0, 1.0]
    """
    count, device = len(unit_features), unit_features.device
    numbers = torch.arange(count, device=device)
    cosines, columns = nearest_neighbors(unit_features, unit_features, neighbors, numbers)
    # [n, k] -> [n k], likewise columns and cosines
    rows = numbers[:, None].expand_as(columns).flatten()
    columns = columns.flatten()
    weights = (SHARPNESS * (cosines.flatten() - 1)).exp()
    graph = torch.sparse_coo_tensor(
        torch.stack([torch.cat([rows, columns]), torch.cat([columns, rows])]),
        torch.cat([weights, weights]) / 2,
        (count, count),
        check_invariants=False,
    ).coalesce()
    indices, values = graph.indices(), graph.values()
    totals = values.new_zeros(count).index_add_(0, indices[0], values)
    return torch.sparse_coo_tensor(
        indices, values / totals[indices[0]], (count, count), is_coalesced=True, check_invariants=False
    )


def text_span(texts: Tensor) -> Tensor:
    """An orthonormal basis [r, E] of the differences between text features [C, E]; r = 0 where all agree.

    >>> text_span(torch.tensor([[1.0, 0.0, 5.0], [3.0, 0.0, 5.0]])).abs().tolist()
    [[1.0, 0.0, 0.0]]
    """
    if len(texts) < 2:
        return texts[:0]
    lengths: Tensor
    basis: Tensor
    _, lengths, basis = torch.linalg.svd(texts - texts.mean(dim=0), full_matrices=False)
    rank = int((lengths > 1e-3 * lengths[0]).sum()) if float(lengths[0]) > 0 else 0
    return basis[:rank]


def edge_agreement(graph: Tensor, answers: Tensor) -> float:
    """Mean weight of the neighbors that have the same answer [n] as the image; 1: all of them.

    >>> edge_agreement(torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to_sparse(), torch.tensor([4, 4]))
    1.0
    """
    indices, values = graph.indices(), graph.values()
    agreeing = (values * (answers[indices[0]] == answers[indices[1]])).sum() / max(1, len(answers))
    return min(1.0, float(agreeing))  # rounding


def texts_beat_chance(scores: Tensor, labels: Tensor) -> bool:
    """Whether text scores [n, C] answer labeled images [n] better than chance (one-sided test, 5 %).

    >>> texts_beat_chance(torch.eye(4), torch.arange(4)), texts_beat_chance(torch.eye(4), torch.zeros(4))
    (True, False)
    """
    from scipy.stats import binom

    correct = int((scores.argmax(dim=1) == labels).sum())
    return bool(binom.sf(correct - 1, len(labels), 1 / scores.shape[1]) < TEXTS_ERROR)


def choose_graph(
    features: Tensor, mean: Tensor, texts: Tensor, answers: Tensor, labels: Tensor
) -> tuple[Tensor, str, float]:
    """The neighbor graph whose edges agree most with a probe's answers, its space, and that agreement.

    The neighbors of an image in the whole feature ("image") may share what the classes are not about: the
    place or the color where textures are named. Neighbors in the span of the class texts ("text") then agree
    more often. Where the model hardly knows the words it is the other way round. A probe fitted to few labels
    may follow the text scores although they are wrong, and agrees with neighbors in their span; that span is
    therefore used only where the words answer the labeled images better than chance.

    Args:
        features: unit features [n, E].
        mean: their mean [E].
        texts: text features [C, E].
        answers: class of each image [n]: its label, or the answer of a probe fitted to labeled images alone.
        labels: of the images [n], below 0 where there is none.
    """
    centered, labeled = features - mean, labels >= 0
    graphs = {"image": neighbor_graph(F.normalize(centered, dim=1))}
    basis = text_span(texts)
    if len(basis) and texts_beat_chance(centered[labeled] @ texts.T, labels[labeled]):
        graphs["text"] = neighbor_graph(F.normalize(centered @ basis.T, dim=1))
    agreements = {name: edge_agreement(graph, answers) for name, graph in graphs.items()}
    best = max(agreements, key=lambda name: agreements[name])
    return graphs[best], best, agreements[best]


def propagate_labels(graph: Tensor, probabilities: Tensor, fixed: Tensor, steps: int = 3) -> Tensor:
    """Class probabilities [n, C] after averaging with those of the neighbors.

    Each step is `Q <- (Q + A Q) / 2`; rows of `fixed` images keep their probabilities. A row
    without neighbors is not changed.

    Args:
        graph: row-normalized, sparse [n, n] (`neighbor_graph`).
        probabilities: Q [n, C]; not changed in place.
        fixed: whether each image keeps its row, bool [n] (the labeled images).
        steps: of averaging.

    Example:
        >>> graph = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to_sparse()
        >>> start = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
        >>> propagate_labels(graph, start, torch.tensor([True, False]), steps=1).tolist()
        [[1.0, 0.0], [0.75, 0.25]]
    """
    isolated = torch.ones(len(probabilities), dtype=torch.bool, device=probabilities.device)
    isolated[graph.coalesce().indices()[0]] = False
    keep = (fixed | isolated)[:, None]
    current = probabilities
    for _ in range(steps):
        averaged = torch.sparse.mm(graph, current).mul_(0.5).add_(current, alpha=0.5)
        current = torch.where(keep, probabilities, averaged)
    return current
