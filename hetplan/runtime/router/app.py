"""The router's HTTP service: completions and chats, reconnecting, models, health, metrics."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import re
import reprlib
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from hetplan.errors import InvalidInputError
from hetplan.runtime.recovery import ObservedCosts
from hetplan.runtime.router.answers import Stream, error_content, whole_answer
from hetplan.runtime.router.demand import BUCKET_S, MAX_WINDOW_S, Demand, Line
from hetplan.runtime.router.engine import Engines
from hetplan.runtime.router.fields import Endpoint, RefusedField
from hetplan.runtime.router.handover import Handover
from hetplan.runtime.router.journal import Entry, Journal, JournalFullError
from hetplan.runtime.router.listening import Listener
from hetplan.runtime.router.membership import Membership, NothingServesError, OutdatedRevisionError, TargetsFile
from hetplan.runtime.router.metrics import Metrics, Table
from hetplan.runtime.router.openapi import document
from hetplan.runtime.router.producing import Producer, Run
from hetplan.runtime.router.requests import taken
from hetplan.runtime.router.sequence import Sequence, Tools
from hetplan.runtime.router.settings import MAX_ADMIN_BYTES, MAX_GRACE_S, RouterSettings, TargetSet
from hetplan.runtime.router.targets import Target, Targets

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_QUERY_TYPE = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
_BODY_TIMEOUT_S = 30.0
_SWEEP_S = 5.0
_CONNECT_TIMEOUT_S = 5.0
# vLLM's server closes connections that were idle for 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE): a request sent on one at that
# moment dies with it, and the engine would be taken for dead.
_IDLE_CONNECTION_S = 2.0
_MESSAGE_CHARACTERS = 2000
_METRICS_WINDOW_S = 60.0
_OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json"})

OnEvent = Callable[[str, dict[str, Any]], None]


class _Answer(Exception):
    """A request that ends here, with an error for the client."""

    def __init__(self, status: int, message: str, param: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> web.Response:
        """The error as the client sees it."""
        return web.Response(
            status=self.status,
            body=error_content(self.status, self.message, self.param),
            content_type="application/json",
            headers=self.headers,
        )


class Router:
    """Everything between clients and engines.

    Parameters
    ----------
    settings : RouterSettings
    api_keys : tuple of str
        Keys that clients may show; without any, no key is asked for.
    admin_key : str, optional
        Key for notices, targets and demand; without it they are not open over HTTP.
    engine_key : str, optional
        Key that the engines ask for.
    on_event : callable, optional
        Told of what operators want to know, by name and values; never of what requests hold.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        api_keys: tuple[str, ...] = (),
        admin_key: str | None = None,
        engine_key: str | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.settings = settings
        self._keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._admin_key = None if admin_key is None else hashlib.sha256(admin_key.encode()).digest()
        self._engine_headers = {} if engine_key is None else {"Authorization": f"Bearer {engine_key}"}
        self._on_event: OnEvent = on_event or (lambda _name, _values: None)
        self.metrics = Metrics()
        self._runs: dict[str, Run] = {}
        self._draining = False
        self._tools: Tools
        self._session: aiohttp.ClientSession
        self._sweeper: asyncio.Task[None]

    def application(self) -> web.Application:
        """The service, to be run by aiohttp."""
        application = web.Application(client_max_size=self.settings.max_body_bytes, middlewares=[self._guard])
        application.router.add_post("/v1/completions", self._completions)
        application.router.add_post("/v1/chat/completions", self._chat)
        application.router.add_post("/admin/notices", self._notice)
        application.router.add_get("/admin/targets", self._targets)
        application.router.add_put("/admin/targets", self._put_targets)
        application.router.add_get("/admin/demand", self._demand)
        application.router.add_get("/v1/requests/{request_id}", self._reconnect)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/health", self._health)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/openapi.json", self._openapi)
        application.on_startup.append(self._start)
        application.on_shutdown.append(self._drain)
        application.on_cleanup.append(self._stop)
        return application

    @property
    def pipelines(self) -> int:
        """How many targets there are, once the service has started."""
        return len(self._tools.targets.all)

    async def _start(self, _application: web.Application) -> None:
        settings = self.settings
        journal = Journal(
            settings.journal_bytes,
            settings.retention_s,
            folder=settings.journal_folder,
            fsync=settings.journal_fsync,
        )
        file = None if settings.journal_folder is None else TargetsFile(Path(settings.journal_folder))
        kept = None if file is None else file.read()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=10, keepalive_timeout=_IDLE_CONNECTION_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            headers=self._engine_headers,
            auto_decompress=False,
            trust_env=False,
            read_bufsize=2**20,
        )
        targets = Targets(settings, self._session, self._on_event)
        engines = Engines(settings, self._session, targets)
        costs = ObservedCosts()
        demand = Demand(lambda query_type: any(route.query_type == query_type for route in targets.routes))
        self._tools = Tools(targets, engines, journal, self.metrics, costs, demand, self._on_event)
        self._producer = Producer(self._tools, settings)
        self._handover = Handover(targets, engines, costs, settings.kv_transfer, self._session)
        self._membership = Membership(settings, targets, self._handover, self._running_on, file, kept, self._on_event)
        self.metrics.gauge("requests_in_flight", "Requests that run or wait", lambda: float(len(self._runs)))
        self.metrics.gauge("journal_bytes", "Bytes of the journal in memory", lambda: float(journal.bytes))
        self.metrics.gauge(
            "journal_disk_errors", "Journal records that did not reach the disk", lambda: float(journal.disk_errors)
        )
        self.metrics.tables(self._tables)
        targets.start()
        engines.start()
        self._sweeper = asyncio.create_task(self._sweep())

    async def _drain(self, _application: web.Application) -> None:
        """New requests are refused; aiohttp then waits for those that run."""
        self._draining = True
        self._on_event("draining", {"requests": len(self._runs)})

    async def _stop(self, _application: web.Application) -> None:
        self._sweeper.cancel()
        producers = [run.producer for run in self._runs.values() if run.producer is not None]
        for producer in producers:
            producer.cancel()
        await asyncio.gather(self._sweeper, *producers, return_exceptions=True)
        await self._membership.stop()
        await self._handover.stop()
        await self._tools.engines.stop()
        await self._tools.targets.stop()
        await self._session.close()
        self._tools.journal.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._tools.journal.sweep()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the key, and answer errors in one form."""
        try:
            if request.path not in _OPEN_PATHS:
                self._owner(request)
            return await handler(request)
        except _Answer as answer:
            return answer.response()
        except web.HTTPRequestEntityTooLarge:
            limit = self.settings.max_body_bytes
            return _Answer(413, f"the body has more than {limit} bytes; send less").response()
        except web.HTTPException as error:
            return _Answer(error.status, f"{error.status} {error.reason}", **_allow(error)).response()

    def _owner(self, request: web.Request) -> str:
        """The key that a client shows, as a digest; all keys are compared, in constant time."""
        admin = request.path.startswith("/admin/")
        known_keys = self._keys if not admin else [] if self._admin_key is None else [self._admin_key]
        if not known_keys and not admin:
            return ""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        shown = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(shown, known) for known in known_keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise _Answer(401, "no valid key; send 'Authorization: Bearer KEY'", WWW_Authenticate="Bearer")
        return shown.hex()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "completions")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "chat")

    async def _generate(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        if self._draining:
            raise _Answer(503, "the router is shutting down; send the request to another", Retry_After="1")
        body = await self._body(request)
        try:
            work = taken(body, endpoint, self.settings.max_choices)
        except RefusedField as error:
            self.metrics.ended(endpoint, "refused")
            raise _Answer(400, str(error), error.name) from None
        query_type = request.headers.get("X-Query-Type")
        if query_type is not None and not _QUERY_TYPE.fullmatch(query_type):
            raise _Answer(400, "X-Query-Type is empty, too long or holds control characters", "X-Query-Type")
        try:
            model = self._tools.targets.routed(work.model, query_type)
        except KeyError:
            known = ", ".join(self._tools.targets.models())
            raise _Answer(404, f"no pipeline serves {work.model!r}; there is {known}", "model") from None
        planned = self._tools.targets.planned(model)
        if len(self._runs) >= self.settings.max_in_flight:
            self._too_many(endpoint, planned, query_type)
            raise _Answer(
                429, f"{len(self._runs)} requests are in flight, the limit; send it again later", Retry_After="1"
            )
        entry = Entry(
            self._request_id(request, endpoint),
            endpoint,
            {**work.body, **({} if model is None else {"model": model})},
            self._owner(request),
            int(time.time()),
            secrets.randbits(62),
            query_type,
        )
        try:
            self._tools.journal.open(entry)
        except JournalFullError as error:
            self._too_many(endpoint, planned, query_type)
            raise _Answer(429, f"{error}; send it again later", Retry_After="5") from None
        except orjson.JSONEncodeError:
            raise _Answer(400, "the body is nested too deep; send at most 200 levels") from None
        self._tools.demand.asked(planned, query_type)
        run = self._runs[entry.request_id] = Run(entry, work)
        run.producer = asyncio.create_task(self._producer.produce(run))
        return await self._listen(request, run, 0)

    def _too_many(self, endpoint: Endpoint, model: str, query_type: str | None) -> None:
        self.metrics.ended(endpoint, "too_many")
        self._tools.demand.asked(model, query_type)
        self._tools.demand.rejected(model, query_type)

    def _request_id(self, request: web.Request, endpoint: Endpoint) -> str:
        given = request.headers.get("X-Request-Id")
        if given is None:
            return f"{'cmpl' if endpoint == 'completions' else 'chatcmpl'}-{secrets.token_hex(16)}"
        if not _REQUEST_ID.fullmatch(given):
            raise _Answer(
                400, "X-Request-Id is not 1 to 128 letters, digits, dots, colons, dashes or underscores", "X-Request-Id"
            )
        if self._tools.journal.get(given) is not None:
            raise _Answer(
                409, f"a request {given} is known; take up its stream at /v1/requests/{given}", "X-Request-Id"
            )
        return given

    async def _body(self, request: web.Request, max_bytes: int | None = None) -> Any:
        if request.content_type != "application/json":
            raise _Answer(415, f"the body is {request.content_type!r}; send application/json")
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                if max_bytes is not None and (request.content_length or 0) > max_bytes:
                    raise _Answer(413, f"the body has more than {max_bytes} bytes; send less")
                content = await request.read()
        except TimeoutError:
            raise _Answer(408, f"the body did not come within {_BODY_TIMEOUT_S:g} s") from None
        except web.RequestPayloadError:
            raise _Answer(400, "the body cannot be read; send it whole, and packed as Content-Encoding says") from None
        if max_bytes is not None and len(content) > max_bytes:
            raise _Answer(413, f"the body has more than {max_bytes} bytes; send less")
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise _Answer(400, f"the body is not JSON: {error}") from None

    async def _reconnect(self, request: web.Request) -> web.StreamResponse:
        if self._draining:
            raise _Answer(503, "the router is shutting down; take up the stream at another", Retry_After="1")
        request_id = request.match_info["request_id"]
        entry = self._tools.journal.get(request_id)
        if entry is None or not hmac.compare_digest(entry.owner, self._owner(request)):
            raise _Answer(404, f"no request {request_id[:128]!r} is remembered; send it anew")
        given = request.headers.get("Last-Event-ID", "0").strip()
        held = int(given) if given.isdecimal() and len(given) < 12 else -1
        if not 0 <= held <= len(entry.events):
            raise _Answer(
                400,
                f"Last-Event-ID is {given[:32]!r}; send the id of the last event you have, 0 to {len(entry.events)}",
            )
        run = self._runs.get(request_id)
        if run is None:
            run = self._runs[request_id] = Run(entry, taken(entry.body, entry.endpoint, self.settings.max_choices))
            self._tools.journal.attach(entry)
        elif run.listener is not None:
            # The old connection is dead, or its client has changed its mind.
            run.listener.cancel()
        if not entry.ended and (run.producer is None or run.producer.done()):
            run.producer = asyncio.create_task(self._producer.produce(run))
        self._on_event("reconnected", {"request_id": request_id})
        return await self._listen(request, run, held)

    async def _notice(self, request: web.Request) -> web.Response:
        """A pipeline's machine is announced to go: ``{"pipeline": 1, "grace_s": 120}``; null takes the notice back."""
        body = await self._body(request, MAX_ADMIN_BYTES)
        if not isinstance(body, dict):
            raise _Answer(400, "the body is no object; send {'pipeline': 1, 'grace_s': 120}")
        number, address = body.get("pipeline"), body.get("address")
        there = [target for target in self._tools.targets.all if target.settings.pipeline == number]
        if type(number) is not int or not there:
            known = sorted({target.settings.pipeline for target in self._tools.targets.all})
            raise _Answer(400, f"'pipeline' is {reprlib.repr(number)}; there is {known}", "pipeline")
        meant = [target for target in there if address is None or target.named["address"] == address]
        if len(meant) != 1:
            known_addresses = ", ".join(target.named["address"] for target in there)
            raise _Answer(
                409 if meant else 400,
                f"'address' is {reprlib.repr(address)}; pipeline {number} is at {known_addresses}: say which",
                "address",
            )
        target = meant[0]
        grace_s = body.get("grace_s")
        if grace_s is None:
            self._handover.recall(target)
            self._tools.targets.stays(target)
            return _json({"pipeline": number, "leaving": False})
        if type(grace_s) not in (int, float) or not 0 <= grace_s <= MAX_GRACE_S:
            raise _Answer(400, f"'grace_s' is {reprlib.repr(grace_s)}; send seconds from 0 to {MAX_GRACE_S}", "grace_s")
        self._tools.targets.leaves(target)
        counts = self._handover.move(target, float(grace_s), self._running_on(target))
        self._on_event("notice", {**target.named, "grace_s": grace_s, **counts})
        return _json({"pipeline": number, "leaving": True, **counts})

    def _running_on(self, target: Target) -> list[Sequence]:
        return [
            sequence
            for run in self._runs.values()
            for sequence in run.sequences
            if sequence.attempt is not None and sequence.attempt.target is target
        ]

    async def _targets(self, _request: web.Request) -> web.Response:
        """The targets, and what each is doing."""
        targets = self._tools.targets
        content = {
            "revision": self._membership.revision,
            "targets": [
                {
                    "pipeline": target.settings.pipeline,
                    "address": target.settings.address,
                    "port": target.settings.port,
                    "weight": target.settings.weight,
                    "model": target.model,
                    "max_in_flight": target.settings.max_in_flight,
                    "wanted": target.wanted,
                    "state": target.state,
                    "running": target.in_flight,
                    "since": datetime.fromtimestamp(target.since, UTC).isoformat(timespec="milliseconds"),
                }
                for target in targets.all
            ],
            "routes": [route.model_dump() for route in targets.routes],
        }
        return _json(content)

    async def _put_targets(self, request: web.Request) -> web.Response:
        """The targets that there are to be from now on."""
        body = await self._body(request, MAX_ADMIN_BYTES)
        try:
            wanted = TargetSet.from_dict(body)
            # What is on the disk is done as well, also where the one who asked has gone.
            await asyncio.shield(self._membership.put(wanted))
        except InvalidInputError as error:
            raise _Answer(400, str(error)[:_MESSAGE_CHARACTERS]) from None
        except (OutdatedRevisionError, NothingServesError) as error:
            raise _Answer(409, str(error)) from None
        except OSError as error:
            raise _Answer(500, f"the targets cannot be kept: {error.strerror}; nothing has changed") from None
        return await self._targets(request)

    async def _demand(self, request: web.Request) -> web.Response:
        """What is asked for lately, by model and query type."""
        given = request.query.get("window_s", "60")
        try:
            window_s = float(given)
        except ValueError:
            window_s = math.nan
        if not BUCKET_S <= window_s <= MAX_WINDOW_S:
            raise _Answer(
                400, f"'window_s' is {given[:32]!r}; send seconds from {BUCKET_S:g} to {MAX_WINDOW_S:g}", "window_s"
            )
        covered_s, lines = self._tools.demand.window(window_s)
        return _json({"window_s": window_s, "covered_s": covered_s, "demand": self._lines(lines)})

    def _lines(self, lines: list[Line]) -> list[dict[str, Any]]:
        """Lines of the demand, with the requests that are in flight."""
        in_flight = Counter(
            self._tools.demand.line_of(self._tools.targets.planned(run.entry.body.get("model")), run.entry.query_type)
            for run in self._runs.values()
        )
        rows = [{**asdict(line), "in_flight": in_flight.pop((line.model, line.query_type), 0)} for line in lines]
        # Those that came before the window and have not ended in it.
        return rows + [
            {**asdict(Line(model, query_type)), "in_flight": count} for (model, query_type), count in in_flight.items()
        ]

    def _tables(self) -> list[Table]:
        """What is counted by target, and by model and query type."""
        targets = self._tools.targets.all
        labels: list[tuple[str, ...]] = [
            (f"pipeline-{target.settings.pipeline}", target.named["address"]) for target in targets
        ]
        named = ("pipeline", "address")

        def of_targets(name: str, about: str, values: list[float]) -> Table:
            return Table(f"pipeline_{name}", about, named, list(zip(labels, values, strict=True)))

        rows = self._lines(self._tools.demand.window(_METRICS_WINDOW_S)[1])
        keys = [(row["model"], row["query_type"] or "") for row in rows]

        def of_demand(field: str, about: str) -> Table:
            known = [(key, float(row[field])) for key, row in zip(keys, rows, strict=True) if row[field] is not None]
            return Table(f"demand_{field}", f"{about}, in the last minute", ("model", "query_type"), known)

        return [
            of_targets("healthy", "1 where a pipeline answers", [float(t.healthy) for t in targets]),
            of_targets("serving", "1 where new requests are sent", [float(t.state == "serving") for t in targets]),
            of_targets("in_flight", "Requests on a pipeline", [float(t.in_flight) for t in targets]),
            of_demand("requests_per_s", "Requests that came in a second"),
            of_demand("rejected", "Requests without room or a pipeline"),
            of_demand("in_flight", "Requests that run or wait"),
            of_demand("mean_input_tokens", "Mean tokens of prompts"),
            of_demand("mean_output_tokens", "Mean tokens of answers"),
            of_demand("p90_input_tokens", "Nine in ten prompts have at most so many tokens"),
            of_demand("p90_output_tokens", "Nine in ten answers have at most so many tokens"),
        ]

    async def _listen(self, request: web.Request, run: Run, held: int) -> web.StreamResponse:
        """Send a client what comes of its request; when it goes, so does the work."""
        run.listener = asyncio.current_task()
        try:
            if run.work.stream:
                return await self._send_stream(request, run, held)
            while not run.entry.ended:
                run.entry.changed.clear()
                await run.entry.changed.wait()
            return self._send_whole(run)
        finally:
            if run.listener is asyncio.current_task():
                await self._release(run)

    async def _release(self, run: Run) -> None:
        run.listener = None
        if run.producer is not None and not run.producer.done():
            run.producer.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(run.producer, return_exceptions=True)
        if run.listener is None and self._runs.get(run.entry.request_id) is run:
            del self._runs[run.entry.request_id]
            self._tools.journal.detach(run.entry)

    def _shown_model(self, entry: Entry) -> str:
        return entry.body.get("model") or self.settings.model

    def _send_whole(self, run: Run) -> web.Response:
        entry = run.entry
        if entry.error is not None:
            raise _Answer(*entry.error)
        return web.Response(
            body=whole_answer(entry, run.work, self._shown_model(entry)),
            content_type="application/json",
            headers={"X-Request-Id": entry.request_id},
        )

    async def _send_stream(self, request: web.Request, run: Run, held: int) -> web.StreamResponse:
        entry = run.entry
        stream = Stream(entry, run.work, self._shown_model(entry), held)
        listener = Listener(request, entry, stream, self.settings, self._tools.journal.synced)
        arrived: float | None = time.monotonic() if held == 0 else None

        def on_first() -> None:
            nonlocal arrived
            if arrived is not None:
                self.metrics.first_token(time.monotonic() - arrived)
                arrived = None

        if not await listener.send(on_first):
            assert entry.error is not None  # noqa: S101
            raise _Answer(*entry.error)
        return listener.response

    async def _models(self, _request: web.Request) -> web.Response:
        lengths = {target.model: target.max_model_len for target in self._tools.targets.all if target.max_model_len}
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "hetplan", "max_model_len": lengths.get(name)}
            for name in self._tools.targets.models()
        ]
        return _json({"object": "list", "data": data})

    async def _health(self, _request: web.Request) -> web.Response:
        targets = self._tools.targets.all
        living = sum(target.healthy for target in targets)
        content = {
            "status": "draining"
            if self._draining
            else "ok"
            if living == len(targets)
            else "degraded"
            if living
            else "down",
            "requests_in_flight": len(self._runs),
            "journal_disk_errors": self._tools.journal.disk_errors,
            "pipelines": [
                {
                    "pipeline": target.settings.pipeline,
                    "healthy": target.healthy,
                    "leaving": target.state == "leaving",
                    "in_flight": target.in_flight,
                }
                for target in targets
            ],
        }
        return _json(content, status=200 if living and not self._draining else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), content_type="text/plain", charset="utf-8")

    async def _openapi(self, _request: web.Request) -> web.Response:
        return _json(document(authenticated=bool(self._keys)))


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(content), content_type="application/json")


def _allow(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": ",".join(sorted(error.allowed_methods))} if isinstance(error, web.HTTPMethodNotAllowed) else {}
