"""The second half of the autoencoder: latent vector to image."""

from __future__ import annotations

import torch
from torch import nn


class Decoder(nn.Module):
    """Map latent vectors (batch, latent_dim) to images (batch, channels, size, size) in 0..1."""

    def __init__(self, *, channels: int, image_size: int, width: int, latent_dim: int) -> None:
        super().__init__()
        half_size = (image_size + 1) // 2
        quarter_size = (half_size + 1) // 2
        self.layers = nn.Sequential(
            nn.Linear(latent_dim, 2 * width * quarter_size**2),
            nn.ReLU(),
            nn.Unflatten(1, (2 * width, quarter_size, quarter_size)),
            _double(2 * width, width, half_size),
            nn.ReLU(),
            _double(width, channels, image_size),
            nn.Sigmoid(),
        )

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        """Images (batch, channels, size, size) in 0..1 of latent vectors (batch, latent_dim)."""
        images: torch.Tensor = self.layers(latent)
        return images


def _double(in_channels: int, out_channels: int, out_size: int) -> nn.ConvTranspose2d:
    """Transposed convolution from a side of ceil(out_size / 2) to `out_size`: undoes the encoder's halving."""
    # Without output padding the side is 2 * ceil(out_size / 2) - 1: one short of an even size.
    return nn.ConvTranspose2d(
        in_channels, out_channels, kernel_size=3, stride=2, padding=1, output_padding=1 - out_size % 2
    )
