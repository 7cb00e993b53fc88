"""A look into a cell by one of the usual profilers, on a short fit of its own, so that it costs the timing nothing.

It covers whole batches after some that warm up: from the end of one batch to the end of another. Nothing that it does
is timed by stepbench.
"""

from __future__ import annotations

import cProfile
import functools
import io
import pstats
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, record_function, schedule

from stepbench.lightning_package import LightningPackage
from stepbench.preparation import Preparation, prepare
from stepbench.profile_files import PROFILE_FILES
from stepbench.record import ProfileRequest, RunRequest

NUM_OPERATORS = 30
"""Rows of the table of operators."""

NUM_FUNCTIONS = 50
"""Rows of each table of Python's functions."""

MAX_SNAPSHOT_EVENTS = 1_000_000
"""Events that CUDA's allocator keeps for a snapshot, of which it forgets the oldest."""

DEVICE_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
"""What the profiler of torch must watch on a device beside the host."""


class Look(Protocol):
    """What a profiler does at each place of a fit, and the files that it leaves in the end."""

    def prepare(self, trainer: Any, module: Any) -> None:
        """Training starts, the warm-up before all."""
        ...

    def begin(self, trainer: Any) -> None:
        """The batches to be covered start."""
        ...

    def batch_done(self) -> None:
        """A batch has ended, after which others are to come."""
        ...

    def end(self, trainer: Any) -> None:
        """The batches to be covered are over, or the fit has failed; may be called without `begin`."""
        ...

    def write(self, directory: Path, head: str) -> None:
        """Write the files, `head` as the first line of those that are made to be read."""
        ...


def profile_program(directory: Path, request: RunRequest, *, scratch: Path, is_first_rank: bool) -> None:
    """Fit the request's program until its profile is complete, and write that into `directory`.

    Of several ranks the first one is profiled, the others only train. Raises whatever the user's code does, and
    RuntimeError where the training ends before the warm-up.
    """
    wanted = request.profile
    assert wanted is not None
    run = Preparation()
    model = prepare(request, run, scratch, epochs=None)
    look = _make_look(wanted, run.package, request) if is_first_rank else None
    window = _profile_window_class(run.package)(wanted, look)
    run.trainer.callbacks.append(window)
    try:
        run.trainer.fit(model, datamodule=run.datamodule)
    finally:
        window.close(run.trainer)
    num_covered = window.num_batches - wanted.warmup_batches
    if num_covered < 1:
        raise RuntimeError(
            f"the training ended after {window.num_batches} batches, none of them after the "
            f"{wanted.warmup_batches} that warm up"
        )
    if look is not None:
        look.write(directory, f"{num_covered} batches of the training, after {wanted.warmup_batches} that warmed up\n")


def _make_look(wanted: ProfileRequest, package: LightningPackage, request: RunRequest) -> Look:
    if wanted.profiler == "simple":
        return _SimpleLook(package)
    if wanted.profiler == "advanced":
        return _AdvancedLook()
    return _TorchLook(package, wanted, name_layers=request.spec.compile is None)


