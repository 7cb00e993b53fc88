"""Where the time of a PyTorch Lightning training step goes, and how it scales."""

__version__ = "0.1.0"
