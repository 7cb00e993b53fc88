"""How many floating-point operations one optimizer step takes, counted on a pass of its own after the timed fit.

The pass is a second, short fit of the same module, uncompiled and on a single device, in which every operator that
torch dispatches is seen on its way. Those that do the work (matrix products, convolutions, attention) are counted by
formula, two operations for each multiplication and addition; what is negligible beside them (element by element,
reductions, moving data) is not. An operator of neither kind makes the count a lower bound, and is named.

What is counted is what runs: a forward that is computed again for the backward (activation checkpointing) counts
twice, matrix products of an optimizer count, attention counts in full under a causal mask. Work that torch does not
dispatch, such as a Triton kernel or an extension that is called directly, is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from stepbench.lightning_package import LightningPackage

MAX_BATCHES = 64
"""Batches within which an optimizer must have stepped, for a step to be counted at all."""

MAX_PROBLEM_LENGTH = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """The floating-point operations of one optimizer step on one device; None where they could not be counted.

    `num_batches` is how many batches the step took. The count is a lower bound where there are `unknown_operators`,
    like `aten::_fft_r2c` or `mylib::thing`. `problem` says in one line why there is no count.
    """

    flop_per_step: int | None
    num_batches: int = 0
    unknown_operators: tuple[str, ...] = ()
    problem: str | None = None


def count_step_flops(
    model: Any,
    datamodule: Any,
    make_trainer: Callable[..., Any],
    *,
    package: LightningPackage,
    accumulate_grad_batches: int = 1,
    devices: int | list[int] | str = 1,
) -> FlopCount:
    """Count the operations of one more optimizer step of a module that has been fitted.

    `make_trainer(callbacks=..., **settings)` makes a trainer of the package with the user's own settings and, above
    them, those that it is given: a single device, nothing beside the training, no end but the pass's own. `datamodule`
    is None where the module has loaders of its own. With several ranks, every one must count, on its own of `devices`.

    The module's hooks and the data module's run as in any fit, except that nothing is prepared and set up again where
    no `teardown` of the user's has undone it. The step is taken: the module's parameters change once more. Its modes,
    hooks and references to a trainer are put back. Whatever the user's code raises becomes a `problem`; an interrupt,
    `sys.exit` and SIGTERM pass.
    """
    model = getattr(model, "_orig_mod", model)
    counter = OperatorCounter()
    step = _count_one_step_class(package)(counter, max(MAX_BATCHES, accumulate_grad_batches))
    try:
        with _quiet(package), _left_as_found(model, datamodule, package), torch.compiler.set_stance("force_eager"):  # type: ignore[no-untyped-call]
            try:
                trainer = make_trainer(
                    callbacks=[step],
                    devices=devices,
                    num_nodes=1,
                    strategy="auto",
                    min_epochs=None,
                    min_steps=None,
                    limit_val_batches=0,
                    num_sanity_val_steps=0,
                    logger=False,
                    profiler=None,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                )
                trainer.fit(model, datamodule=datamodule)
            finally:
                step.stop_counting()
    except Exception as error:
        return FlopCount(flop_per_step=None, num_batches=step.num_batches, problem=_one_line(error))
    if not step.has_stepped:
        tried = f"no optimizer step in {step.num_batches} batches" if step.num_batches else "there were no batches"
        return FlopCount(flop_per_step=None, num_batches=step.num_batches, problem=tried)
    return FlopCount(
        flop_per_step=counter.num_flop,
        num_batches=step.num_batches,
        unknown_operators=tuple(sorted(counter.unknown_operators)),
    )


def flop_utilization(flop_per_step: float, step_s: float, num_devices: int, peak_flop_per_s: float) -> float:
    """Model FLOP utilization: the share of what the devices could do at most that the step did (0 to 1).

    `flop_per_step` is that of all the devices together, `peak_flop_per_s` that of one. After Chowdhery et al., "PaLM:
    Scaling Language Modeling with Pathways" (2022), appendix B. They leave out what is computed again for the backward;
    where that was counted, this is what they call hardware FLOP utilization.
    """
    return flop_per_step / (step_s * num_devices * peak_flop_per_s)


# ---- the pass ----


class _CountOneStep:
    """A callback that counts between the start and the end of every batch, up to the first optimizer step."""

    def __init__(self, counter: OperatorCounter, max_batches: int) -> None:
        super().__init__()
        self.num_batches = 0
        self.has_stepped = False
        self._counter = counter
        self._max_batches = max_batches
        self._is_counting = False
        self._handles: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch the optimizers: a trainer does not count the steps of those that were taken out of its wrapper."""
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "_optimizer_step_post_hooks"):  # a wrapper may have none
                self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.has_stepped = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start counting."""
        self.stop_counting()  # where the module's own hook skipped the last batch, which therefore had no end
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        self._is_counting = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop counting, and stop the fit once a step is complete or none is to be expected."""
        self.stop_counting()
        self.num_batches += 1
        self.has_stepped |= trainer.global_step > 0  # a scaler that skips a step calls no hook of the optimizer
        if self.has_stepped or self.num_batches >= self._max_batches:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop a fit whose epochs are empty."""
        self.stop_counting()
        if self.num_batches == 0:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Watch the optimizers no longer."""
        for handle in self._handles:
            handle.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Count nothing of what a failure leads to."""
        self.stop_counting()
        self.on_train_end(trainer, pl_module)

    def stop_counting(self) -> None:
        """Leave the counter, if it has been entered."""
        if self._is_counting:
            self._is_counting = False
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]


@functools.cache
def _count_one_step_class(package: LightningPackage) -> type[Any]:
    return type("CountOneStep", (_CountOneStep, package.root.Callback), {})


@contextlib.contextmanager
def _quiet(package: LightningPackage) -> Iterator[None]:
    """No warnings, and of Lightning nothing but errors: all there is to say has been said at the timed fit."""
    loggers = [logging.getLogger(name) for name in (package.name, "lightning", "lightning.fabric", "lightning_fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextlib.contextmanager
def _left_as_found(model: Any, datamodule: Any, package: LightningPackage) -> Iterator[None]:
    """Set nothing up again meanwhile, and put back afterwards what a fit changes in a module and a data module."""
    bases = package.root.LightningModule, package.root.LightningDataModule
    modules = list(model.modules())
    modes = [module.training for module in modules]
    tables = [_hook_tables(module) for module in modules]
    needs_gradient = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    kept = [(module, "_trainer") for module in modules if isinstance(module, bases[0])]
    kept += [] if datamodule is None else [(datamodule, "trainer")]
    shadowed = []
    for owner, base in zip((model, datamodule), bases, strict=True):
        if owner is None:
            continue
        shadowed.append((owner, "prepare_data"))
        if type(owner).teardown is base.teardown:  # else what was set up may be gone
            shadowed.append((owner, "setup"))
    attributes = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name in (*kept, *shadowed)]
    for owner, name in shadowed:
        vars(owner)[name] = _do_nothing
    try:
        yield
    finally:
        for owner, name, value in attributes:
            if value is _ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = value
        for module, is_training, hooks in zip(modules, modes, tables, strict=True):
            module.training = is_training
            for name, table in hooks.items():
                found = vars(module)[name]
                if found != table:
                    found.clear()
                    found.update(table)
        for parameter, is_needed in needs_gradient:
            if parameter.requires_grad is not is_needed:
                parameter.requires_grad_(is_needed)


_ABSENT = object()


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a hook that is not to run again."""


