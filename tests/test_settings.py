from __future__ import annotations

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from stepbench.record import Sampling
from stepbench.settings import COMPILE_MODES, PRECISIONS, SettingsError, conf_dir, read_request

COMPILE_PROBLEM = f"compile must be true, false, or one of {', '.join(COMPILE_MODES)}, got {{}}"
SAMPLING_PROBLEM = "sampling must be all, N/M with 1 <= N <= M such as 10/100, or null, got {}"

CHOICES = {"model": "autoencoder", "data": "synthetic_images", "precision": "32", "device": "auto", "protocol": "quick"}


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def problems(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        read_request(composed(*overrides), CHOICES)
    return caught.value.problems


def test_the_default_configuration_is_a_valid_request() -> None:
    request = read_request(composed(), CHOICES)
    assert request.spec.model.target == "stepbench.models.autoencoder.LitAutoencoder"
    assert request.spec.data is not None
    assert request.spec.data.arguments["batch_size"] == request.spec.batch_size == 32
    assert request.spec.num_threads is None
    assert dict(request.choices)["model"] == "autoencoder"


def test_the_batch_size_reaches_every_built_in_data_set() -> None:
    for path in (conf_dir() / "data").glob("*.yaml"):
        required = ["data.root=x"] if path.stem == "image_folder" else []
        if path.stem in ("none", "custom"):
            continue
        request = read_request(composed(f"data={path.stem}", "batch_size=48", *required), CHOICES)
        assert request.spec.data is not None
        assert request.spec.data.arguments["batch_size"] == 48
        assert request.placed == (("batch_size", "data.batch_size"),)


def test_every_precision_that_lightning_takes_has_a_choice() -> None:
    files = {path.stem for path in (conf_dir() / "precision").glob("*.yaml")}
    assert set(PRECISIONS) <= files
    for name in files:
        spec = read_request(composed(f"precision='{name}'"), CHOICES).spec
        assert spec.precision == ("32" if name in ("tf32", "inherit") else name)
        assert spec.float32_matmul_precision == ("high" if name == "tf32" else None)


def test_epochs_as_the_tutorial_script_took_them() -> None:
    assert read_request(composed("protocol.epochs=5"), CHOICES).protocol.epochs == 5
    assert read_request(composed("protocol=epochs"), CHOICES).protocol.epochs == 2


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("batch_size=-3", "batch_size must be a whole number >= 1 or null, got -3"),
        ("batch_size=0", "batch_size must be a whole number >= 1 or null, got 0"),
        ("batch_size=2.5", "batch_size must be a whole number >= 1 or null, got 2.5"),
        ("batch_size=true", "batch_size must be a whole number >= 1 or null, got True"),
        ("accumulate_grad_batches=0", "accumulate_grad_batches must be a whole number >= 1 or null, got 0"),
        ("seed=-1", "seed must be a whole number from 0 to 2^32 - 1, or null, got -1"),
        ("timer=fast", "timer must be one of auto, host, sync, events, got 'fast'"),
        ("devices=0", "devices must be a whole number >= 1 or null, got 0"),
        ("devices=auto", "devices must be a whole number >= 1 or null, got 'auto'"),
        ("strategy=2", "strategy must be the name of a Lightning strategy, such as ddp, or null, got 2"),
        ("compile=fast", COMPILE_PROBLEM.format("'fast'")),
        ("compile=1", COMPILE_PROBLEM.format(1)),
        ("compile=[default]", COMPILE_PROBLEM.format(["default"])),
        ("sampling=some", SAMPLING_PROBLEM.format("'some'")),
        ("sampling=0/10", SAMPLING_PROBLEM.format("'0/10'")),
        ("sampling=20/10", SAMPLING_PROBLEM.format("'20/10'")),
        ("sampling=10", SAMPLING_PROBLEM.format(10)),
        (
            "batch_size_fn=count",
            "batch_size_fn must be the path of a function, such as my_module:my_function, or null, got 'count'",
        ),
        ("timeout_s=0", "timeout_s must be seconds > 0, at most a year, or null, got 0"),
        ("timeout_s=.inf", "timeout_s must be seconds > 0, at most a year, or null, got '.inf'"),
        ("protocol.timed_s=soon", "protocol.timed_s must be seconds >= 0, at most a year, got 'soon'"),
        ("protocol.timed_s=nan", "protocol.timed_s must be seconds >= 0, at most a year, got nan"),
        ("protocol.timed_batches=0", "protocol.timed_batches must be a whole number >= 1, got 0"),
        ("protocol.epochs=0", "protocol.epochs must be a whole number >= 1 or null, got 0"),
        ("device.num_threads=0", "device.num_threads must be a whole number >= 1 or null, got 0"),
        ("device.accelerator=3", "device.accelerator must be a name, or null, got 3"),
        ("timeout_s=1e12", "timeout_s must be seconds > 0, at most a year, or null, got 1000000000000.0"),
        ("model.width=inf", "model holds an infinity or a NaN among its arguments, which no record can hold"),
        ("worker_start=maybe", "worker_start must be one of auto, fork, spawn, got 'maybe'"),
        ("plots=2", "plots must be true or false, got 2"),
        (
            "model._target_=Net",
            "model._target_ must be an importable path, such as my_package.my_module:MyClass or ./my_file.py:MyClass, "
            "got 'Net'",
        ),
        ("data=image_folder", "data.root is required and has no default: give it as data.root=VALUE"),
        ("~timer", "timer is missing; expected one of auto, host, sync, events"),
    ],
)
def test_a_mistake_is_named_with_its_key_its_value_and_the_remedy(override: str, problem: str) -> None:
    assert problems(override) == (problem,)


