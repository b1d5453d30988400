"""Reading YAML and CSV files: size caps, no tricks, errors that name the line."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetplan.errors import InvalidInputError
from hetplan.units import MIB, format_bytes

if TYPE_CHECKING:
    import yaml

MAX_BYTES = MIB
MAX_LINE_BYTES = MIB
MAX_DEPTH = 20


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """Text of a UTF-8 file of at most ``max_bytes``.

    Raises
    ------
    InvalidInputError
        If the file cannot be read, is too large or is not UTF-8.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path}: cannot be read: {error}. Check the path") from None
    if len(content) > max_bytes:
        raise InvalidInputError(f"{path}: larger than the limit of {format_bytes(max_bytes)}. Split it or trim it")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InvalidInputError(f"{path}, line {line}: not UTF-8 text. Save it as UTF-8") from None


def read_lines(path: str | Path, max_bytes: int = MAX_BYTES) -> Iterator[str]:
    """Lines of a UTF-8 file of at most ``max_bytes``, with their ends, one at a time: a large file is never held whole.

    Raises
    ------
    InvalidInputError
        While iterating, if the file cannot be read, is too large, is not UTF-8, or has a line of more than 1 MiB.
    """
    seen = number = 0
    try:
        with Path(path).open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                seen += len(line)
                if seen > max_bytes:
                    raise InvalidInputError(
                        f"{path}: larger than the limit of {format_bytes(max_bytes)}. Split it or trim it"
                    )
                if len(line) > MAX_LINE_BYTES:
                    raise InvalidInputError(f"{path}, line {number}: longer than {format_bytes(MAX_LINE_BYTES)}")
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path}, line {number}: not UTF-8 text. Save it as UTF-8") from None
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error}. Check the path") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file whose top level is a mapping; see `parse_yaml`."""
    return parse_yaml(read_text(path), str(path))


def yaml_text(values: dict[str, Any]) -> str:
    """Plain data as YAML text that `parse_yaml` reads: keys in their order, no anchors."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return str(yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))


def read_json(path: str | Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """A JSON file whose top level is an object, without repeated keys.

    Raises
    ------
    InvalidInputError
        If the file cannot be read, is too large or is not such JSON.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} is given twice; keep one")
        return found

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not a finite number; give one or leave the key out")

    try:
        data = json.loads(read_text(path, max_bytes), object_pairs_hook=once, parse_constant=refuse)
    except RecursionError:
        raise InvalidInputError(f"{path}: nested too deeply; flatten it") from None
    except ValueError as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{path}: not readable JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidInputError(f"{path}: the top level must be a mapping of keys to values")
    return data


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """Plain data from YAML text.

    Parameters
    ----------
    text : str
        At most 1 MiB, nested at most 20 deep, without aliases, anchors, merge keys or repeated keys.
    source : str
        What error messages call it, such as the path.

    Returns
    -------
    dict
        Mappings, lists, text, numbers, booleans, dates and None.

    Raises
    ------
    InvalidInputError
        With source, line, what was found and what to do.

    Examples
    --------
    >>> parse_yaml("machines: {g6.12xlarge: 3}", "example")
    {'machines': {'g6.12xlarge': 3}}
    """
    import yaml

    if len(text.encode("utf-8", errors="replace")) > MAX_BYTES:
        raise InvalidInputError(f"{source}: larger than the limit of {format_bytes(MAX_BYTES)}. Split it or trim it")
    try:
        data = yaml.load(text, Loader=_loader())  # noqa: S506 (a SafeLoader that also refuses aliases)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}, line {mark.line + 1}" if mark else source
        raise InvalidInputError(f"{where}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"{source}: not readable YAML: {error}") from None
    if not isinstance(data, dict):
        raise InvalidInputError(f"{source}: the top level must be a mapping of keys to values")
    return data


@cache
def _loader() -> type[yaml.SafeLoader]:
    import yaml
    from yaml.constructor import ConstructorError

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                self._refuse(event.start_mark, "anchors and aliases are refused; write the value out")
            if self.depth == MAX_DEPTH:
                self._refuse(event.start_mark, f"nested deeper than the limit of {MAX_DEPTH}; flatten it")
            self.depth += 1
            node: yaml.Node | None = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for key_node, _ in node.value:
                if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                    self._refuse(key_node.start_mark, "a key must be a plain word or number")
                key = self.construct_object(key_node)
                if key in seen:
                    self._refuse(key_node.start_mark, f"key {key!r} is given twice; keep one")
                seen.add(key)
            return super().construct_mapping(node, deep=deep)

        def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
            number = float(super().construct_yaml_float(node))
            if not math.isfinite(number):
                self._refuse(node.start_mark, f"{node.value!r} is not a finite number; give one or leave the key out")
            return number

        def _refuse(self, mark: Any, problem: str) -> None:
            raise ConstructorError(None, None, problem, mark)

    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
    return Loader


def read_csv_rows(
    path: str | Path, required: Collection[str], optional: Collection[str] = (), *, max_bytes: int = MAX_BYTES
) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a CSV file with a header; see `parse_csv`."""
    return parse_csv(read_text(path, max_bytes), str(path), required, optional)


def stream_csv_rows(
    path: str | Path, required: Collection[str], optional: Collection[str] = (), *, max_bytes: int
) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a large CSV file, one at a time; see `parse_csv`."""
    return _csv_rows(read_lines(path, max_bytes), str(path), required, optional)


def parse_csv(
    text: str, source: str, required: Collection[str], optional: Collection[str] = ()
) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of CSV text, as text: nothing is evaluated or converted.

    Parameters
    ----------
    text : str
        Comma-separated values with a header line.
    source : str
        What error messages call it, such as the path.
    required, optional : collection of str
        Columns that must be there and that may be there; others are refused.

    Yields
    ------
    line : int
        Line number in the file, the header being line 1.
    row : dict
        Column to text, stripped; missing optional columns are absent.

    Raises
    ------
    InvalidInputError
        For a wrong header or a row of another length, naming source and line.

    Examples
    --------
    >>> list(parse_csv("a,b\\n1,=2+3\\n", "example", ["a", "b"]))
    [(2, {'a': '1', 'b': '=2+3'})]
    """
    return _csv_rows(io.StringIO(text, newline=""), source, required, optional)


def _csv_rows(
    lines: Iterable[str], source: str, required: Collection[str], optional: Collection[str]
) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.reader(lines, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        _check_header(header, source, required, optional)
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise InvalidInputError(
                    f"{source}, line {reader.line_num}: {len(cells)} values for {len(header)} columns. "
                    "Quote values that hold a comma"
                )
            yield reader.line_num, dict(zip(header, (cell.strip() for cell in cells), strict=True))
    except csv.Error as error:
        raise InvalidInputError(f"{source}, line {reader.line_num}: not readable CSV: {error}") from None


def _check_header(header: list[str], source: str, required: Collection[str], optional: Collection[str]) -> None:
    lists = {"needs": required, "may have": optional}
    wanted = "The header " + "; ".join(f"{verb} {', '.join(names)}" for verb, names in lists.items() if names)
    missing = [name for name in required if name not in header]
    unknown = [name for name in header if name not in required and name not in optional]
    repeated = sorted({name for name in header if header.count(name) > 1})
    for problem, names in (("no column", missing), ("unknown column", unknown), ("repeated column", repeated)):
        if names:
            raise InvalidInputError(f"{source}, line 1: {problem} {', '.join(map(repr, names))}. {wanted}")
