"""A convolutional autoencoder; encoder and decoder stand in their own files, as in a real project."""

from stepbench.models.autoencoder.module import LitAutoencoder

__all__ = ["LitAutoencoder"]