class _ProfileWindow:
    """A callback that opens a look when the warm-up is over, closes it after so many batches, and ends the fit."""

    def __init__(self, wanted: ProfileRequest, look: Look | None) -> None:
        super().__init__()
        self.num_batches = 0
        self._first, self._last = wanted.warmup_batches, wanted.warmup_batches + wanted.batches
        self._look = look
        self._is_closed = False
        self._num_at_epoch_start = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Get the profiler ready."""
        if self._look is not None:
            self._look.prepare(trainer, pl_module)
            if self._first == 0:
                self._look.begin(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch."""
        if self._is_closed:  # an accumulation may have to be completed
            return
        self.num_batches += 1
        if self.num_batches == self._last:
            self.close(trainer)
            trainer.should_stop = True
        elif self._look is not None:
            self._look.batch_done()
            if self.num_batches == self._first:
                self._look.begin(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note how far the fit has come."""
        self._num_at_epoch_start = self.num_batches

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop a fit whose epochs are empty."""
        if self.num_batches == self._num_at_epoch_start:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End a look that is incomplete because the training has an end of its own."""
        self.close(trainer)

    def close(self, trainer: Any) -> None:
        """End the look, if it has not been ended."""
        if not self._is_closed:
            self._is_closed = True
            if self._look is not None:
                self._look.end(trainer)


@functools.cache
def _profile_window_class(package: LightningPackage) -> type[Any]:
    return type("ProfileWindow", (_ProfileWindow, package.root.Callback), {})


# ---- profilers ----


class _SimpleLook:
    """Lightning's own `SimpleProfiler`: how long each of its actions takes."""

    def __init__(self, package: LightningPackage) -> None:
        self._package = package
        self._profiler: Any = None
        self._replaced: Any = None
        self._text = ""

    def prepare(self, trainer: Any, module: Any) -> None:
        """Nothing."""

    def begin(self, trainer: Any) -> None:
        """Put the profiler in the trainer; what is under way ends with the one that it started with."""
        self._profiler = self._package.root.profilers.SimpleProfiler()
        self._replaced, trainer.profiler = trainer.profiler, self._profiler

    def batch_done(self) -> None:
        """Nothing."""

    def end(self, trainer: Any) -> None:
        """Take the profiler out, and its account, which knows no other end than now."""
        if self._profiler is not None:
            trainer.profiler = self._replaced
            self._text = self._profiler.summary()

    def write(self, directory: Path, head: str) -> None:
        """Write the account."""
        _write(directory / PROFILE_FILES["simple"][0], head + self._text.replace("\t", " "))


class _AdvancedLook:
    """Python's own `cProfile`, of everything that the training's thread calls.

    Lightning's `AdvancedProfiler` is made of it, but runs one for each of its actions, of which the inner ones stop
    the outer ones.
    """

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def prepare(self, trainer: Any, module: Any) -> None:
        """Nothing."""

    def begin(self, trainer: Any) -> None:
        """Watch every call from now on."""
        self._profile.enable()

    def batch_done(self) -> None:
        """Nothing."""

    def end(self, trainer: Any) -> None:
        """Watch no longer."""
        self._profile.disable()

    def write(self, directory: Path, head: str) -> None:
        """Write the functions by their own time and by their time with all that they call, and the raw statistics."""
        text = io.StringIO(head)
        text.seek(0, io.SEEK_END)
        statistics = pstats.Stats(self._profile, stream=text)
        for order, title in (("tottime", "by own time"), ("cumulative", "by time including what they call")):
            text.write(f"\nThe {NUM_FUNCTIONS} functions that took longest {title}\n\n")
            statistics.sort_stats(order).print_stats(NUM_FUNCTIONS)
        readable, raw = PROFILE_FILES["advanced"]
        _write(directory / readable, text.getvalue())
        statistics.dump_stats(directory / raw)


class _TorchLook:
    """The profiler of torch: every operator on the host and on the device, with Lightning's actions and the layers.

    Lightning's `PyTorchProfiler` wraps the same one, but makes up the files' names and counts the batches otherwise.
    """

    def __init__(self, package: LightningPackage, wanted: ProfileRequest, *, name_layers: bool) -> None:
        self._package, self._wanted, self._name_layers = package, wanted, name_layers
        self._profiler: Any = None
        self._replaced: Any = None
        self._device: Any = None
        self._handles: list[Any] = []

    @property
    def _takes_snapshot(self) -> bool:
        return self._wanted.memory and self._device.type == "cuda"

    def prepare(self, trainer: Any, module: Any) -> None:
        """Start the profiler, which is idle at first and warms itself up in the last batch of the warm-up."""
        self._device = trainer.strategy.root_device
        memory, num_warmup = self._wanted.memory, self._wanted.warmup_batches
        activities = [ProfilerActivity.CPU]
        if self._device.type in DEVICE_ACTIVITIES:
            activities.append(DEVICE_ACTIVITIES[self._device.type])
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=schedule(
                wait=max(0, num_warmup - 1), warmup=min(1, num_warmup), active=self._wanted.batches, repeat=1
            ),
            record_shapes=memory,
            profile_memory=memory,
            with_stack=memory,
        )
        if self._name_layers:
            self._handles = _annotate_layers(module)
        self._profiler.start()

    def begin(self, trainer: Any) -> None:
        """Have Lightning's actions in the trace, and on CUDA all that the allocator does."""
        annotations = _annotations_class(self._package)()
        self._replaced, trainer.profiler = trainer.profiler, annotations
        if self._takes_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=MAX_SNAPSHOT_EVENTS)

    def batch_done(self) -> None:
        """Tell the profiler, whose schedule counts batches."""
        self._profiler.step()

    def end(self, trainer: Any) -> None:
        """Stop the profiler."""
        if self._replaced is not None:
            trainer.profiler = self._replaced
        if self._profiler is not None:
            self._profiler.stop()
        for handle in self._handles:
            handle.remove()

    def write(self, directory: Path, head: str) -> None:
        """Write the trace, the table of operators, and where it is asked for the memory's timeline."""
        trace, table, timeline, snapshot = (directory / name for name in PROFILE_FILES["pytorch"])
        self._profiler.export_chrome_trace(str(trace))
        _write(table, head + _operator_table(self._profiler))
        if self._takes_snapshot:
            torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._wanted.memory and hasattr(self._profiler, "export_memory_timeline"):  # which torch means to remove
            device = str(self._device) if self._device.type in DEVICE_ACTIVITIES else "cpu"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                self._profiler.export_memory_timeline(str(timeline), device=device)


