"""The first half of the autoencoder: image to latent vector."""

from __future__ import annotations

import torch
from torch import nn


class Encoder(nn.Module):
    """Map images (batch, channels, size, size) to latent vectors (batch, latent_dim).

    Two convolutions of stride 2, each rounding the side up to half its length, and a linear layer.
    """

    def __init__(self, *, channels: int, image_size: int, width: int, latent_dim: int) -> None:
        super().__init__()
        half_size = (image_size + 1) // 2
        quarter_size = (half_size + 1) // 2
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * quarter_size**2, latent_dim),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Latent vectors (batch, latent_dim) of images (batch, channels, size, size)."""
        latent: torch.Tensor = self.layers(images)
        return latent
