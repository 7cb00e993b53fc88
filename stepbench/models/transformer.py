"""A small causal transformer that learns to predict the next token."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

from stepbench.arguments import integer_problem, number_problem, raise_problems


class LitTransformer(pl.LightningModule):
    """Learn the next token of sequences (batch, time), time <= `sequence_length`.

    A batch is `(inputs, targets)`, both int64 (batch, time), the targets one token ahead. `width` is the
    embedding size and must be a multiple of `num_heads`; `depth` counts the layers.
    """

    future: torch.Tensor
    positions: torch.Tensor

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        sequence_length: int = 64,
        width: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        learning_rate: float = 3e-4,
    ) -> None:
        raise_problems(
            integer_problem("vocab_size", vocab_size, minimum=2),
            integer_problem("sequence_length", sequence_length, minimum=1),
            integer_problem("width", width, minimum=1),
            integer_problem("depth", depth, minimum=1),
            integer_problem("num_heads", num_heads, minimum=1),
            number_problem("learning_rate", learning_rate, zero_allowed=False),
        )
        if width % num_heads != 0:
            raise ValueError(f"width must be a multiple of num_heads={num_heads}, got {width}")
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.sequence_length = sequence_length
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(sequence_length, width)
        layer = nn.TransformerEncoderLayer(
            width,
            num_heads,
            dim_feedforward=4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab_size)
        # True where attention is forbidden; boolean, so that no precision setting converts it.
        future = torch.ones(sequence_length, sequence_length, dtype=torch.bool).triu(diagonal=1)
        self.register_buffer("future", future, persistent=False)
        self.register_buffer("positions", torch.arange(sequence_length), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, time, vocab_size) for the token after each of `tokens`, int64 (batch, time)."""
        if tokens.ndim != 2 or tokens.is_floating_point() or tokens.shape[1] > self.sequence_length:
            raise ValueError(
                f"LitTransformer was built for integer tokens (batch, at most {self.sequence_length}), "
                f"got {tokens.dtype} {tuple(tokens.shape)}"
            )
        time = tokens.shape[1]
        hidden = self.token_embedding(tokens) + self.position_embedding(self.positions[:time])
        hidden = self.layers(hidden, mask=self.future[:time, :time], is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Mean cross-entropy of the next token [nat]."""
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
