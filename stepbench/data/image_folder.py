"""Real image files, decoded where they are loaded: in the DataLoader's workers where there are any."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from stepbench.arguments import choice_problem, integer_problem, raise_problems
from stepbench.data.loading import LoaderSettings, build_train_loader

if TYPE_CHECKING:
    from types import ModuleType

ENDINGS = (".png", ".jpg", ".jpeg")


class ImageFolder(pl.LightningDataModule):
    """Batches (images, labels): float32 (batch, channels, image_size, image_size) in 0..1, int64 (batch,).

    Takes every PNG and JPEG file at any depth under `root` but hidden ones, and resizes it to a square, its
    proportions not kept. The class is the name of the first-level subdirectory, numbered in sorted order;
    files directly in `root` are a class of their own, number 0. Needs Pillow.
    """

    def __init__(
        self,
        *,
        root: str | os.PathLike[str],
        batch_size: int,
        channels: int = 3,
        image_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        drop_last: bool = True,
        load_s: float = 0.0,
    ) -> None:
        raise_problems(
            None if root else f"data.root must be a directory of images, got {root!r}",
            integer_problem("batch_size", batch_size, minimum=1),
            choice_problem("channels", channels, accepted=(1, 3)),
            integer_problem("image_size", image_size, minimum=1),
        )
        super().__init__()
        self.root = Path(root).expanduser().absolute()
        self.batch_size = batch_size
        self.channels = channels
        self.image_size = image_size
        self.settings = LoaderSettings(
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            drop_last=drop_last,
            load_s=load_s,
        )
        if not self.root.exists():
            raise FileNotFoundError(f"data.root must be a directory of images; there is none at {self.root}")
        if not self.root.is_dir():
            raise ValueError(f"data.root must be a directory of images; {self.root} is a file")

    def setup(self, stage: str) -> None:
        """Find the images; raises ValueError where there are none, ImportError where Pillow is missing."""
        _import_pillow_image()
        paths = find_images(self.root)
        if not paths:
            raise ValueError(f"data.root has no images: no file ending in {', '.join(ENDINGS)} in {self.root}")
        self.dataset = ImageFolderDataset(
            paths, label_images(self.root, paths), channels=self.channels, image_size=self.image_size
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """The shuffling loader."""
        return build_train_loader(self.dataset, batch_size=self.batch_size, settings=self.settings)


class ImageFolderDataset(Dataset[Any]):
    """Pairs (image, label), decoded on access: float32 (channels, image_size, image_size) in 0..1, int."""

    def __init__(self, paths: list[Path], labels: list[int], *, channels: int, image_size: int) -> None:
        assert len(paths) == len(labels)
        self.paths = paths
        self.labels = labels
        self.channels = channels
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = read_image(self.paths[index], channels=self.channels, image_size=self.image_size)
        return image, self.labels[index]


def find_images(root: Path) -> list[Path]:
    """PNG and JPEG files at any depth under `root`, sorted, links followed, hidden files left out."""
    return sorted(
        Path(directory, name)
        for directory, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.lower().endswith(ENDINGS) and not name.startswith(".")
    )


def label_images(root: Path, paths: list[Path]) -> list[int]:
    """For each path the number of its first-level subdirectory under `root`, in sorted order."""
    # A file directly in root is of class "", which sorts before every name.
    classes = [path.relative_to(root).parts[0] if path.parent != root else "" for path in paths]
    numbers = {name: number for number, name in enumerate(sorted(set(classes)))}
    return [numbers[name] for name in classes]


def read_image(path: Path, *, channels: int, image_size: int) -> torch.Tensor:
    """One file as float32 (channels, image_size, image_size) in 0..1.

    Raises ValueError naming the file where it cannot be decoded.
    """
    pillow_image = _import_pillow_image()
    try:
        with pillow_image.open(path) as image:
            # Bilinear rather than the default bicubic: cheaper, and nobody looks at the result.
            resized = image.convert("RGB" if channels == 3 else "L").resize(
                (image_size, image_size), pillow_image.Resampling.BILINEAR
            )
    # A broken file makes Pillow's decoders raise errors of many types, some of them undocumented.
    except Exception as error:
        raise ValueError(f"data.root: cannot decode the image {path}: {error}") from error
    pixels = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)
    return pixels.view(image_size, image_size, channels).permute(2, 0, 1).contiguous().float().div_(255)


def _import_pillow_image() -> ModuleType:
    """Module PIL.Image, imported on first use because Pillow is an optional dependency."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("data=image_folder needs Pillow; install it with: pip install 'stepbench[images]'") from error
    return Image
