"""Modules, data and command lines of people who use LightningCLI and have never heard of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI, LRSchedulerCallable, OptimizerCallable, SaveConfigCallback
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader, TensorDataset

CONSTRUCTED: list[str] = []
"""What has been constructed that a timing run must not construct, and which hooks were called."""

FEATURES = 4


def make_loader(**settings: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(512, FEATURES)), **settings)


class NoOptimizerModel(pl.LightningModule):
    """Leaves its optimizer to the configuration."""

    def __init__(self, hidden: int = 8, width: int = 1, name: str = "none") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.hidden, self.width, self.name = hidden, width, name
        self.net = torch.nn.Sequential(torch.nn.Linear(FEATURES, hidden), torch.nn.Linear(hidden, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).pow(2).mean()
        self.log("train_loss", loss)
        return loss


class Model(NoOptimizerModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class CallableModel(NoOptimizerModel):
    """Takes its optimizer and its schedule as callables."""

    def __init__(
        self,
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.1),
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ) -> None:
        super().__init__()
        self.make_optimizer, self.make_scheduler = optimizer, scheduler

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}


class LinkedOptimizerModel(NoOptimizerModel):
    """Gets the text of its optimizers from the command line that it belongs to."""

    def __init__(self, first_init: dict, second_init: dict) -> None:
        super().__init__()
        self.first_init, self.second_init = first_init, second_init

    def configure_optimizers(self) -> Any:
        from lightning.pytorch.cli import instantiate_class

        return instantiate_class(self.parameters(), self.first_init)


class OwnLoaderModel(Model):
    """Has its loader itself, and no data module."""

    def __init__(self, batch_size: int = 4, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def train_dataloader(self) -> DataLoader:
        return make_loader(batch_size=self.batch_size, num_workers=self.num_workers)


class BrokenModel(Model):
    def __init__(self, hidden: int = 8) -> None:
        raise TypeError("the user's own mistake")


class ClassesModel(Model):
    """Needs to be told how many classes its data have, which only the data know once they are there."""

    def __init__(self, num_classes: int, batch_size: int = 3) -> None:
        super().__init__()
        self.num_classes, self.batch_size = num_classes, batch_size


class ChainedModel(Model):
    def __init__(self) -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error


class Data(pl.LightningDataModule):
    num_classes = 7

    def __init__(
        self,
        batch_size: int = 16,
        num_workers: int = 0,
        pin_memory: bool = False,
        root: str = "data",
        max_epochs: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size, self.num_workers, self.pin_memory = batch_size, num_workers, pin_memory
        self.root, self.max_epochs = root, max_epochs

    def train_dataloader(self) -> DataLoader:
        return make_loader(batch_size=self.batch_size, num_workers=self.num_workers)


class DictData(pl.LightningDataModule):
    def __init__(self, loader: dict[str, Any]) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> DataLoader:
        return make_loader(**self.loader)


@dataclass
class LoaderOptions:
    batch_size: int = 8
    num_workers: int = 0


class DataclassData(pl.LightningDataModule):
    def __init__(self, loader: LoaderOptions = LoaderOptions()) -> None:  # noqa: B008
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> DataLoader:
        return make_loader(batch_size=self.loader.batch_size, num_workers=self.loader.num_workers)


class LoaderConfig:
    def __init__(self, batch_size: int = 2, num_workers: int = 0) -> None:
        self.batch_size, self.num_workers = batch_size, num_workers


class NestedData(pl.LightningDataModule):
    def __init__(self, loader_config: LoaderConfig) -> None:
        super().__init__()
        self.loader_config = loader_config

    def train_dataloader(self) -> DataLoader:
        return make_loader(batch_size=self.loader_config.batch_size)


class TwoLoadersData(pl.LightningDataModule):
    """Has two loaders of equal standing."""

    def __init__(self, labeled: LoaderConfig, unlabeled: LoaderConfig) -> None:
        super().__init__()
        self.labeled, self.unlabeled = labeled, unlabeled

    def train_dataloader(self) -> DataLoader:
        return make_loader(batch_size=self.labeled.batch_size)


class PathData(Data):
    """Takes a path, which may be relative to the file that names it."""

    def __init__(self, extra: Optional[LoaderConfig] = None, batch_size: int = 16) -> None:  # noqa: UP045
        super().__init__(batch_size=batch_size)
        self.extra = extra


class CountingLogger(Logger):
    """Would open a connection."""

    def __init__(self, project: str = "p") -> None:
        super().__init__()
        CONSTRUCTED.append("CountingLogger")

    @property
    def name(self) -> str:
        return "counting"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        CONSTRUCTED.append("log_metrics")

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        CONSTRUCTED.append("log_hyperparams")


class UserCallback(pl.Callback):
    def __init__(self, every: int = 1) -> None:
        self.every = every


class UserCheckpoint(pl.callbacks.ModelCheckpoint):
    def __init__(self) -> None:
        super().__init__()
        CONSTRUCTED.append("UserCheckpoint")


class UserTrainerClass(pl.Trainer):
    def __init__(self, *args: Any, tag: str = "plain", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tag = tag


class UserCLI(LightningCLI):
    """Has most of what people add to theirs."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_lightning_class_args(UserCallback, "my_cb")
        parser.set_defaults({"my_cb.every": 5})
        parser.add_lightning_class_args(pl.callbacks.EarlyStopping, "stopping")
        parser.set_defaults({"stopping.monitor": "train_loss"})
        parser.add_argument("--note", default="none")
        parser.link_arguments("data.init_args.batch_size", "model.init_args.width")
        parser.link_arguments("trainer.max_epochs", "data.init_args.max_epochs")

    def before_instantiate_classes(self) -> None:
        CONSTRUCTED.append("before_instantiate_classes")
        self.config.fit.model.init_args.name = f"note {self.config.fit.note}"

    def after_instantiate_classes(self) -> None:
        self.trainer.logger.log_hyperparams({"note": self.config_init.fit.note})
        self.trainer.logger.experiment.config.update({"a": 1})
        CONSTRUCTED.append(f"log_dir {Path(self.trainer.log_dir).is_dir()}")

    def before_fit(self) -> None:
        CONSTRUCTED.append("before_fit")
        self.model.seen_epochs = self.trainer.max_epochs
        self.trainer.callbacks.append(UserCallback(every=77))

    def after_fit(self) -> None:
        CONSTRUCTED.append("after_fit")


