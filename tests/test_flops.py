from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from stepbench import flops
from stepbench.data.synthetic import SyntheticFeatures, SyntheticTokens
from stepbench.flops import FlopCount, OperatorCounter, count_step_flops, flop_utilization, is_negligible
from stepbench.lightning_package import load_package
from stepbench.models.mlp import LitMLP
from stepbench.models.transformer import LitTransformer
from tests.other_package_samples import OtherData, OtherModule

LIGHTNING = load_package("lightning.pytorch")
BATCH = 8


class Module(pl.LightningModule):
    """Any network, and the sum of what it gives of features (batch, 4) as the loss."""

    def __init__(self, network: Callable[..., Any], *, at: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.network = network
        self.at = at
        self.num_setups = 0

    def setup(self, stage: str) -> None:
        self.num_setups += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.at is not None:
            self.at(self)
        out = self.network(batch[0])
        return (out[0] if isinstance(out, tuple) else out).abs().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([nn.Parameter(torch.ones(1)), *self.parameters()])


class Data(pl.LightningDataModule):
    def __init__(self, *shape: int, num_batches: int = 100) -> None:
        super().__init__()
        self.shape = shape or (4,)
        self.num_batches = num_batches
        self.num_prepared = self.num_setups = self.num_transfers = 0

    def prepare_data(self) -> None:
        self.num_prepared += 1

    def setup(self, stage: str) -> None:
        self.num_setups += 1
        self.features = torch.ones(BATCH * self.num_batches, *self.shape)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.num_transfers += 1
        return batch

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.features), batch_size=BATCH)


def make_trainer(**settings: Any) -> Any:
    return pl.Trainer(**{"accelerator": "cpu", "max_epochs": -1, **settings})


def fit(model: Any, datamodule: Any, **settings: Any) -> Any:
    """A fit of two steps, as one that was timed before."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = make_trainer(**{"max_steps": 2, "enable_model_summary": False, **quiet, **settings})
    trainer.fit(model, datamodule=datamodule)
    return trainer


def count(model: Any, datamodule: Any, *, fits: bool = True, **settings: Any) -> FlopCount:
    accumulate = settings.get("accumulate_grad_batches", 1)
    if fits:
        fit(model, datamodule, **settings)
    return count_step_flops(
        model,
        datamodule,
        lambda **own: make_trainer(**{**settings, **own}),
        package=LIGHTNING,
        accumulate_grad_batches=accumulate,
    )


def count_network(network: Callable[..., Any], *shape: int) -> FlopCount:
    return count(Module(network), Data(*shape))


def test_a_linear_layer_takes_two_products_of_its_size_and_a_third_for_what_comes_before_it() -> None:
    assert count_network(nn.Linear(4, 3)) == FlopCount(flop_per_step=2 * (2 * BATCH * 4 * 3), num_batches=1)
    two = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    assert count_network(two).flop_per_step == 2 * (2 * BATCH * 4 * 5) + 3 * (2 * BATCH * 5 * 3)


def test_frozen_parameters_take_no_gradient() -> None:
    network = nn.Sequential(nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3))
    assert count_network(network).flop_per_step == 2 * BATCH * 4 * 5 + 2 * (2 * BATCH * 5 * 3)


@pytest.mark.parametrize(
    ("layer", "shape", "places"),
    [
        (nn.Conv1d(4, 6, 3), (4, 10), 8),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 8, 8), 16),
        (nn.Conv2d(4, 8, 3, groups=4), (4, 6, 6), 16),
        (nn.Conv3d(4, 6, 2), (4, 3, 3, 3), 8),
        (nn.ConvTranspose2d(4, 6, 2, stride=2), (4, 5, 5), 25),
        (nn.ConvTranspose2d(4, 8, 2, groups=4), (4, 5, 5), 25),
    ],
)
def test_a_convolution_uses_its_kernel_once_for_each_place(layer: Any, shape: tuple[int, ...], places: int) -> None:
    forward = 2 * BATCH * places * layer.weight.numel()
    assert count_network(layer, *shape).flop_per_step == 2 * forward
    behind_another = nn.Sequential(nn.Unflatten(1, (shape[0],)), Scale(), layer)
    assert count_network(behind_another, *shape).flop_per_step == 3 * forward


class Scale(nn.Module):
    """Features that need a gradient, at no counted cost."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features * self.factor


def test_accumulated_micro_batches_all_count() -> None:
    found = count(Module(nn.Linear(4, 3)), Data(), accumulate_grad_batches=4)
    assert found == FlopCount(flop_per_step=4 * 2 * (2 * BATCH * 4 * 3), num_batches=4)
    cut_short = count(Module(nn.Linear(4, 3)), Data(num_batches=3), accumulate_grad_batches=4)
    assert cut_short.num_batches == 3  # as in the timed fit, where the last batch of an epoch completes the step


