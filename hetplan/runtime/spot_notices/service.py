"""The one door to a metadata service: short questions, and answers that are never trusted."""

from __future__ import annotations

import datetime
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hetplan.errors import InvalidInputError
from hetplan.units import KIB

# The longest documented answer, Azure's list of events, has a few hundred bytes an event.
MAX_ANSWER_BYTES = 64 * KIB
_RFC_1123 = re.compile(r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), (\d\d) ([A-Z][a-z]{2}) (\d{4}) (\d\d):(\d\d):(\d\d) GMT")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class ServiceError(Exception):
    """A question got no answer, or not one that the cloud documents. Its text holds nothing that was answered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: where it is from, its status, headers and body."""

    path: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    def text(self) -> str:
        """The body as text, without the space around it."""
        try:
            return self.body.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise ServiceError(f"{self.path}: not UTF-8") from None

    def record(self) -> dict[str, Any]:
        """The body as one JSON object."""
        try:
            content = json.loads(self.text())
        # Brackets nested deeply enough exhaust the parser's stack.
        except (ValueError, RecursionError):
            raise ServiceError(f"{self.path}: not JSON") from None
        if not isinstance(content, dict):
            raise ServiceError(f"{self.path}: not a JSON object")
        return content


class MetadataService:
    """Asks a metadata service.

    Parameters
    ----------
    base_url : str
        Where it is: http or https, without user, query or fragment.
    timeout_s : float
        Seconds for a whole answer, above 0.

    Raises
    ------
    InvalidInputError
        If the address is another kind of address, or aiohttp is not installed.
    """

    def __init__(self, base_url: str, timeout_s: float) -> None:
        if importlib.util.find_spec("aiohttp") is None:
            raise InvalidInputError("watching a metadata service needs aiohttp; install hetplan[runtime]")
        self._base_url = _checked(base_url)
        self._timeout_s = timeout_s

    async def ask(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        query: Mapping[str, str] | None = None,
        record: Mapping[str, Any] | None = None,
        wait_s: float = 0.0,
        accepted: tuple[int, ...] = (200,),
    ) -> Answer:
        """One question, and its answer if the status is an accepted one.

        Parameters
        ----------
        method, path : str
            Such as "GET" and "/latest/meta-data".
        headers, query : mapping of str to str
            Added to the question.
        record : mapping, optional
            Sent as JSON.
        wait_s : float
            Seconds that the service was asked to wait before it answers, beyond the time for an answer.
        accepted : tuple of int
            Statuses that mean something here; a redirect is never followed.

        Raises
        ------
        ServiceError
            If there is no whole answer in time, or another status.
        """
        import aiohttp

        # The environment's proxy and .netrc are for the internet, and a compressed answer has no length to trust. Each
        # question has its own connection: a kept one may have died unseen when it is needed.
        session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._timeout_s + wait_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        )
        try:
            async with (
                session,
                session.request(
                    method, self._base_url + path, headers=headers, params=query, json=record, allow_redirects=False
                ) as response,
            ):
                if response.status not in accepted:
                    raise ServiceError(f"{path}: status {response.status}")
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise ServiceError(f"{path}: more than {MAX_ANSWER_BYTES} bytes")
                return Answer(path, response.status, response.headers, bytes(body))
        # TimeoutError is an OSError; aiohttp raises ValueError for headers and addresses that it cannot take.
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServiceError(f"{path}: no answer ({type(error).__name__})") from None


def text_of(record: Mapping[str, Any], key: str, path: str) -> str:
    """The text under a key of an answer."""
    value = record.get(key)
    if not isinstance(value, str):
        raise ServiceError(f"{path}: {key} is not text")
    return value


def iso_time(text: str, path: str) -> datetime.datetime:
    """A time such as 2026-03-01T12:00:00Z, in UTC."""
    try:
        moment = datetime.datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return moment.astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        pass
    raise ServiceError(f"{path}: not an ISO 8601 time with a zone")


def rfc_1123_time(text: str, path: str) -> datetime.datetime:
    """A time such as Sun, 01 Mar 2026 12:00:00 GMT, in UTC, whatever the locale."""
    found = _RFC_1123.fullmatch(text)
    if found is not None and found[2] in _MONTHS:
        day, _, year, hour, minute, second = found.groups()
        month = _MONTHS.index(found[2]) + 1
        try:
            return datetime.datetime(
                int(year), month, int(day), int(hour), int(minute), int(second), tzinfo=datetime.UTC
            )
        except ValueError:
            pass
    raise ServiceError(f"{path}: not an RFC 1123 time")


def _checked(base_url: str) -> str:
    # What is between // and @ may be a password, so that no message repeats the address.
    if re.search(r"[\s\x00-\x1f\x7f]", base_url):
        raise InvalidInputError("base_url has spaces or control characters; give an address such as http://10.0.0.1:80")
    try:
        parts = urlsplit(base_url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise InvalidInputError("base_url is no address of a service; give one that begins with http:// or https://")
    if "@" in parts.netloc or "?" in base_url or "#" in base_url:
        raise InvalidInputError("base_url has a user, a query or a fragment; give scheme, host, port and path only")
    return base_url.rstrip("/")
