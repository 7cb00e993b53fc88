"""Checks of the constructor arguments of the built-in models and data modules."""

from __future__ import annotations

import math


def integer_problem(name: str, value: object, *, minimum: int) -> str | None:
    """What is wrong with an argument that must be an integer of at least `minimum`; None where nothing is."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
        return None
    return f"{name} must be an integer >= {minimum}, got {value!r}"


def number_problem(name: str, value: object, *, zero_allowed: bool) -> str | None:
    """What is wrong with an argument that must be a finite number > 0, or >= 0 where `zero_allowed`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        accepted = value >= 0 if zero_allowed else value > 0
        if accepted:
            return None
    return f"{name} must be a finite number {'>=' if zero_allowed else '>'} 0, got {value!r}"


def choice_problem(name: str, value: object, *, accepted: tuple[object, ...]) -> str | None:
    """What is wrong with an argument that must be one of `accepted`; None where nothing is."""
    # `True == 1` in Python, and `channels=true` is a mistake all the same.
    if any(type(value) is type(choice) and value == choice for choice in accepted):
        return None
    return f"{name} must be one of {', '.join(map(repr, accepted))}, got {value!r}"


def raise_problems(*problems: str | None) -> None:
    """Raise one ValueError that lists every problem given; do nothing where all are None."""
    found = [problem for problem in problems if problem is not None]
    if found:
        raise ValueError("; ".join(found))