def _hook_tables(module: Any) -> dict[str, dict[Any, Any]]:
    return {name: dict(table) for name, table in vars(module).items() if "_hooks" in name and isinstance(table, dict)}


def _one_line(error: Exception) -> str:
    try:
        text = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode("utf-8")
    except Exception:  # the user's class may fail at it
        text = ""
    text = text if len(text) <= MAX_PROBLEM_LENGTH else f"{text[:MAX_PROBLEM_LENGTH]} …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# ---- operators ----


@dataclass(slots=True)
class _Tally:
    num_flop: int = 0
    unknown_operators: set[str] = field(default_factory=set)


class OperatorCounter(TorchDispatchMode):
    """Sees every operator that is dispatched inside its context, forward and backward, and counts its operations.

    The formulas are torch's own (`torch.utils.flop_counter`, where `register_flop_formula` adds a user's) and a few
    that it lacks. It stands for torch's `FlopCounterMode`, which counts the weight gradient of a grouped convolution
    `groups` times and says nothing of what it has no formula for.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tally = _Tally()
        self._formulas = dict(flop_counter.FlopCounterMode(display=False).flop_registry)
        self._elementary = {torch.ops.prim.device.default}

    @property
    def num_flop(self) -> int:
        """The operations counted so far."""
        return self._tally.num_flop

    @property
    def unknown_operators(self) -> set[str]:
        """The operators that do work which no formula tells."""
        return self._tally.unknown_operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it; one that is made of others is taken apart, so that those are counted."""
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._count(func, func, f"higher_order::{func.name()}", args, kwargs)  # type: ignore[no-untyped-call]
        name = func._schema.name
        if name in _QUESTIONS:
            return NotImplemented  # for the tensor's own class to answer
        packet = func._overloadpacket
        if func not in self._elementary and self._formula(name, packet) is None:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self._elementary.add(func)
        return self._count(func, packet, name, args, kwargs)

    def _count(self, func: Any, key: Any, name: str, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        formula = self._formula(name, key)
        if formula is None:
            if not is_negligible(func, name):
                self._tally.unknown_operators.add(name)
            return result
        num_flop: Any = None
        if not any(isinstance(value, torch.Tensor) and value.layout is not torch.strided for value in args):
            with contextlib.suppress(Exception):  # shapes that a formula was not made for
                num_flop = formula(args, kwargs, result)
        if isinstance(num_flop, int):
            self._tally.num_flop += num_flop
        else:
            self._tally.unknown_operators.add(name)
        return result

    def _formula(self, name: str, key: Any) -> Callable[[Any, Any, Any], Any] | None:
        """What makes a number of operations of an operator's arguments, keyword arguments and result."""
        own, of_torch = _OWN_FORMULAS.get(name), self._formulas.get(key)
        if own is not None:
            return lambda args, kwargs, result: own(*args)
        if of_torch is not None:
            return lambda args, kwargs, result: of_torch(*args, **kwargs, out_val=result)
        return None


def _matmul_flop(left: torch.Tensor, right: torch.Tensor) -> int:
    """Of `left` (..., m, k) and `right` (..., k, n), or of vectors in the place of either."""
    return 2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)


