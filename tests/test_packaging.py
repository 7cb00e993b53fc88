"""The configuration is found from a checkout, from an editable install and from a wheel in an empty directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, TESTS
from test_main import FAST, tiny_group

pytest.importorskip("hatchling")


@pytest.fixture(scope="module")
def wheel_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the wheel is installed, as into site-packages."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    site = directory / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    return site


def run(command: list[str], cwd: Path, python_path: list[Path]) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, python_path))}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_a_wheel_runs_from_an_empty_directory_with_a_user_s_configuration(wheel_site: Path, tmp_path: Path) -> None:
    where = run(["-c", "import stepbench; print(stepbench.__file__)"], tmp_path, [wheel_site, TESTS])
    assert Path(where.strip()).is_relative_to(wheel_site)
    assert (wheel_site / "stepbench" / "py.typed").exists()
    conf = tiny_group(tmp_path / "my_conf")
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = ["--config-dir", str(conf), "model=tiny", "data=tiny", "precision=32", "plots=false", *FAST]
    output = run(["-m", "stepbench", *arguments], empty, [wheel_site, TESTS])
    assert "per step" in output
    assert len(list(empty.rglob("records/0.0.json"))) == 1
    built_in = run(["-m", "stepbench", "--cfg", "job"], empty, [wheel_site])
    assert yaml.safe_load(built_in)["protocol"]["warmup_batches"] == 5


def test_the_wheel_s_console_scripts_are_there(wheel_site: Path) -> None:
    (metadata,) = wheel_site.glob("stepbench-*.dist-info/entry_points.txt")
    text = metadata.read_text()
    assert "stepbench = stepbench.__main__:main" in text
    assert "stepbench-aggregate = stepbench.aggregate:main" in text


@pytest.mark.full
def test_a_bare_checkout_finds_its_configuration(tmp_path: Path) -> None:
    conf = tiny_group(tmp_path / "my_conf")
    arguments = ["--config-dir", str(conf), "model=tiny", "data=tiny", "precision=16,32", "-m", "plots=false", *FAST]
    output = run(["-m", "stepbench", *arguments, f"hydra.sweep.dir={tmp_path}/study"], ROOT, [TESTS])
    assert "2 cells" in output


def test_an_editable_install_finds_its_configuration(tmp_path: Path) -> None:
    code = "import sys, hatchling.build; print(hatchling.build.build_editable(sys.argv[1]))"
    name = run(["-c", code, str(tmp_path)], ROOT, []).splitlines()[-1]
    site = tmp_path / "site"
    run(["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(tmp_path / name)], tmp_path, [])
    start = (
        "import runpy, site, sys; site.addsitedir(sys.argv.pop(1)); sys.argv[0] = 'stepbench'; "
        "runpy.run_module('stepbench', run_name='__main__')"
    )
    conf = tiny_group(tmp_path / "my_conf")
    output = run(["-c", start, str(site), "--config-dir", str(conf), "model=tiny", "--cfg", "job"], tmp_path, [])
    assert yaml.safe_load(output)["model"]["_target_"] == "user_code_samples.TinyModule"
