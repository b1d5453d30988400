"""Units and how quantities are read and shown. Everything inside is SI base units; bytes are int."""

from __future__ import annotations

import re

KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40
KB = 10**3
MB = 10**6
GB = 10**9
GIGA = 10**9
TERA = 10**12
MILLION = 10**6
MICRO = 1e-6
MILLI = 1e-3
BITS_PER_BYTE = 8
SECONDS_PER_HOUR = 3600

_BYTE_UNITS = {
    "b": 1,
    "kb": KB,
    "mb": MB,
    "gb": GB,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
_BYTES = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?b)?\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Read a size such as ``"24 GiB"``, ``"80GB"`` or ``1024``.

    Parameters
    ----------
    text : str or int
        A whole number of bytes, or a number with a unit (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB).

    Returns
    -------
    int
        Bytes, rounded down.

    Raises
    ------
    ValueError
        If the text is not a non-negative size.

    Examples
    --------
    >>> parse_bytes("24 GiB")
    25769803776
    """
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a size in bytes is never negative: got {text}")
        return text
    found = _BYTES.fullmatch(text)
    if found is None:
        raise ValueError(f"not a size: {text!r}. Write a number and a unit, such as '24 GiB' or '80 GB'")
    number, unit = found.groups()
    factor = _BYTE_UNITS[(unit or "b").lower()]
    return int(number) * factor if number.isdigit() else int(float(number) * factor)


def format_bytes(count: float) -> str:
    """Bytes as GiB (or MiB when small), for people.

    >>> format_bytes(131 * GIB)
    '131.0 GiB'
    """
    if abs(count) >= GIB:
        return f"{count / GIB:,.1f} GiB"
    return f"{count / MIB:,.1f} MiB"


def format_seconds(seconds: float) -> str:
    """Seconds with three significant digits and a unit that fits.

    >>> format_seconds(0.0123)
    '12.3 ms'
    """
    if seconds == 0:
        return "0 s"
    if seconds < MILLI:
        return f"{seconds / MICRO:.3g} us"
    if seconds < 1:
        return f"{seconds / MILLI:.3g} ms"
    if seconds < 1000:
        return f"{seconds:.3g} s"
    return f"{seconds:,.0f} s"


def format_share(share: float) -> str:
    """A share in percent to one digit; one that would be rounded to none is said to be less than that.

    Examples
    --------
    >>> format_share(0.123), format_share(1e-6), format_share(0.0)
    ('12.3%', '<0.1%', '0.0%')
    """
    text = f"{share:.1%}"
    return "<0.1%" if share > 0 and text == "0.0%" else text
