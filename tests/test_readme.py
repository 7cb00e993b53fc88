"""Every command of the README is run as it stands, and every file that it names exists."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Stepbench

README = (ROOT / "README.md").read_text()

SHORTER = ["protocol.warmup_batches=2", "protocol.warmup_s=0", "protocol.timed_batches=4", "protocol.timed_s=0"]

NOT_HERE = {"python -m stepbench --config-dir my_conf model=mine data=mine -m batch_size=8,16"}
"""Run with files of its own, below."""


def commands() -> list[str]:
    """The commands between fences and backticks that start stepbench, without comments and installation."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    lines = [line.rpartition("&& ")[2] for line in lines]
    inline = re.findall(r"`(python -m stepbench[^`]*)`", README)
    return list(dict.fromkeys(line for line in [*lines, *inline] if line.startswith("python -m stepbench")))


def test_the_readme_has_the_commands_that_are_tested_here() -> None:
    assert "python -m stepbench -m precision=32,16-mixed batch_size=16,32,64" in commands()
    assert set(commands()) > NOT_HERE
    assert len(commands()) >= 9


def test_the_two_commands_that_install_and_run_are_one_line_each() -> None:
    lines = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2
    assert lines[0].endswith("pip install -e . && python -m stepbench -m precision=32,16-mixed batch_size=16,32,64")
    assert lines[1].endswith("pip install -e '.[test]' && python -m pytest")
    ci = (ROOT / ".ci" / "run").read_text()
    assert "pip install --quiet -e '.[test]'" in ci
    assert ci.rstrip().endswith("python -m pytest")


@pytest.mark.full
@pytest.mark.parametrize("command", [command for command in commands() if command not in NOT_HERE])
def test_a_command_of_the_readme_runs(stepbench: Stepbench, tmp_path: Path, command: str) -> None:
    if "DIRECTORY" in command:
        images = tmp_path / "images" / "some"
        images.mkdir(parents=True)
        pillow = pytest.importorskip("PIL.Image")
        for index in range(40):
            pillow.new("RGB", (40, 30), (index, 2 * index, 3 * index)).save(images / f"{index}.png")
        command = command.replace("DIRECTORY", str(tmp_path / "images"))
    if "digits" in command:
        pytest.importorskip("sklearn")
    where = tmp_path
    if any(name in command for name in ("cli_config=", "configs", "./train.py")):
        where = Path(shutil.copytree(ROOT / "tests" / "user_project", tmp_path / "project"))
    _, _, module, *arguments = shlex.split(command)
    if module == "stepbench.aggregate":
        directories = [name for name in arguments if name in ("OTHER", str(tmp_path / "images"))]
        for number, name in enumerate(directories):
            study = f"hydra.sweep.dir=study_{number}"
            assert stepbench("-m", "batch_size=4,8", "model.width=4", study, *SHORTER).returncode == 0
            arguments[arguments.index(name)] = f"study_{number}"
        done = stepbench(*arguments, module=module)
    else:
        shorter = [] if "--help" in arguments else SHORTER
        done = stepbench(*arguments, *shorter, module=module, cwd=where)
    assert done.returncode == 0, done.stdout + done.stderr


def write_the_reader_s_package(directory: Path) -> None:
    """What the README's examples import as the reader's own."""
    package = directory / "my_package"
    package.mkdir()
    (package / "models.py").write_text(
        "from user_code_samples import TinyModule\n"
        "class LitNet(TinyModule):\n"
        "    def __init__(self, hidden):\n"
        "        super().__init__()\n"
    )
    (package / "data.py").write_text("from user_code_samples import TinyData as MyData\n")


def test_the_script_of_the_readme_is_short_and_runs(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(script.splitlines()) <= 10
    write_the_reader_s_package(tmp_path)
    (tmp_path / "train.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests")])}
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "most time goes to" in done.stdout
    (directory,) = tmp_path.glob("outputs/*/*")
    six = re.search(r"\| (`timing_summary.yaml`.*?) \| the same six files", README)
    assert six is not None
    names = re.findall(r"`([^`]+)`", six[1])
    assert len(names) == 6
    assert {path.name for path in directory.iterdir()} >= set(names)


@pytest.mark.full
def test_the_check_of_a_gpu_says_when_there_is_none(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no CUDA device here" in done.stdout


@pytest.mark.full
def test_the_reader_s_own_module_and_data_run(stepbench: Stepbench, tmp_path: Path) -> None:
    for language, text in re.findall(r"```(yaml)\n(.*?)```", README, flags=re.DOTALL):
        assert language == "yaml"
        path = tmp_path / text.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    write_the_reader_s_package(tmp_path)
    (command,) = NOT_HERE
    done = stepbench(*shlex.split(command)[3:], *SHORTER)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "arguments", "wording"),
    [
        ("measure_overhead.py", ["--rounds", "2", "--steps", "40", "--long", "500"], "null model, bare step"),
        ("measure_cell_cost.py", ["--cells", "2", "--spawned", "1"], "times cheaper"),
    ],
)
def test_the_scripts_behind_the_figures_run(tmp_path: Path, script: str, arguments: list[str], wording: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert wording in done.stdout
    assert f"scripts/{script}" in README


def test_the_pictures_of_the_readme_are_there() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")
