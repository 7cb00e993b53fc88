"""The built-in data modules give the batches they promise, and say what is wrong where they cannot."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from omegaconf import OmegaConf

from stepbench.data.digits import Digits
from stepbench.data.image_folder import ImageFolder
from stepbench.data.synthetic import POOL_SIZE, SyntheticFeatures, SyntheticImages, SyntheticTokens
from stepbench.models.autoencoder import LitAutoencoder

CONF = Path(__file__).parents[1] / "conf"
SYNTHETIC = [SyntheticImages, SyntheticTokens, SyntheticFeatures]
CONFS = {
    "synthetic_images": SyntheticImages,
    "synthetic_tokens": SyntheticTokens,
    "synthetic_features": SyntheticFeatures,
    "digits": Digits,
    "image_folder": ImageFolder,
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def read_batches(data: Any) -> list[Any]:
    data.setup("fit")
    return list(data.train_dataloader())


def read_samples(data: Any) -> list[Any]:
    data.setup("fit")
    return [data.dataset[index] for index in range(len(data.dataset))]


@pytest.fixture
def pillow_image() -> Any:
    pytest.importorskip("PIL")
    return importlib.import_module("PIL.Image")


@pytest.fixture
def image_root(tmp_path: Path, pillow_image: Any) -> Path:
    """Six images in three classes: red PNG, green JPEG and grey PNG, with endings in mixed case."""
    for name, mode, colour in [
        ("cat/0.png", "RGB", (255, 0, 0)),
        ("cat/more/deep.PNG", "RGBA", (255, 0, 0, 255)),
        ("dog/0.jpg", "RGB", (0, 255, 0)),
        ("dog/1.JPEG", "RGB", (0, 255, 0)),
        ("dog/2.JpG", "RGB", (0, 255, 0)),
        ("emu/0.png", "L", 51),
    ]:
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pillow_image.new(mode, (20, 12), colour).save(path)
    (tmp_path / "images" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "images" / "cat" / "._0.png").write_text("what some systems leave beside a file")
    return tmp_path / "images"


def test_synthetic_images_have_the_shape_type_and_range_asked_for() -> None:
    images, labels = read_batches(
        SyntheticImages(batch_size=64, num_samples=64, channels=3, image_size=12, num_classes=4)
    )[0]
    assert images.shape == (64, 3, 12, 12) and images.dtype == torch.float32
    assert 0 <= images.min() < 0.1 and 0.9 < images.max() <= 1
    assert labels.shape == (64,) and labels.dtype == torch.int64
    assert set(labels.tolist()) == {0, 1, 2, 3}


def test_synthetic_targets_are_the_inputs_one_token_ahead() -> None:
    inputs, targets = read_batches(SyntheticTokens(batch_size=64, num_samples=64, vocab_size=5, sequence_length=20))[0]
    assert inputs.shape == targets.shape == (64, 20)
    assert inputs.dtype == targets.dtype == torch.int64
    assert set(inputs.unique().tolist()) == {0, 1, 2, 3, 4}
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_synthetic_features_have_the_shape_and_type_asked_for() -> None:
    features, labels = read_batches(SyntheticFeatures(batch_size=64, num_samples=64, num_features=7, num_classes=3))[0]
    assert features.shape == (64, 7) and features.dtype == torch.float32
    assert labels.shape == (64,) and labels.dtype == torch.int64
    assert set(labels.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("data_class", SYNTHETIC)
def test_synthetic_samples_depend_on_the_seed_alone(data_class: Any) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = read_samples(data_class(batch_size=4, num_samples=POOL_SIZE))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = read_samples(data_class(batch_size=8, num_samples=3))
    other = read_samples(data_class(batch_size=4, num_samples=POOL_SIZE, seed=1))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=False))
    assert all(torch.equal(torch.as_tensor(a[1]), torch.as_tensor(b[1])) for a, b in zip(first, again, strict=False))
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("data_class", SYNTHETIC)
def test_synthetic_samples_of_the_pool_differ_and_repeat_up_to_num_samples(data_class: Any) -> None:
    samples = [sample[0] for sample in read_samples(data_class(batch_size=4, num_samples=POOL_SIZE + 2))]
    assert len(samples) == POOL_SIZE + 2
    assert len({tuple(sample.flatten().tolist()) for sample in samples}) == POOL_SIZE
    assert torch.equal(samples[POOL_SIZE + 1], samples[1])


def test_synthetic_samples_end_after_num_samples() -> None:
    data = SyntheticImages(batch_size=4, num_samples=3)
    data.setup("fit")
    assert len(data.dataset) == 3
    for index in (3, -1):
        with pytest.raises(IndexError):
            data.dataset[index]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("data_class", SYNTHETIC)
def test_no_samples_give_no_batches(data_class: Any, num_workers: int) -> None:
    assert read_batches(data_class(batch_size=4, num_samples=0, num_workers=num_workers)) == []


@pytest.mark.parametrize(
    ("num_samples", "drop_last", "sizes"),
    [
        (10, True, [4, 4]),
        (10, False, [4, 4, 2]),
        (8, True, [4, 4]),
        (3, True, [3]),
        (3, False, [3]),
    ],
)
def test_last_batch_is_dropped_only_where_it_is_small_and_not_the_only_one(
    num_samples: int, drop_last: bool, sizes: list[int]
) -> None:
    batches = read_batches(SyntheticFeatures(batch_size=4, num_samples=num_samples, drop_last=drop_last))
    assert [len(labels) for _, labels in batches] == sizes


def test_batch_size_set_on_the_data_module_reaches_the_batches() -> None:
    data = SyntheticFeatures(batch_size=4, num_samples=16)
    data.batch_size = 8
    assert [len(labels) for _, labels in read_batches(data)] == [8, 8]


def test_training_order_is_shuffled() -> None:
    torch.manual_seed(0)
    data = SyntheticFeatures(batch_size=POOL_SIZE, num_samples=POOL_SIZE)
    features, _ = read_batches(data)[0]
    in_order = torch.stack([sample[0] for sample in read_samples(data)])
    assert not torch.equal(features, in_order)
    assert torch.equal(features.sort(dim=0).values, in_order.sort(dim=0).values)


@pytest.mark.parametrize(("num_workers", "kept"), [(0, False), (1, True)])
def test_persistent_workers_without_workers_are_no_error(num_workers: int, kept: bool) -> None:
    data = SyntheticFeatures(batch_size=4, num_samples=8, num_workers=num_workers, persistent_workers=True)
    data.setup("fit")
    loader = data.train_dataloader()
    assert loader.persistent_workers is kept
    assert len(list(loader)) == 2


def test_loader_settings_reach_the_loader() -> None:
    data = SyntheticFeatures(batch_size=4, num_samples=8, num_workers=2, pin_memory=True)
    data.setup("fit")
    loader = data.train_dataloader()
    assert (loader.batch_size, loader.num_workers, loader.pin_memory) == (4, 2, True)
    assert loader.persistent_workers is False


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("data_class", SYNTHETIC)
def test_load_s_is_a_lower_bound_on_the_time_per_sample(data_class: Any, num_workers: int) -> None:
    data = data_class(batch_size=4, num_samples=8, load_s=0.01, num_workers=num_workers)
    data.setup("fit")
    start = perf_counter()
    batches = list(data.train_dataloader())
    assert perf_counter() - start >= 8 * 0.01
    assert [len(batch[0]) for batch in batches] == [4, 4]


@pytest.mark.parametrize("data_class", [*SYNTHETIC, Digits, ImageFolder])
def test_every_argument_out_of_range_is_named_with_its_value(data_class: Any, tmp_path: Path) -> None:
    good: dict[str, Any] = {"batch_size": 4}
    if data_class is ImageFolder:
        good["root"] = tmp_path
    data_class(**good)
    switches = {"root", "pin_memory", "persistent_workers", "drop_last"}
    for argument in set(inspect.signature(data_class).parameters) - switches:
        for wrong in (-1, True, "3", None, float("nan")):
            with pytest.raises(ValueError, match=f"^{argument} must be .* got {wrong!r}$"):
                data_class(**{**good, argument: wrong})


def test_digits_are_real_images_with_their_labels() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    original = datasets.load_digits()
    data = Digits(batch_size=32)
    images, labels = read_batches(data)[0]
    assert images.shape == (32, 1, 8, 8) and images.dtype == torch.float32
    assert labels.shape == (32,) and labels.dtype == torch.int64
    samples = read_samples(data)
    assert len(samples) == 1797
    assert all(image.min() >= 0 and image.max() <= 1 for image, _ in samples)
    assert torch.equal(samples[5][0][0] * 16, torch.as_tensor(original.images[5], dtype=torch.float32))
    assert [label for _, label in samples] == original.target.tolist()


def test_digits_are_resized_and_their_grey_repeated_where_asked() -> None:
    pytest.importorskip("sklearn")
    images, _ = read_batches(Digits(batch_size=16, image_size=20, channels=3))[0]
    assert images.shape == (16, 3, 20, 20)
    assert images.min() >= 0 and images.max() > 0.9 and images.max() <= 1
    assert torch.equal(images[:, 0], images[:, 2])


def test_missing_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"scikit-learn.*stepbench\[digits\]"):
        Digits(batch_size=4).setup("fit")


def test_missing_pillow_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"Pillow.*stepbench\[images\]"):
        ImageFolder(root=tmp_path, batch_size=4).setup("fit")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_image_folder_decodes_png_and_jpeg_in_any_process(image_root: Path, num_workers: int) -> None:
    data = ImageFolder(root=image_root, batch_size=2, image_size=9, num_workers=num_workers, persistent_workers=True)
    batches = read_batches(data)
    assert [images.shape for images, _ in batches] == [(2, 3, 9, 9)] * 3
    images = torch.cat([images for images, _ in batches])
    labels = torch.cat([labels for _, labels in batches])
    assert images.dtype == torch.float32 and labels.dtype == torch.int64
    assert sorted(labels.tolist()) == [0, 0, 1, 1, 1, 2]
    expected = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0.2, 0.2, 0.2]])[labels]
    # JPEG is lossy: pure green comes back within two of 255 steps.
    torch.testing.assert_close(images.mean(dim=(2, 3)), expected, atol=0.01, rtol=0)


def test_image_folder_decodes_in_the_workers(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_process_id(path: Path, *, channels: int, image_size: int) -> torch.Tensor:
        return torch.tensor(os.getpid())

    monkeypatch.setattr("stepbench.data.image_folder.read_image", read_process_id)
    for num_workers, here in [(0, True), (1, False)]:
        data = ImageFolder(root=image_root, batch_size=6, num_workers=num_workers)
        data.setup("fit")
        loader = data.train_dataloader()
        if num_workers:
            loader.multiprocessing_context = "fork"
        process_ids, _ = next(iter(loader))
        assert (set(process_ids.tolist()) == {os.getpid()}) is here


def test_image_folder_keeps_rows_columns_and_channels_apart(tmp_path: Path, pillow_image: Any) -> None:
    image = pillow_image.new("RGB", (4, 4))
    image.putpixel((3, 1), (10, 20, 30))
    image.save(tmp_path / "a.png")
    [(pixels, label)] = read_samples(ImageFolder(root=tmp_path, batch_size=1, image_size=4))
    expected = torch.zeros(3, 4, 4)
    expected[:, 1, 3] = torch.tensor([10.0, 20.0, 30.0]) / 255
    torch.testing.assert_close(pixels, expected)
    assert label == 0


def test_image_folder_turns_colour_to_grey_where_asked(image_root: Path) -> None:
    [(images, labels)] = read_batches(ImageFolder(root=image_root, batch_size=6, channels=1, image_size=5))
    assert images.shape == (6, 1, 5, 5)
    # Luma of pure red and pure green (ITU-R BT.601), and the grey as it was.
    expected = torch.tensor([0.299, 0.587, 0.2])[labels]
    torch.testing.assert_close(images.mean(dim=(1, 2, 3)), expected, atol=0.01, rtol=0)


def test_files_directly_in_root_are_class_0(image_root: Path, pillow_image: Any) -> None:
    pillow_image.new("L", (4, 4)).save(image_root / "zebra.png")
    data = ImageFolder(root=image_root, batch_size=1)
    data.setup("fit")
    labels = {
        path.relative_to(data.root).parts[0]: label
        for path, label in zip(data.dataset.paths, data.dataset.labels, strict=True)
    }
    assert labels == {"zebra.png": 0, "cat": 1, "dog": 2, "emu": 3}


def test_missing_root_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="data.root") as caught:
        ImageFolder(root=tmp_path / "absent", batch_size=4)
    assert str(tmp_path / "absent") in str(caught.value)


def test_root_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file.png").write_bytes(b"")
    with pytest.raises(ValueError, match="data.root.* is a file") as caught:
        ImageFolder(root=tmp_path / "file.png", batch_size=4)
    assert str(tmp_path / "file.png") in str(caught.value)


@pytest.mark.parametrize("root", ["", None])
def test_empty_root_does_not_mean_the_working_directory(root: Any) -> None:
    with pytest.raises(ValueError, match=f"data.root must be .* got {root!r}"):
        ImageFolder(root=root, batch_size=4)


def test_root_without_images_is_named_with_the_endings(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="data.root has no images.*png.*jpeg") as caught:
        ImageFolder(root=tmp_path, batch_size=4).setup("fit")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["text", "empty", "truncated"])
def test_corrupt_image_is_named(image_root: Path, kind: str, num_workers: int) -> None:
    corrupt = image_root / "dog" / "0.jpg"
    whole = corrupt.read_bytes()
    corrupt.write_bytes({"text": b"no image", "empty": b"", "truncated": whole[: len(whole) // 2]}[kind])
    with pytest.raises(ValueError, match="data.root: cannot decode") as caught:
        read_batches(ImageFolder(root=image_root, batch_size=6, num_workers=num_workers))
    assert str(corrupt) in str(caught.value)
    # The error's frames hold the loader's iterator in a cycle; torch takes 5 s to end workers whose iterator
    # the garbage collector finds, and milliseconds to end those whose iterator is let go.
    traceback.clear_frames(caught.tb)


@pytest.mark.parametrize("name", CONFS)
def test_conf_gives_every_argument_the_default_of_the_constructor(name: str) -> None:
    conf: Any = OmegaConf.create({"batch_size": 4, "data": OmegaConf.load(CONF / "data" / f"{name}.yaml")})
    if name == "image_folder":
        assert OmegaConf.is_missing(conf.data, "root")
        conf.data.root = "somewhere"
    arguments: Any = OmegaConf.to_container(conf.data, resolve=True)
    module, _, class_name = arguments.pop("_target_").rpartition(".")
    assert getattr(importlib.import_module(module), class_name) is CONFS[name]
    given = {"batch_size": 4, "root": "somewhere"}
    parameters = inspect.signature(CONFS[name]).parameters
    assert arguments == {key: given.get(key, value.default) for key, value in parameters.items()}


@pytest.mark.parametrize("name", ["synthetic_images", "digits", "image_folder"])
def test_autoencoder_conf_fits_every_data_conf_of_images(name: str, request: pytest.FixtureRequest) -> None:
    conf: Any = OmegaConf.create(
        {
            "batch_size": 4,
            "model": OmegaConf.load(CONF / "model" / "autoencoder.yaml"),
            "data": OmegaConf.load(CONF / "data" / f"{name}.yaml"),
        }
    )
    if name == "image_folder":
        conf.data.root = str(request.getfixturevalue("image_root"))
    if name == "digits":
        pytest.importorskip("sklearn")
    arguments: Any = OmegaConf.to_container(conf, resolve=True)
    del arguments["model"]["_target_"], arguments["data"]["_target_"]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = LitAutoencoder(**arguments["model"])
    before = copy.deepcopy(module.state_dict())
    trainer.fit(module, datamodule=CONFS[name](**arguments["data"]))
    assert trainer.global_step == 1
    assert all(not torch.equal(value, before[key]) for key, value in module.state_dict().items())
