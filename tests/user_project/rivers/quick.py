"""Shortcuts for trying things out."""


def use_few_hours(model, datamodule) -> None:
    """Reads 400 hours only."""
    datamodule.hparams.hours = 400