def test_the_built_in_mlp_takes_what_can_be_derived() -> None:
    model = LitMLP(num_features=16, width=8, depth=3, num_classes=5)
    products = 2 * (BATCH * 16 * 8) + 3 * (3 * BATCH * 8 * 8) + 3 * (BATCH * 8 * 5)
    found = count(model, SyntheticFeatures(batch_size=BATCH, num_features=16, num_classes=5))
    assert found == FlopCount(flop_per_step=2 * products, num_batches=1)


def test_the_built_in_transformer_has_no_operator_without_a_formula() -> None:
    found = count(LitTransformer(sequence_length=16), SyntheticTokens(batch_size=BATCH, sequence_length=16))
    assert found.flop_per_step and not found.unknown_operators and found.problem is None


class TwoOptimizers(pl.LightningModule):
    """Steps both optimizers in every `every`-th batch, through Lightning's wrappers or past them."""

    def __init__(self, *, every: int = 1, wrapped: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 1)
        self.every, self.wrapped = every, wrapped

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers(use_pl_optimizer=self.wrapped)
        self.manual_backward(self.second(self.first(batch[0])).sum())
        self.log("seen", 1.0)
        if batch_idx % self.every == self.every - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in (self.first, self.second)]


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("every", [1, 3])
def test_a_step_of_manual_optimization_lasts_until_an_optimizer_has_stepped(every: int, wrapped: bool) -> None:
    settings: dict[str, Any] = {} if wrapped else {"max_epochs": 1}
    found = count(TwoOptimizers(every=every, wrapped=wrapped), Data(num_batches=6), **settings)
    assert found == FlopCount(flop_per_step=every * (2 * (2 * BATCH * 12) + 3 * (2 * BATCH * 3)), num_batches=every)


def test_nothing_is_prepared_or_set_up_again_and_the_other_hooks_run() -> None:
    model, data = Module(nn.Linear(4, 3), at=lambda module: module.trainer.datamodule.shape), Data()
    fit(model, data)
    before = data.num_transfers
    assert count(model, data, fits=False).flop_per_step == 2 * (2 * BATCH * 12)
    assert (data.num_prepared, data.num_setups, model.num_setups) == (1, 1, 1)
    assert data.num_transfers > before
    assert "setup" not in vars(data) and "setup" not in vars(model) and "prepare_data" not in vars(data)


class TornDownData(Data):
    def teardown(self, stage: str) -> None:
        del self.features


def test_what_was_torn_down_is_set_up_again() -> None:
    data = TornDownData()
    assert count(Module(nn.Linear(4, 3)), data).flop_per_step == 2 * (2 * BATCH * 12)
    assert (data.num_prepared, data.num_setups) == (1, 2)


class OwnLoaders(Module):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=BATCH)


def test_a_module_with_loaders_of_its_own_needs_no_data_module() -> None:
    assert count(OwnLoaders(nn.Linear(4, 3)), None).flop_per_step == 2 * (2 * BATCH * 12)


def test_the_module_is_left_as_it_was_found() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3).requires_grad_(False))
    network[1].eval()

    def meddle(module: Any) -> None:
        module.network.eval()
        module.network[0].requires_grad_(False)
        module.network[0].register_forward_hook(lambda *args: None)

    model, data = Module(network), Data()
    trainer = fit(model, data)
    model.at = meddle
    assert count(model, data, fits=False).problem is None
    assert model.trainer is trainer and data.trainer is trainer
    assert [module.training for module in network] == [True, False, True]
    assert [parameter.requires_grad for parameter in network.parameters()] == [True] * 4 + [False] * 2
    assert not network[0]._forward_hooks


def fail(module: Any) -> None:
    raise ValueError("a reason\nof several lines")


def test_a_failure_becomes_a_problem_of_one_line_and_leaves_no_trace() -> None:
    model, data = Module(nn.Linear(4, 3)), Data()
    trainer = fit(model, data)
    model.at = fail
    found = count(model, data, fits=False)
    assert found == FlopCount(flop_per_step=None, problem="ValueError: a reason of several lines")
    assert model.trainer is trainer
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    model.at = None
    assert count(model, data, fits=False).flop_per_step == 2 * (2 * BATCH * 12)


def test_a_trainer_that_cannot_be_made_is_a_problem() -> None:
    assert "no_such" in (count(Module(nn.Linear(4, 3)), Data(), fits=False, accelerator="no_such").problem or "")


def interrupt(error: BaseException) -> Callable[[Any], None]:
    def stop(module: Any) -> None:
        raise error

    return stop


