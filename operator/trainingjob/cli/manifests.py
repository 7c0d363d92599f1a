"""Reading TrainingJobs from files as kubectl would."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainingjob.api.job import GROUP, KIND, InvalidJob, TrainingJob, parse
from trainingjob.cli.errors import invalid
from trainingjob.cli.text import clean

_LARGEST = 16 * 2**20


class _Loader(yaml.SafeLoader):
    """YAML as the Kubernetes tools read it: 3e-4 is a number, a date is a string."""


_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9]+(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = re.compile(r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$")
_REPLACED = {
    "tag:yaml.org,2002:timestamp",
    "tag:yaml.org,2002:float",
    "tag:yaml.org,2002:int",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in _REPLACED]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


@dataclass(frozen=True)
class Found:
    """A TrainingJob's manifest in a file."""

    file: str
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        """Its name, as far as it has one."""
        metadata = self.manifest.get("metadata")
        return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""

    def problem(self, said: str) -> str:
        """A line about the manifest in the API server's manner."""
        return f'{self.file}: {KIND} "{clean(self.name)}": {clean(said)}'

    def job(self) -> TrainingJob:
        """The job.

        Raises:
            InvalidJob: the API server would refuse it.
        """
        return parse(self.manifest)


def load(path: Path) -> Any:
    """The documents of a YAML or JSON file, as a list.

    Raises:
        CliError: it cannot be read.
    """
    try:
        if path.is_file() and path.stat().st_size > _LARGEST:
            raise invalid(f"{path}: more than {_LARGEST // 2**20} MiB is no manifest")
        data = path.read_bytes()
    except IsADirectoryError:
        raise invalid(f"{path}: is a directory; name a file") from None
    except FileNotFoundError:
        raise invalid(f"{path}: no such file") from None
    except OSError as error:
        raise invalid(f"{path}: cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
        return [_as_json(d) for d in yaml.load_all(text, _Loader)]
    except UnicodeDecodeError:
        raise invalid(f"{path}: is not text in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        said = error.problem or error.context or "cannot be parsed"
        raise invalid(f"{path}: is not YAML: {place}{clean(said)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise invalid(f"{path}: is not YAML: {clean(error)}") from None


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {_key(k): _as_json(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_as_json(v) for v in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        raise ValueError(f"{value} is not a number that JSON has")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{type(value).__name__} is not a type that JSON has")


def _key(key: Any) -> str:
    if isinstance(key, bool):
        return "true" if key else "false"
    return str(key)


def find(path: Path) -> list[Found]:
    """The TrainingJobs in the file; other kinds are passed over.

    Raises:
        CliError: it cannot be read, or holds none.
    """
    documents = load(path)
    objects = list(_objects(documents))
    found = [Found(str(path), o) for o in objects if _is_ours(o)]
    if found:
        return found
    if not any(d is not None for d in documents):
        raise invalid(f"{path}: is empty; a {KIND} is expected")
    if not objects:
        raise invalid(f"{path}: is not a mapping with apiVersion, kind, metadata and spec")
    kinds = ", ".join(sorted({clean(o.get("kind", "no kind")) for o in objects}))
    raise invalid(f"{path}: holds no {KIND} ({kinds})")


def _objects(documents: list[Any]) -> Iterator[dict[str, Any]]:
    for document in documents:
        if isinstance(document, dict):
            items = document.get("items")
            if document.get("kind") == "List" and isinstance(items, list):
                yield from _objects(items)
            else:
                yield document


def _is_ours(manifest: dict[str, Any]) -> bool:
    group = str(manifest.get("apiVersion", GROUP)).partition("/")[0]
    # Without a group it can only be a slip: better told than passed over.
    return manifest.get("kind") == KIND and (group == GROUP or "." not in group)


def one(path: Path, name: str | None = None) -> tuple[Found, TrainingJob]:
    """The only TrainingJob in the file, or the one of that name.

    Raises:
        CliError: there is none, there are several, or it is not valid.
    """
    found = find(path)
    names = ", ".join(clean(f.name) for f in found)
    if name is not None:
        found = [f for f in found if f.name == name]
        if not found:
            raise invalid(f'{path}: holds no {KIND} "{clean(name)}" but {names}')
    if len(found) > 1:
        raise invalid(f"{path}: holds several TrainingJobs ({names}): choose one with --name")
    try:
        return found[0], found[0].job()
    except InvalidJob as error:
        raise invalid("\n".join(found[0].problem(p) for p in error.problems)) from None
