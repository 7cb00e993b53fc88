"""Which module may import which, and who alone reads a clock: held over the syntax trees of the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "stepbench"

LAYERS = {
    # Each module with the modules of the package that it may import; deeper packages count by their first part.
    "__init__": {"standalone"},
    "record": set(),
    "clock": set(),
    "units": set(),
    "timing": {"record", "timing_table"},
    "timing_table": {"clock", "record"},
    "samples": set(),
    "device_timeline": {"clock"},
    "compilation": {"clock", "record"},
    "lightning_package": set(),
    "statistics": {"record"},
    "protocol": {"clock", "record"},
    "ranks": {"protocol", "record"},
    "arguments": set(),
    "models": {"arguments", "models"},
    "data": {"arguments", "data"},
    "device": set(),
    "environment": {"record", ""},
    "trainer_setup": {"lightning_package", "record"},
    "user_code": {"composition_errors", "loader_arguments", "record", "trainer_setup"},
    "loader_arguments": set(),
    "loader_overrides": {"loader_arguments", "samples"},
    "cli_classes": {"lightning_package", "record", "user_code"},
    "cli_messages": {"cli_classes", "composition_errors", "user_code"},
    "cli_program": {
        "cli_classes", "cli_messages", "lightning_package", "loader_arguments", "record", "trainer_setup",
        "user_code",
    },
    "program": {
        "cli_program", "lightning_package", "loader_arguments", "record", "trainer_setup", "user_code", "",
    },
    "peak_flops": set(),
    "profile_files": set(),
    "preparation": {"lightning_package", "loader_overrides", "program", "record", "trainer_setup", "user_code"},
    "profiles": {"lightning_package", "preparation", "profile_files", "record"},
    "flops": {"lightning_package"},
    "profiler_tap": {"lightning_package", "timing"},
    "callback": {
        "clock", "compilation", "device_timeline", "lightning_package", "profiler_tap", "record", "samples", "timing",
    },
    "facts": {"callback", "device", "environment", "record", "samples", ""},
    "worker": {
        "callback", "clock", "device", "facts", "flops", "peak_flops", "preparation", "profile_files", "profiles",
        "protocol", "ranks", "record", "statistics", "trainer_setup", "user_code", "",
    },
    "standalone": {
        "aggregate", "callback", "clock", "facts", "lightning_package", "protocol", "ranks", "record", "report",
        "samples", "statistics", "sweep", "",
    },
    "server": {"environment", "worker"},
    "launcher": {"clock"},
    "composition_errors": set(),
    "user_files": {"cli_classes", "composition_errors", "loader_arguments", "trainer_setup"},
    "settings": {"clock", "composition_errors", "profile_files", "record", "user_files", ""},
    "overrides": {"settings"},
    "sweep": {"clock", "launcher", "profile_files", "record", "units", ""},
    "__main__": {
        "aggregate", "composition_errors", "launcher", "overrides", "profile_files", "record", "report", "settings",
        "sweep", "units", "",
    },
}  # fmt: skip

REPORT_SIDE = {"aggregate", "report", "study", "plots", "scaling", "advice", "units", "statistics", "record"}
RUN_SIDE = set(LAYERS) - REPORT_SIDE - {"__main__", "__init__"}
HEAVY = {"torch", "lightning", "hydra", "omegaconf"}
DRAWING = {"pandas", "seaborn", "matplotlib", "rich"}


def module_name(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "stepbench":
                found |= {f"stepbench.{alias.name}" for alias in node.names}
                found.discard("stepbench")
    return found


def own_imports(path: Path) -> set[str]:
    names = {name.removeprefix("stepbench").lstrip(".").partition(".")[0] for name in imports(path) if is_own(name)}
    return names


def is_own(name: str) -> bool:
    return name.partition(".")[0] == "stepbench"


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    name = module_name(path)
    if name in LAYERS:
        assert own_imports(path) <= LAYERS[name]
    else:  # the report side: among itself, and on what the records need
        run_side_only = RUN_SIDE - REPORT_SIDE
        assert not own_imports(path) & run_side_only


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_report_side_needs_no_torch_and_run_side_draws_nothing(path: Path) -> None:
    outside = {name.partition(".")[0] for name in imports(path)}
    name = module_name(path)
    if name in RUN_SIDE or name == "__main__":
        assert not outside & DRAWING
    if name not in RUN_SIDE and name != "__main__":
        assert not outside & HEAVY


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_clock_module_reads_a_clock_or_synchronizes(path: Path) -> None:
    if module_name(path) == "clock":
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            assert {alias.name for alias in node.names} <= {"sleep"}
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & {"time", "timeit"}
        if isinstance(node, ast.Attribute) and node.attr == "synchronize":
            assert module_name(path) in ("callback", "device_timeline")  # what the clock has given them
            assert "torch" not in ast.unparse(node)


def test_workloads_know_nothing_of_timing() -> None:
    for path in FILES:
        if module_name(path) in ("models", "data"):
            assert own_imports(path) <= {"arguments", "models", "data"}


@pytest.mark.parametrize("module", ["stepbench.__main__", "stepbench.aggregate", "stepbench.report"])
def test_the_parent_imports_neither_torch_nor_lightning(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'torchmetrics'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_line_imports_nothing_that_draws() -> None:
    code = (
        "import sys, stepbench.__main__\n"
        "assert not {'pandas', 'seaborn', 'matplotlib', 'scipy', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
