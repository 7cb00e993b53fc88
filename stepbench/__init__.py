"""Where the time of a PyTorch Lightning training step goes, and how it scales."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepbench.standalone import StepTimer as StepTimer

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`StepTimer` comes with torch and Lightning, so it is imported when it is asked for."""
    if name == "StepTimer":
        from stepbench.standalone import step_timer_class

        return step_timer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