def _operator_table(profiler: Any) -> str:
    """The operators, and a device's kernels, that took longest themselves, without annotations and Python's functions.

    By the device's time where there is one, else by the host's.
    """
    names = {
        (event.key, event.device_type)
        for event in profiler.events()
        if not event.is_user_annotation and not getattr(event, "is_python_function", False)
    }
    averages = profiler.key_averages()
    kept = [average for average in averages if (average.key, average.device_type) in names]
    has_device = any(average.self_device_time_total > 0 for average in kept)
    settings = {"use_device": averages._use_device, "profile_memory": averages._profile_memory}
    operators: Any = EventList(kept, **settings)  # type: ignore[no-untyped-call]
    order = "self_device_time_total" if has_device else "self_cpu_time_total"
    text: str = operators.table(sort_by=order, row_limit=NUM_OPERATORS, max_name_column_width=80)
    return text


def _annotate_layers(module: Any) -> list[Any]:
    """Have the forward of each layer appear in a trace under its name; returns the handles of the hooks that do it."""
    handles = []
    for name, layer in module.named_modules():
        if name and not isinstance(layer, torch.jit.ScriptModule):
            span = _Span(name)
            handles.append(layer.register_forward_pre_hook(span.enter))
            handles.append(layer.register_forward_hook(span.exit, always_call=True))
    return handles


class _Span:
    """Something in a trace that has a name and may happen inside itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._entered: list[Any] = []

    def enter(self, *args: Any) -> None:
        """It starts."""
        annotation: Any = record_function(self._name)
        annotation.__enter__()
        self._entered.append(annotation)

    def exit(self, *args: Any) -> None:
        """It ends."""
        if self._entered:
            self._entered.pop().__exit__(None, None, None)


@functools.cache
def _annotations_class(package: LightningPackage) -> type[Any]:
    class Annotations(package.root.profilers.Profiler):  # type: ignore[misc, name-defined]
        """Has each action of Lightning's appear in a trace."""

        def __init__(self) -> None:
            super().__init__()
            self._spans: dict[str, _Span] = {}

        def start(self, action_name: str) -> None:
            """An action starts."""
            self._spans.setdefault(action_name, _Span(action_name)).enter()

        def stop(self, action_name: str) -> None:
            """An action ends."""
            if action_name in self._spans:
                self._spans[action_name].exit()

    return Annotations


def _write(path: Path, text: str) -> None:
    path.write_text(text.rstrip() + "\n", encoding="utf-8", errors="backslashreplace")
