"""Training of the autoencoder."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from torch.nn import functional as F

from stepbench.arguments import integer_problem, number_problem, raise_problems
from stepbench.models.autoencoder.model import Autoencoder


class LitAutoencoder(pl.LightningModule):
    """Learn to reconstruct images (batch, channels, image_size, image_size) in 0..1.

    A batch is the images alone or a sequence that begins with them, as `(images, labels)`. `width` is the
    number of feature maps after the first convolution; the cost of a step grows with its square.
    """

    def __init__(
        self,
        *,
        channels: int = 1,
        image_size: int = 28,
        width: int = 32,
        latent_dim: int = 64,
        learning_rate: float = 1e-3,
    ) -> None:
        raise_problems(
            integer_problem("channels", channels, minimum=1),
            integer_problem("image_size", image_size, minimum=1),
            integer_problem("width", width, minimum=1),
            integer_problem("latent_dim", latent_dim, minimum=1),
            number_problem("learning_rate", learning_rate, zero_allowed=False),
        )
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.image_shape = (channels, image_size, image_size)
        self.model = Autoencoder(channels=channels, image_size=image_size, width=width, latent_dim=latent_dim)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Reconstructions in 0..1, of the shape of `images` (batch, channels, image_size, image_size)."""
        if images.shape[1:] != self.image_shape:
            raise ValueError(
                f"LitAutoencoder was built for images (batch, {', '.join(map(str, self.image_shape))}), "
                f"got {tuple(images.shape)}"
            )
        reconstructions: torch.Tensor = self.model(images)
        return reconstructions

    def training_step(self, batch: torch.Tensor | Sequence[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Mean squared error of the reconstruction."""
        images = batch if isinstance(batch, torch.Tensor) else batch[0]
        loss = F.mse_loss(self(images), images)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam over all parameters."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
