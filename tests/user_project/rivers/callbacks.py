"""What watches a training."""

import lightning.pytorch as pl


class CountBatches(pl.Callback):
    """Counts."""

    def __init__(self, every: int = 100) -> None:
        self.every = every
        self.num_batches = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.num_batches += 1
