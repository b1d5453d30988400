"""Files that people write: what is refused, and that the message names the place."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from hetplan.errors import InvalidInputError
from hetplan.files import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_LINE_BYTES,
    parse_csv,
    parse_yaml,
    read_csv_rows,
    read_yaml,
    stream_csv_rows,
)

BOMB = """\
a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]
b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]
c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b]
"""


def test_yaml_gives_plain_data() -> None:
    text = "machines: {g6.12xlarge: 3}\nseen: 2026-07-20\nrate: 1.5e+9\nown: [a, null, true]\n"
    assert parse_yaml(text, "x") == {
        "machines": {"g6.12xlarge": 3},
        "seen": datetime.date(2026, 7, 20),
        "rate": 1.5e9,
        "own": ["a", None, True],
    }


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (BOMB, 1, "anchors and aliases are refused"),
        ("a: 1\nb: *a\n", 2, "anchors and aliases are refused"),
        ("a: 1\nb: &x 2\n", 2, "anchors and aliases are refused"),
        ("a: 1\nb: 2\na: 3\n", 3, "'a' is given twice"),
        ("m:\n  x: 1\n  x: 2\n", 3, "'x' is given twice"),
        ("m:\n  <<: {x: 1}\n", 2, "plain word"),
        ("? [a, b]\n: 1\n", 1, "plain word"),
        ("a: 1\nb: .nan\n", 2, "not a finite number"),
        ("a: -.inf\n", 1, "not a finite number"),
        ("a: 1.0e+999\n", 1, "not a finite number"),
        ("a: 1\nb: !!python/object/apply:os.system [ls]\n", 2, "could not determine a constructor"),
        ("a: 1\nb: [1, 2\n", 3, "expected"),
        ("a: 1\n--- \nb: 2\n", 2, "another document"),
        ("a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), 1, f"limit of {MAX_DEPTH}"),
        ("a: " + "[" * 5000, 1, f"limit of {MAX_DEPTH}"),
    ],
)
def test_yaml_tricks_and_mistakes_are_refused_with_their_line(text: str, line: int, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_yaml(text, "cluster.yaml")
    assert str(caught.value).startswith(f"cluster.yaml, line {line}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "- 1\n- 2\n", "plain", "9" * 5000, "a: " + "9" * 5000, "a: \x07", "a: 2026-13-45"]
)
def test_other_bad_yaml_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^cluster\.yaml"):
        parse_yaml(text, "cluster.yaml")


def test_a_large_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_text("a: " + "x" * MAX_BYTES)
    with pytest.raises(InvalidInputError, match=r"big\.yaml: larger than the limit of 1\.0 MiB"):
        read_yaml(path)
    with pytest.raises(InvalidInputError, match="larger than the limit"):
        parse_yaml("a: " + "x" * MAX_BYTES, "text")
    with pytest.raises(InvalidInputError, match=r"absent\.yaml: cannot be read"):
        read_yaml(tmp_path / "absent.yaml")
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(InvalidInputError, match="line 2: not UTF-8"):
        read_yaml(path)


def test_a_stream_of_rows_has_the_same_limits(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\ufeffname\n" + "x\n" * 10, encoding="utf-8")
    assert list(stream_csv_rows(path, ["name"], max_bytes=100))[-1] == (11, {"name": "x"})
    with pytest.raises(InvalidInputError, match=r"rows\.csv: larger than the limit"):
        list(stream_csv_rows(path, ["name"], max_bytes=20))
    path.write_text("name\n" + "x" * (MAX_LINE_BYTES + 1))
    with pytest.raises(InvalidInputError, match=r"line 2: longer than 1\.0 MiB"):
        list(stream_csv_rows(path, ["name"], max_bytes=4 * MAX_LINE_BYTES))
    path.write_bytes(b"name\nx\n\xff\n")
    with pytest.raises(InvalidInputError, match="line 3: not UTF-8"):
        list(stream_csv_rows(path, ["name"], max_bytes=100))


def test_csv_rows_stay_text_and_carry_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffname, count\n=1+1, 2\n\n"a, b",3\n', encoding="utf-8")
    rows = list(read_csv_rows(path, ["name"], ["count"]))
    assert rows == [(2, {"name": "=1+1", "count": "2"}), (4, {"name": "a, b", "count": "3"})]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: no column 'name'"),
        ("count\n1\n", "line 1: no column 'name'"),
        ("name,colour\n", "line 1: unknown column 'colour'"),
        ("name,name\n", "line 1: repeated column 'name'"),
        ("name,count\na,1\nb\n", "line 3: 1 values for 2 columns"),
        ('name\n"open\n', "not readable CSV"),
    ],
)
def test_csv_mistakes_are_refused_with_their_line(text: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^offers") as caught:
        list(parse_csv(text, "offers", ["name"], ["count"]))
    assert words in str(caught.value)