@pytest.mark.parametrize("error", [SystemExit(3), LIGHTNING.sigterm_exception(), KeyboardInterrupt()])
def test_an_interrupt_passes(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *args: None)  # Lightning would have this process ignore later ones
    model, data = Module(nn.Linear(4, 3)), Data()
    fit(model, data)
    model.at = interrupt(error)
    with pytest.raises(SystemExit):
        count(model, data, fits=False)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_without_a_step_there_is_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "MAX_BATCHES", 5)
    found = count(TwoOptimizers(every=1000), Data(), max_steps=-1, max_epochs=1)
    assert found.flop_per_step is None and found.problem == "no optimizer step in 5 batches"
    model, data = Module(nn.Linear(4, 3)), Data()
    fit(model, data)
    data.features = data.features[:0]
    assert count(model, data, fits=False).problem == "there were no batches"


class SkipsFirstEpoch(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 else None


def test_an_epoch_that_the_module_skips_gives_no_batches() -> None:
    found = count(SkipsFirstEpoch(nn.Linear(4, 3)), Data(), max_epochs=3)
    assert found.problem == "there were no batches"
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@torch.library.custom_op("stepbench_test::thing", mutates_args=())
def thing(features: torch.Tensor) -> torch.Tensor:
    return features @ features.T


@pytest.mark.parametrize(
    ("network", "unknown"),
    [
        (thing, ("stepbench_test::thing",)),
        (lambda features: torch.fft.rfft(features).real, ("aten::_fft_r2c",)),
        (lambda features: torch.cdist(features, features), ("aten::_cdist_forward",)),
        (lambda features: torch.linalg.svd(features)[1], ("aten::_linalg_svd",)),
        (lambda features: torch.eye(BATCH).to_sparse_csr() @ features, ("aten::mm",)),
    ],
)
def test_work_without_a_formula_is_named(network: Any, unknown: tuple[str, ...]) -> None:
    model = Module(lambda features: network(features) * weight.sum())
    model.weight = weight = nn.Parameter(torch.ones(1))
    found = count(model, Data())
    assert found.unknown_operators == unknown
    assert found.flop_per_step == 0


HAS_ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


@pytest.mark.skipif(not HAS_ONEDNN, reason="without oneDNN the CPU's LSTM is taken apart")
def test_a_recurrent_network_is_named_where_its_kernel_is_one_operator() -> None:
    found = count_network(nn.LSTM(4, 3), 5, 4)
    assert found.unknown_operators == ("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward")
    assert count_network(nn.GRU(4, 3), 5, 4).unknown_operators == ()


def counted(run: Callable[[], Any], *, backward: bool = True) -> OperatorCounter:
    counter: OperatorCounter
    with OperatorCounter() as counter:
        out = run()
        out = out[0] if isinstance(out, tuple) else out
        if backward:
            out.abs().sum().backward()
    return counter


FEATURES = torch.ones(2, 4, 6, 8, requires_grad=True)
TOKENS = torch.ones(3, 6, 8, requires_grad=True)


def attend(**settings: Any) -> Any:
    return F.scaled_dot_product_attention(FEATURES, FEATURES, FEATURES, **settings)


def test_fused_attention_counts_two_products_forward_and_five_backward() -> None:
    product = 2 * (2 * 4) * 6 * 6 * 8
    every_setting: list[dict[str, Any]] = [{}, {"is_causal": True}, {"attn_mask": torch.zeros(6, 6)}]
    for settings in every_setting:
        counter = counted(functools.partial(attend, **settings))
        assert counter.num_flop == 7 * product and not counter.unknown_operators
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert counted(attend).num_flop == 6 * product  # which keeps the scores


LAYERS: list[Callable[[], Any]] = [
    lambda: nn.MultiheadAttention(8, 2, batch_first=True)(TOKENS, TOKENS, TOKENS),
    lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)(TOKENS),
    lambda: nn.GRU(8, 5)(TOKENS),
    lambda: nn.LSTMCell(8, 5)(TOKENS[0]),
    lambda: torch.einsum("bij,bkj->bik", TOKENS, TOKENS),
    lambda: nn.Conv2d(4, 8, 3)(FEATURES),
    lambda: nn.ConvTranspose2d(4, 8, 3)(FEATURES),
    lambda: nn.Sequential(nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(8), nn.RMSNorm(8), nn.PReLU())(FEATURES),
    lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Dropout(), nn.Softmax(-1))(FEATURES),
    lambda: F.interpolate(F.pad(FEATURES, (1, 1, 1, 1), mode="reflect"), scale_factor=2, mode="bilinear"),
    lambda: F.embedding(torch.zeros(3, dtype=torch.long), TOKENS[0]),
    lambda: F.pixel_shuffle(FEATURES, 2).cumsum(1).sort().values,
    lambda: F.cross_entropy(TOKENS[0], torch.zeros(6, dtype=torch.long)) + F.mse_loss(TOKENS, TOKENS + 1),
    lambda: F.unfold(FEATURES, 3) @ torch.ones(24, 2) + F.gumbel_softmax(TOKENS[0, 0]).sum(),
    lambda: torch.cat([TOKENS.gather(1, torch.zeros_like(TOKENS, dtype=torch.long)), TOKENS.roll(1)]),
]


