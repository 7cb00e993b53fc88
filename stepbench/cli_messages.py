"""What jsonargparse says of a wrong file in many lines, said in the one line that decides."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stepbench.cli_classes import FIT, CliFile, package_of_class, try_to_find
from stepbench.composition_errors import did_you_mean
from stepbench.user_code import where_was_searched

MAX_MESSAGE_LENGTH = 300

_KEY = re.compile(r'Parser key "([^"]*)"(?: element \d+)?:?\s*(.*)')
_CLASS = re.compile(r"Problem with given class_path '([^']*)':?\s*(.*)")
_TYPE = re.compile(r"Expected an? <class '([^']*)'>(?:\. Got value: (.*))?")
_UNKNOWN = re.compile(
    r"(?:Subcommand '\w+'|Group '(?P<group>[^']*)'|.*?)\s*(?:does not accept option|Option) '(?P<key>[^']*)'"
)
_OTHER_CLASS = re.compile(r"Import path (\S+) does not correspond to a subclass of (\w+)")
_NO_MODULE = re.compile(r"No module named '([^']*)'")
_REQUIRED = re.compile(r"the following arguments are required: (.*)")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: --([^=\s]*)")
_CONFIG = ("Problems parsing config:", "Unexpected config:")
RETOLD = ("Does not validate against", "Problem with given class_path", "Parser key")
_FRAME = ("Does not validate against", "Subtypes:", "Errors:", "Given value type:", "Given value:")


def file_names(files: Sequence[CliFile]) -> str:
    """The files, for a message."""
    return ", ".join(file.path for file in files) or "no file"


def one_line(message: str, files: Sequence[CliFile], overrides: Mapping[str, Any], failed_file: str | None) -> str:
    """What jsonargparse says in many lines, in the one that decides, with the file and the key."""
    if message.startswith(_CONFIG):
        return f"{failed_file or file_names(files)}: {_syntax_problem(message)}"
    key, problem = _key_and_problem(message)
    key = key.removeprefix(f"{FIT}.")
    where = _place_of(key, files, overrides)
    return f"{where}: {key}: {problem}" if key else f"{where}: {problem}"


def _syntax_problem(message: str) -> str:
    kind, _, rest = message.partition(":")
    if kind.startswith("Unexpected"):
        found = _short(rest.strip()) if rest.strip() else "nothing"
        return f"a file for LightningCLI holds a mapping, but this one holds {found}"
    lines = [line.strip() for line in rest.strip().splitlines()]
    said = [line for line in lines if not line.startswith('in "')]
    places = [line.partition(", ")[2] for line in lines if line.startswith('in "')]
    return f"{_short(said[-1] if said else rest)}" + (f" ({places[-1]})" if places else "")


def _key_and_problem(message: str) -> tuple[str, str]:
    """The whole key that a message is about, and what is wrong there.

    A message is a tree by indentation: keys and classes lead to problems, of which one for each type that was tried.
    The problem that lies below most of them is about the type that was meant.
    """
    branches: list[tuple[int, str, str]] = []
    found: list[tuple[int, str, str, str]] = []
    for line in message.splitlines():
        text = line.strip().removeprefix("- ")
        indent = len(line) - len(line.lstrip()) + (2 if line.strip().startswith("- ") else 0)
        if not text or text.startswith(_FRAME):
            continue
        branches = [branch for branch in branches if branch[0] < indent]
        for pattern, kind in ((_KEY, "key"), (_CLASS, "class")):
            match = pattern.fullmatch(text)
            if match is not None:
                branches.append((indent, kind, match[1]))
                text = match[2]
        if text:
            key, owner = _joined(branches)
            found.append((len(branches), key, owner, text))
    full_key = re.search(r"^\s*full_key: (.*)$", message, re.MULTILINE)
    if full_key is not None:  # an interpolation
        return full_key[1], _short(message.strip().splitlines()[0])
    if not found:
        return "", _short(message)
    deepest = max(depth for depth, *_ in found)
    candidates = [entry for entry in found if entry[0] == deepest]
    _, key, owner, text = next((entry for entry in candidates if not _TYPE.fullmatch(entry[3])), candidates[0])
    if _TYPE.fullmatch(text):
        return key, _type_problem([entry[3] for entry in candidates], message)
    match = _OTHER_CLASS.fullmatch(text)
    if match is not None:
        package = package_of_class(try_to_find(match[1]), (match[2],))
        other = f": it is one of {package}, but all must be built on one Lightning package" if package else ""
        return key, f"{match[1]} is no subclass of the {match[2]} that is needed{other}"
    match = _NO_MODULE.fullmatch(text)
    if match is not None:
        return key, f"no module {match[1]} {where_was_searched()}"
    return _unknown_or_missing(key, owner, text) or (key, _short(text))


def _joined(branches: Sequence[tuple[int, str, str]]) -> tuple[str, str]:
    """The whole key that the branches lead to, and the last class on the way."""
    key, owner = "", ""
    for _, kind, name in branches:
        if kind == "class":
            owner = name
        else:
            key = name if not key else f"{key}.init_args.{name}" if owner else f"{key}.{name}"
    return key, owner


def _type_problem(texts: Sequence[str], message: str) -> str:
    matches = [match for match in map(_TYPE.fullmatch, texts) if match is not None]
    types = list(dict.fromkeys("None" if match[1] == "NoneType" else match[1] for match in matches))
    values = [match[2] for match in matches if match[2]] or re.findall(r"Given value: (.*)", message)
    return f"expected {' or '.join(types)}" + (f", got {_short(values[-1])}" if values else "")


def _unknown_or_missing(key: str, owner: str, text: str) -> tuple[str, str] | None:
    inside = f"{key}.init_args." if key and owner else f"{key}." if key else ""
    taker = owner or "the command line"
    match = _UNRECOGNIZED.match(text)
    if match is not None:
        return match[1], f"{taker} takes no such argument"
    match = _REQUIRED.fullmatch(text)
    if match is not None:
        names = [f"{inside}{name}".removeprefix(f"{FIT}.") for name in match[1].split(", ")]
        return ", ".join(names), f"{taker} needs it, and it is not given"
    match = _UNKNOWN.match(text)
    if match is not None:
        group = f"{match['group']}." if match["group"] else ""
        return f"{inside}{group}{match['key']}", f"{taker} takes no such argument{_near_argument(owner, match['key'])}"
    return None


def _near_argument(class_path: str, name: str) -> str:
    try:
        names = list(inspect.signature(try_to_find(class_path)).parameters)
    except (TypeError, ValueError):  # there is no class, or it does not tell
        return ""
    return did_you_mean(name, names)


def _place_of(key: str, files: Sequence[CliFile], overrides: Mapping[str, Any]) -> str:
    """The file that has a key, or most of it; the last one where several have."""
    best, place = 0, file_names(files)
    parts = key.partition(",")[0].split(".")
    for name, content in (*((file.path, file.sections) for file in files), ("overrides", overrides)):
        depth = _depth(content, parts)
        if depth >= best and depth:
            best, place = depth, name
    return place


def _depth(content: Any, parts: Sequence[str]) -> int:
    for depth, part in enumerate(parts):
        if not isinstance(content, Mapping) or part not in content:
            return depth
        content = content[part]
    return len(parts)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE_LENGTH else f"{text[:MAX_MESSAGE_LENGTH]} …"
