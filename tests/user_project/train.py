"""Where it began: everything in one file."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class LitNet(pl.LightningModule):
    """Brings its own loader, whose batch size is written into it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        total = self.trainer.estimated_stepping_batches
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total), "interval": "step"}
        ]

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(640, 8), torch.randn(640, 1)), batch_size=10, shuffle=True)


if __name__ == "__main__":
    pl.Trainer(max_epochs=3).fit(LitNet(64))