def _added_matmul_flop(added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *args: Any) -> int:
    return _matmul_flop(left, right)


def _attention_flop(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any) -> int:
    """Scores and their product with the values, of (batch, heads, length, features)."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flop(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any
) -> int:
    """The scores once more and the gradients of queries and keys, and those of scores and values."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def _linear_backward_flop(
    inputs: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool], *args: Any
) -> int:
    num_wanted = sum(wanted[:2])
    return 2 * inputs.numel() * weight.shape[0] * num_wanted


def _convolution_backward_flop(grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *args: Any) -> int:
    """Each gradient takes as many operations as the forward, in which `weight` is used once per place."""
    is_transposed, num_wanted = args[4], sum(args[7][:2])
    places = math.prod((inputs if is_transposed else grad).shape[2:])
    return 2 * grad.shape[0] * places * weight.numel() * int(num_wanted)


_OWN_FORMULAS: dict[str, Callable[..., int]] = {
    "aten::convolution_backward": _convolution_backward_flop,
    "aten::linear_backward": _linear_backward_flop,
    "aten::mv": _matmul_flop,
    "aten::dot": _matmul_flop,
    "aten::vdot": _matmul_flop,
    "aten::addmv": _added_matmul_flop,
    "aten::addmv_": _added_matmul_flop,
    "aten::addmm_": _added_matmul_flop,
    "aten::_addmm_activation": _added_matmul_flop,
    "aten::addbmm": _added_matmul_flop,
    "aten::addbmm_": _added_matmul_flop,
    "aten::baddbmm_": _added_matmul_flop,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention_flop,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_flop,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention_flop,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward_flop,
    "aten::_scaled_dot_product_attention_math_for_mps": _attention_flop,
}

_QUESTIONS = {
    f"aten::{name}"
    for name in (
        "size", "sym_size", "stride", "sym_stride", "numel", "sym_numel", "dim", "storage_offset",
        "sym_storage_offset", "is_contiguous", "sym_is_contiguous", "is_strides_like_format",
        "is_non_overlapping_and_dense",
    )
} | {"prim::layout"}  # fmt: skip

_NO_WORK = {"prim", "prims", "profiler", "c10d", "_c10d_functional", "c10d_functional", "rngprims", "debugprims"}
"""Namespaces whose operators compute nothing: questions, marks, what devices send each other."""

