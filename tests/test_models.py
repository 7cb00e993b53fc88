"""The built-in models train: every parameter gets a gradient and is changed by a step."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from omegaconf import OmegaConf

from stepbench.data.synthetic import SyntheticFeatures, SyntheticImages, SyntheticTokens
from stepbench.models.autoencoder import LitAutoencoder
from stepbench.models.mlp import LitMLP
from stepbench.models.transformer import LitTransformer

CONF = Path(__file__).parents[1] / "conf"
MODELS = {
    "autoencoder": (LitAutoencoder, SyntheticImages),
    "transformer": (LitTransformer, SyntheticTokens),
    "mlp": (LitMLP, SyntheticFeatures),
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class GradientRecorder(pl.Callback):
    """Keeps the gradients that the first optimizer step saw."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor | None] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if not self.gradients:
            self.gradients = {name: copy.deepcopy(p.grad) for name, p in module.named_parameters()}


def train(module: pl.LightningModule, data: Any, *, steps: int = 1, precision: Any = 32) -> GradientRecorder:
    recorder = GradientRecorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder],
    )
    trainer.fit(module, data)
    assert trainer.global_step == steps
    return recorder


@pytest.mark.parametrize("name", MODELS)
def test_one_step_gives_every_parameter_a_gradient_and_changes_it(name: str) -> None:
    torch.manual_seed(0)
    model_class, data_class = MODELS[name]
    module = model_class()
    before = {key: value.clone() for key, value in module.named_parameters()}

    recorder = train(module, data_class(batch_size=8))

    assert set(recorder.gradients) == set(before)
    for key, gradient in recorder.gradients.items():
        assert gradient is not None and gradient.isfinite().all() and gradient.any(), key
    for key, value in module.named_parameters():
        assert not torch.equal(value, before[key]), key


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("name", MODELS)
def test_models_train_in_other_precisions(name: str, precision: str) -> None:
    torch.manual_seed(0)
    model_class, data_class = MODELS[name]
    recorder = train(model_class(), data_class(batch_size=2), precision=precision)
    assert all(gradient is not None and gradient.isfinite().all() for gradient in recorder.gradients.values())


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize("name", MODELS)
def test_training_lowers_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model_class, data_class = MODELS[name]
    module, data = model_class(learning_rate=3e-3), data_class(batch_size=16)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    optimizer: Any = module.configure_optimizers()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss: Any = module.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_autoencoder_takes_images_without_labels() -> None:
    images = torch.rand(8, 1, 28, 28)
    loader: Any = torch.utils.data.DataLoader(images, batch_size=4)  # type: ignore[arg-type]
    train(LitAutoencoder(width=4), loader, steps=2)


@pytest.mark.parametrize("image_size", [1, 2, 3, 8, 28, 29, 30, 31])
@pytest.mark.parametrize("channels", [1, 3])
def test_autoencoder_keeps_the_shape_of_any_image(channels: int, image_size: int) -> None:
    images = torch.rand(2, channels, image_size, image_size)
    reconstructions = LitAutoencoder(channels=channels, image_size=image_size, width=4)(images)
    assert reconstructions.shape == images.shape
    assert reconstructions.min() >= 0 and reconstructions.max() <= 1


def test_transformer_sees_no_later_token() -> None:
    torch.manual_seed(0)
    module = LitTransformer(vocab_size=16, sequence_length=8, width=8, num_heads=2)
    tokens = torch.randint(16, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 16
    logits, changed_logits = module(tokens), module(changed)
    torch.testing.assert_close(logits[:, :5], changed_logits[:, :5])
    assert not torch.allclose(logits[:, 5:], changed_logits[:, 5:])


def test_transformer_takes_sequences_shorter_than_the_longest() -> None:
    module = LitTransformer(vocab_size=16, sequence_length=8, width=8, num_heads=2)
    assert module(torch.randint(16, (3, 5))).shape == (3, 5, 16)


@pytest.mark.parametrize(
    ("module", "wrong"),
    [
        (LitAutoencoder(width=4), torch.rand(2, 1, 8, 8)),
        (LitTransformer(), torch.rand(2, 1, 28, 28)),
        (LitTransformer(sequence_length=8), torch.zeros(2, 9, dtype=torch.int64)),
        (LitMLP(), torch.rand(2, 31)),
    ],
)
def test_a_batch_of_another_shape_is_named_in_the_error(module: Any, wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="was built for .* got ") as caught:
        module(wrong)
    assert str(tuple(wrong.shape)) in str(caught.value)


@pytest.mark.parametrize("name", MODELS)
def test_every_argument_out_of_range_is_named_with_value_and_range(name: str) -> None:
    model_class, _ = MODELS[name]
    for argument in inspect.signature(model_class).parameters:
        for wrong in (-1, 0, True, "3", float("nan"), None):
            with pytest.raises(ValueError, match=f"^{argument} must be .*>=? \\d, got {wrong!r}$"):
                model_class(**{argument: wrong})


def test_several_mistakes_are_reported_together() -> None:
    with pytest.raises(ValueError, match="width must be .*got 0; latent_dim must be .*got 1.5"):
        LitAutoencoder(width=0, latent_dim=1.5)  # type: ignore[arg-type]


def test_transformer_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="width must be a multiple of num_heads=4, got 30"):
        LitTransformer(width=30)


@pytest.mark.parametrize("name", MODELS)
def test_conf_gives_the_defaults_of_the_constructor(name: str) -> None:
    model_class, _ = MODELS[name]
    loaded: Any = OmegaConf.load(CONF / "model" / f"{name}.yaml")
    conf: Any = OmegaConf.create({"model": loaded.get("model", loaded)})
    arguments: Any = OmegaConf.to_container(conf.model, resolve=True)
    target = arguments.pop("_target_")
    assert target.rpartition(".")[2] == model_class.__name__
    assert arguments == dict(model_class().hparams)
