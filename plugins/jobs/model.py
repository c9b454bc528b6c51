"""A small byte-level GPT: big enough to have every kind of state, small enough for seconds.

Pre-norm blocks as in GPT-2 (Radford et al., 2019), without biases in the matrix multiplications, as
in PaLM (Chowdhery et al., 2022). The layers are a ``ModuleDict`` with numbers for
names, so a pipeline stage that holds some of them keeps their global names. No buffers: everything
that a step depends on is a parameter or the RNG (dropout).

One model for every topology: `seatrial.plugins.jobs.parallel` cuts it, shards it, or replaces the
two functions that other ranks take part in (`Block.attend`, `Experts.run`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Query, key and value ``[batch, heads, time, head width]`` to what is attended to."""


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, start: int = 0
) -> torch.Tensor:
    """Softmax attention to earlier positions; the first query's position is ``start``."""
    # Spelled out: the fused fp16 kernel spends 2 ms per backward on a CPU, and the fused CUDA
    # ones are not all deterministic.
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    shape = (query.shape[-2], key.shape[-2])
    future = torch.ones(shape, dtype=torch.bool, device=query.device).triu(1 + start)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    return weights.to(value.dtype) @ value


class Experts(nn.Module):
    """MLPs side by side; each token goes through one. The first dimension numbers the experts."""

    def __init__(self, *, width: int, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(count, width, 4 * width))
        self.down = nn.Parameter(torch.empty(count, 4 * width, width))
        for parameter in (self.up, self.down):
            nn.init.normal_(parameter, std=0.02)
        self.run: Callable[[Experts, torch.Tensor, torch.Tensor], torch.Tensor] = run_experts

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Tokens ``[n, width]``, the first ``counts[0]`` for expert 0, and so on; same shape."""
        return self.run(self, tokens, counts)


def run_experts(experts: Experts, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """All experts are here."""
    return expert_mlps(tokens, counts, experts.up, experts.down)


def expert_mlps(
    tokens: torch.Tensor, counts: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Expert by expert, those without a token too: their gradient is zero, and not missing."""
    parts = tokens.split(counts.tolist())
    done = [functional.gelu(p @ up[i]) @ down[i] for i, p in enumerate(parts)]
    return torch.cat(done)


class Mixture(nn.Module):
    """A mixture of experts in place of an MLP: top-1 routing without a capacity (no token is
    dropped), as in Switch Transformers (Fedus et al., 2021), weighted by the router."""

    def __init__(self, *, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = Experts(width=width, count=count)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float ``[batch, time, width]`` to the same shape."""
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(tokens).float().softmax(dim=-1).max(dim=-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.router.out_features)
        done = self.experts(tokens[order], counts)
        mixed: torch.Tensor = done[order.argsort()] * weights[:, None]
        return mixed.view_as(hidden)


class Block(nn.Module):
    """Causal self-attention and an MLP, each with a residual connection and dropout."""

    def __init__(self, *, width: int, heads: int, dropout: float, experts: int = 0) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mixture = Mixture(width=width, count=experts) if experts else None
        if self.mixture is None:
            self.mlp_up = nn.Linear(width, 4 * width, bias=False)
            self.mlp_down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.attend: Attend = causal_attention

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float ``[batch, time, width]`` to the same shape."""
        batch, time, _ = hidden.shape
        mixed = self.query_key_value(self.attention_norm(hidden))
        # Heads outermost, so that tensor parallelism cuts between heads; a rank has some of them.
        per_head = mixed.view(batch, time, -1, 3, self.head_width)
        query, key, value = per_head.permute(3, 0, 2, 1, 4)
        attended = self.attend(query, key, value).transpose(1, 2).flatten(2)
        hidden = hidden + self.dropout(self.attention_output(attended))
        return hidden + cast(torch.Tensor, self.dropout(self._mlp(self.mlp_norm(hidden))))

    def _mlp(self, normed: torch.Tensor) -> torch.Tensor:
        if self.mixture is not None:
            return cast(torch.Tensor, self.mixture(normed))
        return cast(torch.Tensor, self.mlp_down(functional.gelu(self.mlp_up(normed))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; ``tied`` shares embedding and output weights.

    ``experts`` replaces every second MLP with a mixture of that many. A pipeline stage sets
    ``embeds`` or ``predicts`` to False; a context-parallel rank sets ``first_position``.
    """

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        heads: int,
        context: int,
        dropout: float,
        tied: bool,
        experts: int = 0,
    ) -> None:
        super().__init__()
        self.embeds = self.predicts = True
        self.first_position = 0
        if width % heads:
            raise ValueError(f"width={width} does not divide into heads={heads}")
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleDict(
            {
                str(i): Block(
                    width=width, heads=heads, dropout=dropout, experts=experts if i % 2 else 0
                )
                for i in range(layers)
            }
        )
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Int64 ``[batch, time]`` with time <= context to logits ``[batch, time, 256]``.

        Where other stages embed or predict, hidden states ``[batch, time, width]`` instead.
        """
        hidden = self._embed(tokens) if self.embeds else tokens
        for block in self.layers.values():
            hidden = block(hidden)
        return cast(torch.Tensor, self.head(self.final_norm(hidden))) if self.predicts else hidden

    def blocks(self) -> list[Block]:
        """The layers that are here, in order."""
        return [cast(Block, block) for block in self.layers.values()]

    def mixtures(self) -> list[Mixture]:
        """The mixtures of experts in those layers."""
        return [block.mixture for block in self.blocks() if block.mixture is not None]

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        first, end = self.first_position, self.first_position + tokens.shape[1]
        positions = torch.arange(first, end, device=tokens.device)
        embedded = self.token_embedding(tokens) + self.position_embedding(positions)
        return cast(torch.Tensor, self.dropout(embedded))
