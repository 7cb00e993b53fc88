"""Encoder and decoder in one network."""

from __future__ import annotations

import torch
from torch import nn

from stepbench.models.autoencoder.decoder import Decoder
from stepbench.models.autoencoder.encoder import Encoder


class Autoencoder(nn.Module):
    """Reconstruct images (batch, channels, size, size) through a latent vector of `latent_dim` numbers."""

    def __init__(self, *, channels: int, image_size: int, width: int, latent_dim: int) -> None:
        super().__init__()
        self.encoder = Encoder(channels=channels, image_size=image_size, width=width, latent_dim=latent_dim)
        self.decoder = Decoder(channels=channels, image_size=image_size, width=width, latent_dim=latent_dim)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Reconstructions in 0..1, of the shape of `images`."""
        reconstructions: torch.Tensor = self.decoder(self.encoder(images))
        return reconstructions
