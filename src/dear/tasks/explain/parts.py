"""A score of an image as a sum of parts: of heads, MLPs, tokens and patches.

Whatever is computed from a traced backbone ends in some rows of the last layer (the class token, extra
tokens). Those rows are sums: where the row started, what each head and each MLP added. From the rows to the
score everything is linear once the lengths it divides by are known: the spread of the final norm and the
length of the feature are read off the real image and held. The gradient of the score at the rows, with these
held, therefore turns every term of the sum into its part of the score, and the parts sum to the score
exactly. No attention pattern and no feature of a text is differentiated: they are what they are.

What is not linear on the way (the kernel of a cache model) is held, too, and stays in `Parts.rest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.correction import AppliedCorrection
from dear.clip.edit import Record, insert_tokens
from dear.clip.model import Clip
from dear.clip.rows import Rows, spread_of
from dear.errors import UsageError
from dear.heads.contributions import block_of
from dear.heads.names import Head
from dear.tasks.explain.rows import Terms, added_to, change_of, output_of, row_terms, run_before
from dear.tasks.explain.tracing import ConstantNorms, Scripted, Segment, trace_backbone

SMOOTHING = 0.5  #: share of a patch's part that is shown at its neighbors


@dataclass(frozen=True)
class Parts:
    """A score per question and image, [Q, B], as a sum of parts: `total()` is `score`.

    Row 0 is the class token, further rows are extra tokens in their order. L layers, H heads, S x S patches.
    """

    score: Tensor  #: [Q, B]
    start: Tensor  #: [Q, B, R], where the row started
    heads: Tensor  #: [Q, B, R, L, H]
    mlps: Tensor  #: [Q, B, R, L]
    constants: Mapping[str, Tensor]  #: [Q, B] each: biases by name
    rest: Tensor  #: [Q, B], what is left: constants of the method, and what is not linear in it
    linear: bool  #: whether nothing but lengths was held: then `rest` is a constant of the class
    #: [Q, B, R, L, H, S, S], the heads' parts by patch; what is missing to `heads` comes from other tokens
    patches: Tensor | None = None

    def total(self) -> Tensor:
        """The sum of all parts, [Q, B]."""
        named = self.start.sum(-1) + self.heads.sum((-3, -2, -1)) + self.mlps.sum((-2, -1))
        return named + sum(self.constants.values(), torch.zeros_like(named)) + self.rest

    def rows(self) -> Tensor:
        """What each row says, [Q, B, R]: without the constants."""
        return self.start + self.heads.sum((-2, -1)) + self.mlps.sum(-1)


class Trace:
    """What a function of a backbone's images computed, stored so that its scores can be decomposed.

    `answer` computes logits [B, C] with the backbone that is passed to it, images and texts included. A
    backbone that pools its tokens by attention is refused: it has no rows to decompose.
    """

    def __init__(self, clip: Clip, answer: Callable[[Clip], Tensor]) -> None:
        if clip.visual.pool is not None:
            raise UsageError(
                f"{clip.name}: scores of a backbone that pools tokens by attention cannot be decomposed "
                "exactly; dear roles shows which share of its features heads explain"
            )
        self._segments: list[Segment] = []
        self.clip, self.visual, self._constants = trace_backbone(clip, self._segments)
        self._answer = answer
        self._back: Tensor | None = None  # pseudoinverse of the projection
        with torch.enable_grad(), ConstantNorms() as constants:
            logits = answer(self.clip)
        self._logits = logits
        self._finals = [segment for segment in self._segments if segment.final is not None]
        leaves = [*self._leaves, *(z for final in self._finals for z in final.heads.values())]
        if not _depends(logits, leaves):
            raise UsageError("the score does not depend on the last layer of the image tower")
        self.linear = not any(_depends(x, leaves) for x in constants.inputs)
        self._terms = [row_terms(self.visual, self._segments, segment) for segment in self._finals]
        self.rows = max(row for rows in self._terms for row in rows) + 1

    @property
    def logits(self) -> Tensor:
        """[B, C], detached."""
        return self._logits.detach()

    @property
    def _leaves(self) -> list[Tensor]:
        return [segment.final.x for segment in self._finals if segment.final is not None]

    def release_activations(self) -> None:
        """Drop what the layers computed, which `parts` without patches does not need."""
        for segment in self._segments:
            segment.record, segment.x = Record(), segment.x[:, :0].clone()

    # -- parts of a score -------------------------------------------------------------------------

    @torch.enable_grad()
    def parts(self, questions: Tensor, patches: bool = False) -> Parts:
        """Decompose `sum over classes of questions[q, b, c] * logits[b, c]`.

        Args:
            questions: weights of the classes, [Q, B, C] or [Q, C].
            patches: also divide the heads' parts among the patches.
        """
        if questions.ndim == 2:
            questions = questions[:, None].expand(-1, len(self._logits), -1)
        answers = [self._parts_of(weights.to(self._logits), patches) for weights in questions]

        def stack(name: str) -> Tensor:
            return torch.stack([getattr(answer, name) for answer in answers])

        constants = {
            name: torch.stack([answer.constants[name] for answer in answers]) for name in answers[0].constants
        }
        score, start, heads, mlps, rest = map(stack, ("score", "start", "heads", "mlps", "rest"))
        maps = stack("patches") if patches else None
        return Parts(score, start, heads, mlps, constants, rest, self.linear, maps)

    def _parts_of(self, weights: Tensor, patches: bool) -> Parts:
        """One question, without its axis."""
        scores = (weights * self._logits).sum(-1)  # [B]
        count, vision = len(scores), self.visual.config
        leaves = self._leaves
        wide = scores.detach().double().cpu()
        pairs = zip(leaves, self._slopes(scores.sum(), leaves), strict=True)
        slopes = [
            (torch.zeros_like(leaf) if slope is None else slope).double().cpu() for leaf, slope in pairs
        ]
        constants = {name: torch.zeros(count, dtype=torch.float64) for name in self._constants}
        # Images share the biases, so each needs a separate gradient.
        each = torch.eye(count, dtype=scores.dtype, device=scores.device)
        for (name, value), slope in zip(
            self._constants.items(), self._slopes(scores, list(self._constants.values()), each), strict=True
        ):
            if slope is not None:
                constants[name] = (slope * value.detach()).double().sum(-1).cpu()
        shape = (count, self.rows, vision.layers, vision.heads)
        biases, start, mlps, heads = (torch.zeros(shape[:n], dtype=torch.float64) for n in (1, 2, 3, 4))
        side = self.visual.shape.side
        maps = torch.zeros(*shape, side, side) if patches else None
        for final, rows, slope in zip(self._finals, self._terms, slopes, strict=True):
            for row, (place, terms) in rows.items():
                at = slope[:, place]  # [B, D]
                at = at - at.mean(-1, keepdim=True)  # the final norm does not see a row's mean
                start[:, row] += (terms.start * at).sum(-1)
                mlps[:, row] += torch.einsum("bld,bd,l->bl", terms.mlps, at, terms.weights)
                biases += at @ terms.biases
                gradients = self._head_gradients(terms, at)  # [B, L, H, d]
                if row == 0:
                    gradients = gradients + self._focus_gradients(final, scores)
                heads[:, row] += torch.einsum("blhd,blhd,l->blh", terms.heads, gradients, terms.weights)
                if maps is not None:
                    maps[:, row] += self._patches(final, final.positions[place], gradients, terms.weights)
        constants["output biases"] = biases
        known = start.sum(-1) + heads.sum((1, 2, 3)) + mlps.sum((1, 2)) + sum(constants.values())
        return Parts(wide, start, heads, mlps, constants, wide - known, self.linear, maps)

    @staticmethod
    def _slopes(of: Tensor, by: Sequence[Tensor], each: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Gradients; with `each` [n, ...] one per row of it. None: it does not depend on that."""
        if not by:
            return ()
        return torch.autograd.grad(
            of, by, each, retain_graph=True, allow_unused=True, is_grads_batched=each is not None
        )

    def _focus_gradients(self, final: Segment, scores: Tensor) -> Tensor:
        """Gradients of the score by heads' outputs that a focus reads directly, [B, L, H, d]."""
        vision = self.visual.config
        gradients = torch.zeros(
            len(scores), vision.layers, vision.heads, vision.head_width, dtype=torch.float64
        )
        slopes = self._slopes(scores.sum(), list(final.heads.values()))
        for layer, slope in zip(final.heads, slopes, strict=True):
            if slope is not None:
                gradients[:, layer - 1] = slope[:, :, 0].double().cpu()
        return gradients

    def _head_gradients(self, terms: Terms, at: Tensor) -> Tensor:
        """Gradients of the score by each head's output, [B, L, H, d], from those by the row [B, D]."""
        weights = (
            output_of(block_of(self.visual, layer), change)[0]
            for layer, change in enumerate(terms.changes, 1)
        )
        heads = self.visual.config.heads
        return torch.stack([(at @ weight).unflatten(1, (heads, -1)) for weight in weights], dim=1)

    def _patches(self, final: Segment, position: int, gradients: Tensor, weights: Tensor) -> Tensor:
        """The heads' parts by patch, [B, L, H, S, S], of the row at a position."""
        side = self.visual.shape.side
        patch_terms = torch.zeros(*gradients.shape[:3], side * side)
        segment: Segment | None = final
        while segment is not None:
            x = segment.x
            for layer in range(segment.first, segment.last + 1):
                if weights[layer - 1] != 0:
                    values, pattern = self._values(segment, layer, x, position)
                    gradient = gradients[:, layer - 1, :, None].to(values.device)  # [B, H, 1, d]
                    each = pattern * (values.double() * gradient).sum(-1)  # [B, H, N]
                    columns = self._patch_columns(segment, layer)
                    patch_terms[:, layer - 1] = (weights[layer - 1] * each[:, :, columns]).float().cpu()
                x = segment.record[f"blocks.{layer}.out"]
            segment = run_before(self._segments, segment, position)
        for layer, head in self.visual.removed_heads:
            patch_terms[:, layer - 1, head] = 0
        maps: Tensor = patch_terms.unflatten(-1, (side, side))
        return maps

    def _values(self, segment: Segment, layer: int, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Values [B, H, N, d] of a layer, gated, and the pattern [B, H, N] of one row."""
        change, block = change_of(segment.edit, layer), block_of(self.visual, layer)
        if segment.edit is not None and segment.edit.first is not None and layer >= segment.edit.first:
            x = insert_tokens(x, segment.edit, layer)
        parameters = dict(block.named_parameters()) | added_to(block, change)
        with torch.no_grad():
            normed = F.layer_norm(
                x, x.shape[-1:], parameters["ln_1.weight"], parameters["ln_1.bias"], block.ln_1.eps
            )
            values = block.attn.split(
                F.linear(normed, parameters["attn.v.weight"], parameters["attn.v.bias"])
            )
            if change is not None and change.v is not None:
                values = values + change.v(normed)
            if change is not None and change.gate is not None:
                values = values * change.gate.to(values)[:, None, None]
        return values, segment.record[f"blocks.{layer}.attn.pattern"][:, :, position].double()

    def _patch_columns(self, segment: Segment, layer: int) -> slice:
        """Where in a layer's sequence the patches stand: they are always together."""
        edit, shift = segment.edit, 0
        if edit is not None and edit.first is not None and layer >= edit.first and edit.at is not None:
            shift = edit.count if edit.at <= 1 else 0
        return slice(1 + shift, len(self.visual.positions) + shift)

    # -- other answers ----------------------------------------------------------------------------

    def head_states(self) -> list[dict[int, Tensor]]:
        """Per run and row the heads' outputs divided by the row's spread, [B, L, H, d]: for `means_of`."""
        states = []
        for final, rows in zip(self._finals, self._terms, strict=True):
            spread = self._spread(final)[..., None, None, None]
            states.append({row: terms.heads / spread[:, place] for row, (place, terms) in rows.items()})
        return states

    def _spread(self, final: Segment) -> Tensor:
        """What the final norm divides each row by, [B, R]."""
        return spread_of(final.out.double().cpu(), self.visual.ln_post.eps)[..., 0]

    @torch.no_grad()
    def without(
        self,
        heads: Iterable[Head] = (),
        means: Sequence[Mapping[int, Tensor]] = (),
        affine: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Logits [B, C] without something.

        Args:
            heads: (layer, head) pairs: what they add to the rows is replaced by its mean (direct effect).
            means: `head_states` averaged over reference images, [L, H, d] per run and row.
            affine: A [E, E] and b [E]: every feature f becomes `f A + b`.
        """
        script = [self._without_heads(s, tuple(heads), means) for s in self._segments]
        with self._replay(script), self._with_correction(affine):
            return self._answer(self.clip)

    def _without_heads(
        self, segment: Segment, heads: tuple[Head, ...], means: Sequence[Mapping[int, Tensor]]
    ) -> Scripted:
        """The result of a run with what some heads added replaced by its mean."""
        chosen = [head for head in heads if head not in set(self.visual.removed_heads)]
        outputs = {layer: z.detach().clone() for layer, z in segment.heads.items()}
        if segment.final is None:
            return Scripted(segment, Rows(segment.out), outputs)
        rows = segment.final._replace(x=segment.out)
        if not chosen:
            return Scripted(segment, rows, outputs)
        number = next(i for i, final in enumerate(self._finals) if final is segment)
        spread, delta = self._spread(segment), torch.zeros_like(segment.out, dtype=torch.float64).cpu()
        for row, (place, terms) in self._terms[number].items():
            for layer, head in chosen:
                mean = spread[:, place, None] * means[number][row][layer - 1, head]
                weight, _ = output_of(block_of(self.visual, layer), terms.changes[layer - 1])
                weight = weight.unflatten(1, (self.visual.config.heads, -1))[:, head]  # [D, d]
                change = (mean - terms.heads[:, layer - 1, head]) @ weight.T
                change = change - change.mean(-1, keepdim=True)
                delta[:, place] += terms.weights[layer - 1] * change
                if row == 0 and layer in outputs:
                    outputs[layer][:, head, 0] = mean.to(outputs[layer])
        return Scripted(segment, rows._replace(x=segment.out + delta.to(segment.out)), outputs)

    @contextmanager
    def _with_correction(self, affine: tuple[Tensor, Tensor] | None) -> Iterator[None]:
        """Within this every feature is changed, after the backbone's own correction."""
        if affine is None:
            yield
            return
        visual, (A, b) = self.visual, (part.double().cpu() for part in affine)
        before = visual.correction
        if before is not None:
            A0, b0 = before.matrix.double().cpu(), before.bias.double().cpu()
            A, b = A0 @ A, b0 @ A + b
        P = visual.projection_matrix().double().cpu()
        p = torch.zeros_like(b) if visual.proj_bias is None else visual.proj_bias.double().cpu()
        if self._back is None:
            self._back = torch.linalg.pinv(P)
        maps = (A, b, P @ A @ self._back, (p @ A + b - p) @ self._back)
        heads = () if before is None else before.heads
        visual.correction = AppliedCorrection(heads, *(part.to(visual.projection_matrix()) for part in maps))
        try:
            yield
        finally:
            visual.correction = before

    @torch.no_grad()
    def features(self) -> Tensor:
        """Features [B, E] of the first row that is read (the class token's, where it is), in float32."""
        final = self._finals[0].final
        assert final is not None
        place, _ = self._terms[0][min(self._terms[0])]
        return self.visual.project(final)[:, place].float().cpu()

    @contextmanager
    def _replay(self, script: list[Scripted]) -> Iterator[None]:
        """Within this block the image tower replays these results, one per run."""
        self.visual.script = iter(script)
        try:
            yield
        finally:
            self.visual.script = None


def smooth(maps: Tensor) -> Tensor:
    """Maps [..., S, S] with a share of each patch's part divided among its neighbors; sums stay the same.

    Patches exchange what they know with their neighbors in every layer: what is read at one of them speaks
    of the ones around it, too.
    """
    kernel = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]])[None, None].to(maps) / 16
    flat = maps.reshape(-1, 1, *maps.shape[-2:])
    room = F.conv2d(torch.ones_like(flat), kernel, padding=1)  # less at the edge
    return (1 - SMOOTHING) * maps + SMOOTHING * F.conv2d(flat / room, kernel, padding=1).view_as(maps)


def means_of(traces: Iterable[Trace]) -> list[dict[int, Tensor]]:
    """Mean of `Trace.head_states` over all images of some traces, [L, H, d] per run and row."""
    totals: list[dict[int, Tensor]] = []
    count = 0
    for trace in traces:
        sums = [{row: state.sum(0) for row, state in run.items()} for run in trace.head_states()]
        count += len(trace.logits)
        if totals:
            sums = [{row: old[row] + new[row] for row in old} for old, new in zip(totals, sums, strict=True)]
        totals = sums
    return [{row: total / count for row, total in run.items()} for run in totals]


def _depends(x: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether x was computed from one of the leaves."""
    if not x.requires_grad or not leaves:
        return False
    slopes = torch.autograd.grad(x, leaves, torch.ones_like(x), retain_graph=True, allow_unused=True)
    return any(slope is not None for slope in slopes)