class FixedCLI(LightningCLI):
    """Is made for one model and one data module and takes no arguments."""

    def __init__(self) -> None:
        super().__init__(NoOptimizerModel, Data, trainer_class=UserTrainerClass, seed_everything_default=3)


class TrainerCLI(LightningCLI):
    """Makes the trainer in a way of its own."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return super().instantiate_trainer(logger=CountingLogger(), gradient_clip_val=0.25, **kwargs)


class OwnTrainerCLI(LightningCLI):
    """Makes the trainer without asking anyone."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return pl.Trainer(accelerator="cpu", logger=False, callbacks=[UserCallback(every=9)], max_epochs=2)


class DefaultsCLI(LightningCLI):
    """Has callbacks and trainer settings that no file can take off."""

    def __init__(self, model_class: Any = None, args: Any = None) -> None:
        super().__init__(
            model_class,
            args=args,
            trainer_defaults={"callbacks": [UserCallback(every=3), UserCheckpoint()], "gradient_clip_val": 0.5},
        )


class ScriptCLI(LightningCLI):
    """Has no subcommands: its script trains itself, here at once."""

    def __init__(self) -> None:
        super().__init__(run=False)
        self.trainer.fit(self.model, datamodule=self.datamodule)
        CONSTRUCTED.append("trained")

    def before_instantiate_classes(self) -> None:
        self.config.model.init_args.name = "flat"


class LinkedCLI(LightningCLI):
    """Has one batch size of its own, which is linked to those of data and model, and a link on instantiation."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_argument("--batch_size", type=int, default=6)
        parser.link_arguments("batch_size", "data.init_args.batch_size")
        parser.link_arguments("batch_size", "model.init_args.batch_size")
        parser.link_arguments("data.num_classes", "model.init_args.num_classes", apply_on="instantiate")


class ComputedCLI(LightningCLI):
    """Computes the batch size of the data."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_argument("--total", type=int, default=32)
        parser.link_arguments("total", "data.init_args.batch_size", compute_fn=lambda total: total // 4)


class OptimizersCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_optimizer_args(nested_key="first", link_to="model.init_args.first_init")
        parser.add_optimizer_args(torch.optim.Adam, nested_key="second", link_to="model.init_args.second_init")


class OmegaCLI(LightningCLI):
    """Resolves each file by itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(parser_kwargs={"parser_mode": "omegaconf", "default_env": False}, **kwargs)


class FilesCLI(LightningCLI):
    """Reads a file of its own before any other, and has settings for the parsers of other subcommands."""

    def __init__(self) -> None:
        own = str(Path(__file__).with_name("defaults.yaml"))
        super().__init__(parser_kwargs={"fit": {"default_config_files": [own]}, "test": {"default_env": False}})


def build_trainer(max_epochs: int = 5, callbacks: Any = None) -> pl.Trainer:
    raise AssertionError("no trainer is to be made")


build_trainer.__annotations__.update({"max_epochs": int, "callbacks": Any, "return": pl.Trainer})


class FunctionCLI(LightningCLI):
    """Has a function that makes its trainer."""

    def __init__(self) -> None:
        super().__init__(trainer_class=build_trainer)


class LoudSaver(SaveConfigCallback):
    pass


class SavingCLI(LightningCLI):
    """Saves its configuration in a way of its own, and parses in a way of its own too."""

    def __init__(self, save_config_callback: Any = LoudSaver, **kwargs: Any) -> None:
        super().__init__(save_config_callback=save_config_callback, **kwargs)

    def parse_arguments(self, parser: Any, args: Any) -> None:
        super().parse_arguments(parser, args)
        self.config.fit.model.init_args.name = "parsed"


class NeedyCLI(LightningCLI):
    def __init__(self, project: str, team: str) -> None:
        super().__init__()


def make_model(hidden: int = 3) -> Model:
    """Makes a model whose class is not in the file."""
    return Model(hidden=hidden)


make_model.__annotations__["return"] = Model  # as it is where annotations are not text


class KeywordData(pl.LightningDataModule):
    """Takes whatever its loader takes, and loaders of other stages as a list."""

    def __init__(self, others: Optional[list[dict[str, Any]]] = None, **loader: Any) -> None:  # noqa: UP045
        super().__init__()
        self.others, self.loader = others, loader

    def train_dataloader(self) -> DataLoader:
        return make_loader(**self.loader)