def test_one_device_an_uncompiled_model_and_the_timers_own_choices_are_the_default() -> None:
    request = read_request(composed(), CHOICES)
    assert (request.spec.num_devices, request.spec.strategy, request.spec.compile) == (1, None, None)
    assert (request.sampling, request.batch_size_fn) == (None, None)


def test_devices_and_their_strategy_are_part_of_the_workload() -> None:
    spec = read_request(composed("devices=2", "strategy=ddp"), CHOICES).spec
    assert (spec.num_devices, spec.strategy) == (2, "ddp")
    assert read_request(composed("strategy=auto"), CHOICES).spec.strategy is None


@pytest.mark.parametrize("name", ["ddp_spawn", "ddp_fork", "ddp_notebook_find_unused_parameters_true"])
def test_a_strategy_whose_results_come_back_through_no_file_is_refused(name: str) -> None:
    (problem,) = problems(f"strategy={name}", "devices=2")
    assert problem.startswith("strategy must be one that starts each process as a command, such as ddp, which measures")
    assert f"got '{name}'" in problem
    assert problem.endswith("come back through no file")


@pytest.mark.parametrize(
    ("override", "mode"),
    [("compile=false", None), ("compile=true", "default"), *((f"compile={mode}", mode) for mode in COMPILE_MODES)],
)
def test_compile_is_a_switch_or_a_mode(override: str, mode: str | None) -> None:
    assert read_request(composed(override), CHOICES).spec.compile == mode


@pytest.mark.parametrize(
    ("override", "sampling"),
    [
        ("sampling=null", None),
        ("sampling=all", Sampling(timed_steps=1, period_steps=1)),
        ("sampling=10/100", Sampling(timed_steps=10, period_steps=100)),
        ("sampling='5/5'", Sampling(timed_steps=5, period_steps=5)),
    ],
)
def test_sampling_times_all_steps_or_some_of_them_by_phase(override: str, sampling: Sampling | None) -> None:
    assert read_request(composed(override), CHOICES).sampling == sampling


def test_the_users_count_of_samples_is_named_by_its_path() -> None:
    assert read_request(composed("batch_size_fn=my.module.fn"), CHOICES).batch_size_fn == "my.module.fn"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("+batchsize=8", "there is no setting batchsize; did you mean batch_size?"),
        ("+rounds=3", "there is no setting rounds"),
        ("+protocol.timed=3", "there is no setting protocol.timed; did you mean protocol.timed_s?"),
        ("+device.threads=3", "there is no setting device.threads"),
    ],
)
def test_an_added_key_that_changes_nothing_is_a_mistake(override: str, problem: str) -> None:
    (found,) = problems(override)
    assert found.startswith(problem)


def test_an_added_key_that_others_are_made_of_is_not() -> None:
    request = read_request(composed("+hidden=64", "model.width=${hidden}", "+model.further=1"), CHOICES)
    assert request.spec.model.arguments["width"] == 64
    assert request.spec.model.arguments["further"] == 1


def test_several_mistakes_are_reported_together() -> None:
    found = problems("batch_size=-3", "timer=fast", "protocol.timed_s=soon")
    assert [problem.split()[0] for problem in found] == ["batch_size", "protocol.timed_s", "timer"]


def test_what_cannot_be_resolved_is_named() -> None:
    (problem,) = problems("+model.kwargs=${no.such.key}")
    assert "model.kwargs cannot be resolved" in problem
    assert "no.such.key" in problem


def test_equal_configurations_make_equal_specs() -> None:
    one, other = (read_request(composed("batch_size=64"), CHOICES).spec for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)


def test_the_first_line_of_every_configuration_file_says_when_to_choose_it() -> None:
    for path in conf_dir().rglob("*.yaml"):
        lines = path.read_text().splitlines()
        first = lines[1] if lines[0].startswith("# @package") else lines[0]
        assert first.startswith("# "), path
        data: Any = OmegaConf.load(path)
        assert data is not None