_NEGLIGIBLE = re.compile(
    "|".join(
        (
            # element by element, as far as torch does not say so itself; the fused cells leave the products to others
            r"addr|fill|zero|abs|threshold|[gl][te]|eq|ne|[il]?r?shift|heaviside|copysign|floor_divide|gcd|lcm|complex",
            r"(elu|glu|gelu|hard\w+|mish|leaky_relu|log_sigmoid|rrelu|soft\w+)(_with_noise)?(_forward|_functional|_jvp)?",
            r"add_relu|prelu_kernel|polar|masked_scale|thnn_fused_\w+|transform_bias_rescale_qkv|weight_norm_interface",
            r"linalg_cross|glu_backward_jvp|rrelu_with_noise_functional|(de)?quantize(_per\w+)?|fake_quantize\w+",
            # new tensors and random ones
            r"(new_)?(empty|zeros|ones|full)(_\w+)?|scalar_tensor|arange|range|linspace|logspace|eye|tri[lu]_indices",
            r"\w+_window|fft_r?fftfreq|rand|rand_like|randn\w*|randint\w*|randperm|bernoulli|binomial|cauchy|exponential",
            r"geometric|log_normal|multinomial|normal(_functional)?|poisson|random|uniform|philox_\w+|standard_gamma\w*",
            r"sample_dirichlet|dirichlet_grad|(native_|fused_)?dropout|fill_mem_eff_dropout_mask|cudnn_init_dropout_state",
            r"efficientzerotensor|from_file|make_per_\w+_quantized_tensor|spdiags",
            # moving data, and what is asked of it
            r"\w*copy(_\w+)?|clone|lazy_clone|conj_physical|lift|detach|resize(_\w+)?|set|put|take|(chunk_)?cat|stack",
            r"block_diag|diag_embed|tri[lu]|trace|roll|rot90|flip|t|transpose|(un)?squeeze|where|im2col|col2im",
            r"(unsafe_)?(masked_)?index(_\w+)?|gather|scatter(_add|_reduce)?|masked_(fill|scatter|select)|unsafe_view",
            r"(select|slice|diagonal|as_strided)(_scatter)?|unfold|repeat(_interleave)?|unsafe_split(_with_sizes)?",
            r"embedding(_dense|_renorm|_bag\w*)?|(constant|reflection|replication)_pad\w+|pixel_(un)?shuffle|channel_shuffle",
            r"nonzero(_static)?|pin_memory|record_stream|pack_padded_sequence|cudnn_rnn_flatten_weight|to_padded_tensor",
            r"nested_\w+|jagged_to_padded_dense_forward|padded_dense_to_jagged_forward|new_zeros_with_same_feature_meta",
            r"to_(dense|mkldnn|sparse\w*)|coalesced?|sparse_(coo|compressed)_tensor\w*|sparse_mask\w*|sparse_resize\w*",
            r"(dense|sparse)_dim|dim[IV]|nnz|values|q_\w+|qscheme|int_repr|mkldnn_(reshape|transpose|reorder_\w+)",
            r"is_\w+|has_same_\w+|equal|allclose|isin|local_scalar_dense|use_\w+_ctc_loss|fused_sdp_choice|convert_\w+",
            r"\w*assert_\w+|(functional_)?sym_constrain_\w+|print|make_dep_token|linalg_check_errors|validate_\w+",
            # reductions, sums along an axis, sorting, counting
            r"(sparse_|sparse_csr_)?(sum|prod)|nansum|mean|(nan)?median|a?max|a?min|aminmax|arg(max|min)|all|any|mode",
            r"(std|var)(_mean)?|norm|native_norm|renorm|dist|hash_tensor|count_nonzero|logsumexp|linalg_(vector_norm|_powsum)",
            r"segment_reduce|cum(sum|prod)|cum(max|min)(_helper)?|logcumsumexp|sort|topk|kthvalue|unique\w*|searchsorted",
            r"bucketize|histc|histogram\w*|bincount",
            # normalizations, softmax, pooling, interpolation, losses
            r"(\w+_)?(batch|layer|group|rms)_norm(_\w+)?|(\w+_)?softmax(_backward_data)?|upsample_\w+",
            r"(\w+_)?(avg|max)_(un)?pool[123]d(_with_indices)?|(\w+_)?loss(2d)?(_forward)?|binary_cross_entropy\w*",
            # the update of the parameters
            r"foreach_\w+|fused_(adam|adamw|sgd|adagrad|moving_avg_obs_fq_helper)(_functional)?|amp_\w+",
        )
    )
)
_PRODUCT = re.compile(r"(^|_)(\w?mm|mv|matmul|dot|linear)(_|$)|attention|convolution")


@functools.cache
def is_negligible(func: Any, name: str) -> bool:
    """Whether an operator's work is left out by convention: the one that is called `name`, like `aten::cat`."""
    namespace, _, rest = name.rpartition("::")
    if namespace in _NO_WORK:
        return True
    if isinstance(func, torch._ops.OpOverload):
        packet = func._overloadpacket
        overloads = packet.overloads()  # type: ignore[no-untyped-call]
        variants = [getattr(packet, overload) for overload in overloads]  # not all of which are tagged
        if func.is_view or any(torch.Tag.pointwise in variant.tags for variant in variants):
            return True
    if namespace != "aten":
        return False
    rest = rest.strip("_").removesuffix("_backward")
    return _NEGLIGIBLE.fullmatch(rest) is not None and _PRODUCT.search(rest) is None
