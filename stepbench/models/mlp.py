"""A deep and narrow classifier: many tiny kernels, so that launching them costs more than running them."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

from stepbench.arguments import integer_problem, number_problem, raise_problems


class ResidualBlock(nn.Module):
    """Add a normalized, rectified linear map to features (batch, width)."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features (batch, width), of the shape that came in."""
        return features + F.relu(self.linear(self.norm(features)))


class LitMLP(pl.LightningModule):
    """Learn classes from feature vectors (batch, num_features).

    A batch is `(features, labels)`, labels int64 (batch,). `depth` counts the residual blocks, `width` the
    features between them.
    """

    def __init__(
        self,
        *,
        num_features: int = 32,
        num_classes: int = 10,
        width: int = 32,
        depth: int = 24,
        learning_rate: float = 1e-3,
    ) -> None:
        raise_problems(
            integer_problem("num_features", num_features, minimum=1),
            integer_problem("num_classes", num_classes, minimum=2),
            integer_problem("width", width, minimum=2),
            integer_problem("depth", depth, minimum=1),
            number_problem("learning_rate", learning_rate, zero_allowed=False),
        )
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.num_features = num_features
        self.layers = nn.Sequential(
            nn.Linear(num_features, width),
            *(ResidualBlock(width=width) for _ in range(depth)),
            nn.LayerNorm(width),
            nn.Linear(width, num_classes),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (batch, num_classes) of features (batch, num_features)."""
        if features.ndim != 2 or features.shape[1] != self.num_features:
            raise ValueError(f"LitMLP was built for features (batch, {self.num_features}), got {tuple(features.shape)}")
        logits: torch.Tensor = self.layers(features)
        return logits

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Mean cross-entropy of the class [nat]."""
        features, labels = batch
        loss = F.cross_entropy(self(features), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam over all parameters."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