@pytest.mark.parametrize("run", LAYERS)
def test_the_count_is_that_of_torch_s_own_counter_where_it_has_the_formulas(run: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    counter = counted(run)
    torch.manual_seed(0)
    with FlopCounterMode(display=False) as theirs:
        out = run()
        (out[0] if isinstance(out, tuple) else out).abs().sum().backward()
    assert counter.num_flop == theirs.get_total_flops()
    assert not counter.unknown_operators


def test_products_with_vectors_count() -> None:
    matrix, vector = TOKENS[0], TOKENS[1, 0]
    assert counted(lambda: matrix @ vector, backward=False).num_flop == 2 * 6 * 8
    assert counted(lambda: torch.dot(vector, vector), backward=False).num_flop == 2 * 8
    assert counted(lambda: torch.addmv(matrix[:, 0], matrix, vector), backward=False).num_flop == 2 * 6 * 8


def test_in_inference_mode_operators_are_taken_apart() -> None:
    layer = nn.Linear(8, 3)
    with torch.inference_mode():
        assert counted(lambda: layer(torch.ones(5, 8)), backward=False).num_flop == 2 * 5 * 8 * 3


def test_a_forward_that_is_computed_again_counts_again() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid())
    once = counted(lambda: layers(TOKENS)).num_flop
    again: Any = counted(lambda: checkpoint(layers, TOKENS, use_reentrant=True)).num_flop
    assert again == once + once // 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::mul", True), ("aten::gt_", True), ("aten::view", True), ("aten::native_layer_norm_backward", True),
        ("aten::_foreach_addcmul_", True), ("aten::_thnn_fused_lstm_cell", True), ("aten::_trilinear", False),
        ("aten::_cudnn_rnn", False), ("aten::_cudnn_rnn_flatten_weight", True), ("aten::mkldnn_rnn_layer", False),
        ("aten::grid_sampler_2d", False), ("aten::linalg_qr", False), ("aten::_sparse_addmm", False),
        ("aten::_scaled_dot_product_efficient_attention", False), ("aten::_int_mm", False),
    ],
)  # fmt: skip
def test_what_is_negligible_by_convention(name: str, expected: bool) -> None:
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    assert is_negligible(getattr(packet, packet.overloads()[0]), name) is expected


def test_a_compiled_module_is_counted_as_it_is_without_its_compiler() -> None:
    model = LitMLP(num_features=16, width=8, depth=3, num_classes=5)
    data = SyntheticFeatures(batch_size=BATCH, num_features=16, num_classes=5)
    expected = count(model, data)
    model.log = torch.compiler.disable(model.log)  # type: ignore[method-assign, no-untyped-call]
    compiled = torch.compile(model, backend="eager")
    assert count(compiled, data) == expected
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_what_a_module_compiles_itself_is_counted_too() -> None:
    network = torch.compile(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), backend="eager")
    assert count_network(network).flop_per_step == 2 * (2 * BATCH * 4 * 5) + 3 * (2 * BATCH * 5 * 3)


def test_a_module_of_the_other_package_is_counted() -> None:
    package = load_package("pytorch_lightning")
    model, data = OtherModule(), OtherData(BATCH)

    def make(**settings: Any) -> Any:
        return package.root.Trainer(**{"accelerator": "cpu", "max_epochs": 1, **settings})

    found = count_step_flops(model, data, make, package=package)
    assert found == FlopCount(flop_per_step=2 * (2 * BATCH * 4), num_batches=1)


def test_the_pass_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    model, data = Module(nn.Linear(4, 3)), Data()
    fit(model, data)
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        level = logging.getLogger("lightning.pytorch").level
        assert count(model, data, fits=False).flop_per_step
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("lightning.pytorch").level == level


def test_utilization_is_the_share_of_what_all_devices_could_do() -> None:
    assert flop_utilization(4e12, 0.5, 8, 1e12) == pytest.approx(1.0)
    assert flop_utilization(1e12, 2.0, 1, 1e12) == pytest.approx(0.5)
