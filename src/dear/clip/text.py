"""The text tower: token rows, positions, layers, the row that stands for the text, projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dear.clip.config import TextConfig
from dear.clip.edit import Edit
from dear.clip.tower import LayerNorm, Record, Tower
from dear.errors import InputError


class TextTower(Tower):
    """A text tower of any of the supported families."""

    rows: Tensor | None
    proj_bias: nn.Parameter | None

    def __init__(self, config: TextConfig, embed_dim: int, rows: int | None = None) -> None:
        super().__init__(config, causal=config.causal)
        self.shape = config
        self.tokens = nn.Parameter(torch.empty(rows or config.vocab, config.width))
        self.positions = nn.Parameter(torch.empty(config.context, config.width))
        self.ln_final = LayerNorm(config.width, config.eps)
        self.proj = nn.Parameter(torch.empty(config.width, embed_dim))
        bias = nn.Parameter(torch.empty(embed_dim)) if config.projection_bias else None
        self.register_parameter("proj_bias", bias)
        # A reduced vocabulary keeps the rows that training used and maps every other id to one shared row.
        self.register_buffer("rows", torch.zeros(config.vocab, dtype=torch.long) if rows else None)

    @property
    def first_word(self) -> int:
        """The position of a text's first word: 1 behind a begin token, else 0."""
        return int(self.shape.begins)

    def eot(self, ids: Tensor) -> Tensor:
        """The position that stands for each text: [N, T] -> [N]."""
        if self.shape.pool == "last":
            return ids.new_full((len(ids),), ids.shape[1] - 1)
        return self.end(ids)

    def end(self, ids: Tensor) -> Tensor:
        """The position of each text's end token: [N, T] -> [N]."""
        if self.shape.pool == "largest":  # CLIP's end token has the largest id there is
            return ids.argmax(dim=-1)
        return (ids == self.shape.end).int().argmax(dim=-1)

    def word_count(self, ids: Tensor) -> Tensor:
        """How many tokens each text has between its begin and end tokens: [N, T] -> [N]."""
        return self.end(ids) - self.first_word

    def cut(self, ids: Tensor) -> Tensor:
        """Drop the columns after the longest text's end, where they cannot reach the row that is read."""
        return ids if self.shape.whole else ids[:, : int(self.eot(ids).max()) + 1]

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [N, T] to the input of layer 1, [N, T, D]."""
        if ids.ndim != 2 or ids.shape[1] > self.shape.context:
            raise InputError(f"token ids must be [N, at most {self.shape.context}]; got {list(ids.shape)}")
        rows = ids if self.rows is None else self.rows[ids]
        return self.tokens[rows] + self.positions[: ids.shape[1]]

    def project(self, x: Tensor) -> Tensor:
        """Final norm and projection of rows [..., D] to features [..., E]."""
        normed: Tensor = self.ln_final(x)
        features = normed @ self.proj
        return features if self.proj_bias is None else features + self.proj_bias

    def forward(self, ids: Tensor, edit: Edit | None = None, record: Record | None = None) -> Tensor:
        """Token ids [N, T] to features [N, E]."""
        ids = self.cut(ids)
        end = self.eot(ids)
        if edit is not None and edit.at is not None:
            end = end + edit.count
        return self.project(self.run(self.embed(ids), edit=edit, read=end[:, None], record=record)[:, 0])
