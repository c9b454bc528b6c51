"""A small byte-level GPT: big enough to have every kind of state, small enough for seconds.

Pre-norm blocks as in GPT-2 (Radford et al., 2019). The layers are a ``ModuleDict`` with numbers for
names, so a pipeline stage that holds some of them keeps their global names. No buffers: everything
that a step depends on is a parameter or the RNG (dropout).
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256


class Block(nn.Module):
    """Causal self-attention and an MLP, each with a residual connection and dropout."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width)
        self.mlp_down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float ``[batch, time, width]`` to the same shape."""
        batch, time, width = hidden.shape
        mixed = self.query_key_value(self.attention_norm(hidden))
        per_head = mixed.view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = per_head.permute(2, 0, 3, 1, 4)
        # Spelled out: the fused fp16 kernel spends 2 ms per backward on a CPU, and the fused CUDA
        # ones are not all deterministic.
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        future = torch.ones(time, time, dtype=torch.bool, device=hidden.device).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        attended = (weights.to(value.dtype) @ value).transpose(1, 2).reshape(batch, time, width)
        hidden = hidden + self.dropout(self.attention_output(attended))
        up = functional.gelu(self.mlp_up(self.mlp_norm(hidden)))
        return cast(torch.Tensor, hidden + self.dropout(self.mlp_down(up)))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; ``tied`` shares embedding and output weights."""

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        heads: int,
        context: int,
        dropout: float,
        tied: bool,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} does not divide into heads={heads}")
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleDict(
            {str(i): Block(width=width, heads=heads, dropout=dropout) for i in range(layers)}
        )
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Int64 ``[batch, time]`` with time <= context to logits ``[batch, time, 256]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.layers.values():
            hidden = block(hidden)
        return cast(torch.Tensor, self.head(self.final_norm(hidden)))
