"""Finding the settings of a loader among anybody's arguments."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from stepbench.loader_arguments import (
    LOADER_SETTINGS,
    USUAL_NAMES,
    LoaderSettings,
    find_arguments,
    find_parameter,
    get_at,
    set_at,
)

FLAGS = ("pin_memory", "persistent_workers")


def test_settings_that_are_given() -> None:
    assert LoaderSettings().given == ()
    settings = LoaderSettings(batch_size=8, num_workers=0, pin_memory=False)
    assert settings.given == (("batch_size", 8), ("num_workers", 0), ("pin_memory", False))


@pytest.mark.parametrize("setting", LOADER_SETTINGS)
def test_every_usual_name_is_found_and_belongs_to_one_setting(setting: str) -> None:
    value: Any = True if setting in FLAGS else 4
    for name in USUAL_NAMES[setting]:
        assert find_arguments({"other": 1, name: value}, setting) == [name]
        assert find_parameter(["other", name], setting) == name
        for other in set(LOADER_SETTINGS) - {setting}:
            assert find_parameter([name], other) is None
    assert len(set(USUAL_NAMES[setting])) == len(USUAL_NAMES[setting])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, []),
        ({"batch_size": 4}, ["batch_size"]),
        ({"batchSize": 4}, ["batchSize"]),
        ({"BATCH_SIZE": 4}, ["BATCH_SIZE"]),
        ({"bs": 4, "lr": 1}, ["bs"]),
        ({"batch_size": None}, ["batch_size"]),
        ({"batch_size": "${bs}"}, ["batch_size"]),
        # no plain value
        ({"batch_size": "4"}, []),
        ({"batch_size": True}, []),
        ({"batch_size": 4.0}, []),
        ({"batch_size": [4, 8]}, []),
        ({"batch_size": {}}, []),
        # anywhere
        ({"loader": {"cfg": {"batch_size": 4}}}, ["loader.cfg.batch_size"]),
        ({"loaders": [{"lr": 1}, {"batch_size": 4}]}, ["loaders.1.batch_size"]),
        ({"loaders": ({"batch_size": 4},)}, ["loaders.0.batch_size"]),
        ({"data": {"_target_": "a.B", "loader": {"_partial_": True, "batch_size": 4}}}, ["data.loader.batch_size"]),
        ({"data": {"class_path": "a.B", "init_args": {"batch_size": 4}}}, ["data.init_args.batch_size"]),
        # the training stage wins, other stages do not count
        ({"batch_size": 4, "train_batch_size": 8}, ["train_batch_size"]),
        ({"batch_size": 4, "loader": {"train": {"batch_size": 8}}}, ["loader.train.batch_size"]),
        ({"trainLoader": {"batch_size": 8}, "valLoader": {"batch_size": 4}}, ["trainLoader.batch_size"]),
        ({"bs_train": 8, "bs_val": 4}, ["bs_train"]),
        ({"val_batch_size": 8, "batch_size": 4}, ["batch_size"]),
        ({"val_batch_size": 8, "test": {"batch_size": 4}}, []),
        ({"batch_size_eval": 8}, []),
        ({"datasets": [{"validation": {"batch_size": 1}}, {"batch_size": 4}]}, ["datasets.1.batch_size"]),
        ({"val1": {"batch_size": 8}}, []),
        # words, not letters
        ({"devices": {"batch_size": 8}}, ["devices.batch_size"]),
        ({"trainer": {"batch_size": 4}, "batch_size": 8}, ["batch_size"]),
        ({"interval": {"batch_size": 8}}, ["interval.batch_size"]),
        ({"global_batch_size": 64}, []),
        # by stage below the name
        ({"batch_size": {"train": 4, "val": 8}}, ["batch_size.train"]),
        ({"data": {"batch_size": {"training": 4, "test": 8}}, "batch_size": 2}, ["data.batch_size.training"]),
        ({"train": 4}, []),
        # better names, then shallower
        ({"a": {"b": {"batch_size": 4}}, "mini_batch_size": 8}, ["a.b.batch_size"]),
        ({"a": {"b": {"batch_size": 4}}, "c": {"batch_size": 8}}, ["c.batch_size"]),
        # ambiguous
        (
            {"labelled": {"batch_size": 4}, "unlabelled": {"batch_size": 28}},
            ["labelled.batch_size", "unlabelled.batch_size"],
        ),
        ({"train": [{"batch_size": 4}, {"batch_size": 8}]}, ["train.0.batch_size", "train.1.batch_size"]),
        # keys that no path can name
        ({1: {"batch_size": 4}, "a.b": {"batch_size": 4}}, []),
    ],
)
def test_where_the_batch_size_stands(arguments: dict[str, Any], expected: list[str]) -> None:
    found = find_arguments(arguments, "batch_size")
    assert found == expected
    for path in found:
        set_at(arguments, path, 17)
        assert get_at(arguments, path) == 17


def test_flags_take_flags_only() -> None:
    assert find_arguments({"pin_memory": True, "loader": {"pin_mem": 1}}, "pin_memory") == ["pin_memory"]
    assert find_arguments({"pin_memory": 1}, "pin_memory") == []
    assert find_arguments({"persistent_workers": None}, "persistent_workers") == ["persistent_workers"]
    assert find_arguments({"num_workers": False}, "num_workers") == []


def test_a_container_within_itself_is_looked_into_once() -> None:
    arguments: dict[str, Any] = {"batch_size": 4}
    arguments["again"] = {"back": arguments}
    assert find_arguments(arguments, "batch_size") == ["batch_size"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["root", "batch_size", "train_batch_size", "val_batch_size"], "train_batch_size"),
        (["val_batch_size", "test_bs"], None),
        (["bs", "batch_size"], "batch_size"),
        (["batch_size_train", "batch_size_val"], "batch_size_train"),
        (["self", "args", "kwargs"], None),
        ([], None),
    ],
)
def test_best_parameter(names: list[str], expected: str | None) -> None:
    assert find_parameter(names, "batch_size") == expected


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(KeyError, match="prefetch"):
        find_arguments({"prefetch": 1}, "prefetch")
    with pytest.raises(KeyError, match="prefetch"):
        find_parameter(["prefetch"], "prefetch")


@pytest.mark.parametrize("path", ["a.c.d", "a.x", "b.7", "b.x", "b.0.a", "a.b.c", ""])
def test_no_such_path(path: str) -> None:
    with pytest.raises(KeyError) as caught:
        get_at({"a": {"b": 1}, "b": ["word"]}, path)
    assert caught.value.args == (path,)


def test_setting_at_a_path() -> None:
    container: dict[str, Any] = {"a": {"b": 1}, "b": [1, {"c": 2}], "t": (1,)}
    set_at(container, "a.new", 3)
    set_at(container, "b.0", 4)
    set_at(container, "b.1.c", 5)
    set_at(container, "top", 6)
    assert container == {"a": {"b": 1, "new": 3}, "b": [4, {"c": 5}], "t": (1,), "top": 6}
    for path in ("b.2", "b.x", "t.0", "a.b.c", "no.such"):
        with pytest.raises(KeyError) as caught:
            set_at(container, path, 0)
        assert caught.value.args == (path,)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, stepbench.loader_arguments as m; "
        "assert not {'torch', 'lightning', 'omegaconf'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
