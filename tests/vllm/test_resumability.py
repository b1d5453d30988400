"""Every row of the resumability table: answers cut at every token are the answers that were not cut."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from conftest import local_plan
from cuts import PATHS, Answered, BreakingNetwork, Cuts, Kind, asked, at_a_time, differences, routed
from environment import PATIENT
from servers import Cluster

import hetplan as hp
from hetplan.runtime.router.fields import TABLE, Endpoint, Handling
from hetplan.runtime.router.requests import taken

MODEL = "tiny-llama-2"
PORTS = {"plain": 18_411, "parsing": 18_412}
# Requests that an engine decodes at once: the cuts of an answer, most of them in one batch.
IN_FLIGHT = 24
Engine = Literal["plain", "parsing"]

# Of the model's byte tokenizer: single bytes, bytes of é, ü and €, and the three special tokens.
A, B, C, D, E, F = range(64, 70)
PARTS_OF_CHARACTERS = [127, 102, 120, 158, 224, 105, A]
SPECIAL = {"257": 4, "258": 4}
END = "258"

ONE_BOOLEAN = {
    "type": "object",
    "properties": {"a": {"enum": [True]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": ONE_BOOLEAN, "strict": True}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": true}}\n</tool_call>'


@dataclass(frozen=True)
class Case:
    """A request about some rows of the table.

    ``derived`` gives more of its settings from the answer without them. What is sampled anew after a cut is not the
    ``same``; what was emitted before it is kept. A case ``matters`` where an engine answers otherwise without its rows.
    With ``twice`` the second attempt is cut too. Long answers are cut at ``every`` few tokens.
    """

    rows: tuple[str, ...]
    settings: dict[str, Any]
    endpoints: tuple[Endpoint, ...] = ("completions", "chat")
    derived: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    engine: Engine = "plain"
    same: bool = True
    matters: bool = True
    twice: bool = False
    every: int = 1
    # Tells cases of the same rows apart.
    note: str = ""

    def name(self, endpoint: Endpoint) -> str:
        return "-".join((endpoint, *self.rows, *([self.note] if self.note else [])))


def _text(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def _four_characters(answer: dict[str, Any]) -> str:
    """Of the middle of an answer, where they stand for the first time; tokens are shorter."""
    text = _text(answer)
    middle = len(text) // 2
    for start in [*range(middle, len(text) - 4), *range(middle, 0, -1)]:
        part = text[start : start + 4]
        if "�" not in part and text.find(part) == start and not part.startswith("w"):
            return part
    raise AssertionError(text)


def _stop(answer: dict[str, Any]) -> dict[str, Any]:
    return {"stop": ["never", _four_characters(answer)]}


def _stop_token(answer: dict[str, Any]) -> dict[str, Any]:
    ids = answer["choices"][0]["token_ids"]
    return {"stop_token_ids": [next(token for i, token in enumerate(ids) if i > 6 and ids.index(token) == i)]}


COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
CHAT: tuple[Endpoint, ...] = ("chat",)
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": ONE_BOOLEAN}}
# Engines refuse more than one choice at temperature 0.
TWO = {"n": 2, "temperature": 1, "top_k": 1}
LETTERS = {"allowed_token_ids": [A, B, C, D, E, F]}

CASES: tuple[Case, ...] = (
    Case(("model", "stream", "temperature", "cache_salt"), {"temperature": 0}, matters=False, twice=True),
    Case(("prompt",), {"prompt": [82, 83, 78, 77, 68, 220]}, COMPLETIONS, twice=True),
    Case(("prompt",), {"prompt": ["Tell me", "x = 1"]}, COMPLETIONS, note="several"),
    Case(("prompt",), {"prompt": [[82, 83], [78, 77, 68]], **TWO}, COMPLETIONS, note="several of ids, n=2"),
    Case(
        ("messages",), {"messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "x"}]}, CHAT
    ),
    Case(
        ("messages",), {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, CHAT, note="parts"
    ),
    Case(("temperature", "seed"), {"temperature": 1, "seed": 7}, same=False, twice=True),
    Case(("temperature",), {"temperature": 1}, same=False, matters=False),
    # Sampling that leaves one token.
    Case(("top_k",), {"temperature": 1, "top_k": 1}, matters=False),
    Case(("top_p",), {"temperature": 1, "top_p": 1e-6}, matters=False),
    Case(("min_p",), {"temperature": 1, "min_p": 1.0}, matters=False),
    Case(("logit_bias",), {"logit_bias": {"300": 2, "100": -5, "64": 2, "65": 2}}),
    Case(("allowed_token_ids",), LETTERS),
    Case(
        ("allowed_token_ids",), {"allowed_token_ids": PARTS_OF_CHARACTERS, "repetition_penalty": 2.0}, note="characters"
    ),
    Case(("ignore_eos",), {"logit_bias": {END: 5}, "ignore_eos": True}, matters=False),
    Case(("ignore_eos",), {"logit_bias": {END: 3.5}, "ignore_eos": False}, matters=False, note="end"),
    Case(("stop_token_ids",), {}, derived=_stop_token),
    Case(("stop_token_ids", "include_stop_str_in_output"), {"include_stop_str_in_output": True}, derived=_stop_token),
    Case(("repetition_penalty",), {**LETTERS, "repetition_penalty": 1.8}, twice=True),
    Case(("repetition_penalty", "frequency_penalty"), {**LETTERS, "repetition_penalty": 1.5, "frequency_penalty": 1.0}),
    Case(("skip_special_tokens",), {"logit_bias": SPECIAL, "skip_special_tokens": False}),
    Case(("truncate_prompt_tokens",), {"truncate_prompt_tokens": 5}),
    Case(("truncation_side",), {"truncate_prompt_tokens": 5, "truncation_side": "left"}, matters=False),
    Case(("truncation_side",), {"truncate_prompt_tokens": 5, "truncation_side": "right"}, note="right"),
    Case(("add_special_tokens",), {"add_special_tokens": False}, matters=False),
    Case(
        ("add_generation_prompt", "continue_final_message"),
        {
            "messages": [{"role": "user", "content": "Tell me"}, {"role": "assistant", "content": "It is"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        CHAT,
    ),
    Case(
        ("documents", "chat_template_kwargs", "reasoning_effort"),
        {
            "documents": [{"title": "a", "text": "b"}],
            "chat_template_kwargs": {"bos_token": "x"},
            "reasoning_effort": "low",
        },
        CHAT,
        matters=False,
    ),
    Case(("priority", "session_id"), {"priority": 0, "session_id": "one"}, matters=False),
    Case(("return_tokens_as_token_ids",), {"logprobs": 1, "return_tokens_as_token_ids": True}, COMPLETIONS),
    Case(
        ("return_tokens_as_token_ids",),
        {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
        CHAT,
    ),
    Case(("max_tokens",), {"max_tokens": 9}),
    Case(("max_tokens",), {"max_tokens": None}, COMPLETIONS, note="by default"),
    Case(("max_completion_tokens",), {"max_tokens": None, "max_completion_tokens": 9}, CHAT),
    Case(("min_tokens",), {"ignore_eos": False, "logit_bias": {END: 100}, "min_tokens": 7}, twice=True),
    Case(("min_tokens", "stop"), {"min_tokens": 9, "stop": ["w"]}, twice=True),
    Case(("n",), TWO, matters=False),
    Case(("n", "seed"), {"n": 2, "seed": 7, "temperature": 1}, same=False),
    Case(("stop",), {}, derived=_stop, twice=True),
    Case(("include_stop_str_in_output",), {"include_stop_str_in_output": True}, derived=_stop, twice=True),
    Case(("stop",), {"return_token_ids": False}, derived=_stop, note="without ids"),
    Case(("echo",), {"echo": True}, COMPLETIONS, matters=False),
    Case(("echo", "return_token_ids"), {"echo": True, "return_token_ids": False}, COMPLETIONS, twice=True),
    Case(("echo",), {"echo": True, "prompt": [82, 83, 78], "return_token_ids": False}, COMPLETIONS, note="of ids"),
    Case(("echo", "logprobs"), {"echo": True, "logprobs": 2, "return_token_ids": False}, COMPLETIONS),
    Case(("echo", "n"), {**TWO, "echo": True, "prompt": ["Tell me", "x = 1"], "return_token_ids": False}, COMPLETIONS),
    Case(("logprobs",), {"logprobs": 3}, COMPLETIONS, twice=True),
    Case(("logprobs",), {"logprobs": 0}, COMPLETIONS, note="none but its own"),
    Case(("logprobs", "stop"), {"logprobs": 2}, COMPLETIONS, derived=_stop),
    Case(("logprobs",), {"logprobs": True}, CHAT),
    Case(("logprobs", "top_logprobs"), {"logprobs": True, "top_logprobs": 3}, CHAT, twice=True),
    Case(("logprobs", "top_logprobs", "stop"), {"logprobs": True, "top_logprobs": 2}, CHAT, derived=_stop),
    Case(("logprob_token_ids",), {"logprobs": 1, "logprob_token_ids": [3, 4]}, COMPLETIONS),
    Case(("logprob_token_ids",), {"logprobs": True, "logprob_token_ids": [3, 4]}, CHAT),
    Case(("return_token_ids",), {"return_token_ids": False}),
    Case(("stream_options",), {"stream_options": {"include_usage": True}}),
    Case(
        ("stream_options",),
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, **TWO},
        note="all along",
    ),
    Case(("frequency_penalty",), {**LETTERS, "frequency_penalty": 1.0}, twice=True),
    Case(
        ("frequency_penalty", "logprobs", "logit_bias"),
        {**LETTERS, "frequency_penalty": 1.0, "logprobs": 2, "logit_bias": {"66": 1}},
        COMPLETIONS,
    ),
    Case(("presence_penalty",), {**LETTERS, "presence_penalty": 2.0}, twice=True),
    Case(("presence_penalty", "n", "seed"), {"presence_penalty": 2.0, "n": 2, "seed": 7, "temperature": 1}),
    Case(("presence_penalty", "logprobs"), {**LETTERS, "presence_penalty": 2.0, "logprobs": 2}, COMPLETIONS),
    Case(
        ("presence_penalty", "echo", "logprobs"),
        {"presence_penalty": 2.0, "echo": True, "logprobs": 1, "return_token_ids": False},
        COMPLETIONS,
    ),
    Case(("presence_penalty", "temperature"), {"presence_penalty": 2.0, "temperature": 1}, same=False, matters=False),
    Case(("presence_penalty", "stop"), {"presence_penalty": 2.0}, derived=_stop),
    Case(("presence_penalty", "echo"), {"presence_penalty": 2.0, "echo": True, "return_token_ids": False}, COMPLETIONS),
    Case(("bad_words",), {**LETTERS, "bad_words": ["ed", "aa", "fc", "ba", "be", "ff"]}, twice=True),
    Case(("response_format",), {"response_format": SCHEMA, "ignore_eos": False}),
    Case(
        ("structured_outputs",),
        {"structured_outputs": {"regex": "(é|€|ü|🙂){7}"}, "logit_bias": {"172": 1}, "ignore_eos": False},
        twice=True,
    ),
    Case(
        ("structured_outputs",),
        {"structured_outputs": {"choice": ["ten stones", "ten waters"]}, "ignore_eos": False},
        note="choice",
    ),
    Case(
        ("repetition_detection",),
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 3}, "allowed_token_ids": [A, B]},
    ),
    Case(
        ("spaces_between_special_tokens",),
        {"logit_bias": SPECIAL, "skip_special_tokens": False, "spaces_between_special_tokens": False},
        # Spaces are only put there by tokenizers of the slow kind.
        matters=False,
    ),
    Case(
        ("thinking_token_budget",),
        {"thinking_token_budget": 4, "prompt": "x <think>", "max_tokens": 20},
        COMPLETIONS,
        engine="parsing",
    ),
    Case(
        ("thinking_token_budget",),
        {"thinking_token_budget": 4, "messages": [{"role": "user", "content": "x <think>"}], "max_tokens": 24},
        CHAT,
        engine="parsing",
        every=2,
    ),
    Case(
        ("include_reasoning",),
        {"include_reasoning": False, "stream_options": {"include_usage": True}},
        CHAT,
        engine="parsing",
    ),
    Case(("model", "stream", "messages"), {}, CHAT, engine="parsing", matters=False, note="parsed"),
    Case(("n", "seed"), {"n": 2, "seed": 7, "temperature": 1}, CHAT, engine="parsing", note="parsed"),
    Case(("n",), {"n": 2, "temperature": 1}, CHAT, engine="parsing", same=False, matters=False, note="parsed"),
    Case(
        ("stream_options",),
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        CHAT,
        engine="parsing",
        note="parsed",
    ),
    Case(("logprobs", "top_logprobs"), {"logprobs": True, "top_logprobs": 2}, CHAT, engine="parsing", note="parsed"),
    Case(
        ("tools", "tool_choice"),
        {
            "tools": TOOLS,
            "tool_choice": "auto",
            "structured_outputs": {"choice": [CALL]},
            "max_tokens": 80,
            "chat_template_kwargs": {"enable_thinking": False},
            "ignore_eos": False,
        },
        CHAT,
        engine="parsing",
        every=5,
    ),
    Case(
        ("tools", "tool_choice"),
        {
            "tools": TOOLS,
            "tool_choice": "required",
            "max_tokens": 80,
            "chat_template_kwargs": {"enable_thinking": False},
            "ignore_eos": False,
        },
        CHAT,
        engine="parsing",
        every=5,
        note="required",
    ),
    Case(
        ("tools", "tool_choice", "parallel_tool_calls"),
        {
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
            "max_tokens": 80,
            "chat_template_kwargs": {"enable_thinking": False},
            "ignore_eos": False,
        },
        CHAT,
        engine="parsing",
        every=5,
    ),
    Case(("prompt_logprobs",), {"prompt_logprobs": 1}),
    Case(("use_beam_search", "n"), {"use_beam_search": True, "n": 2}),
    Case(("length_penalty",), {"use_beam_search": True, "n": 2, "length_penalty": 3.0}, matters=False),
    Case(
        ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        {
            "user": "one",
            "metadata": {"a": "b"},
            "store": True,
            "service_tier": "auto",
            "safety_identifier": "x",
            "prompt_cache_key": "y",
        },
        matters=False,
    ),
)

# What the engine itself refuses, in its own words.
REFUSED_BY_THE_ENGINE: dict[tuple[str, Endpoint], Any] = {
    ("suffix", "completions"): "x",
    ("chat_template", "chat"): "{{ messages[0]['content'] }}",
}
REFUSED: dict[str, Any] = {
    "best_of": 2,
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "prompt_embeds": "AAAA",
    "echo": True,
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"image": {}},
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "request_id": "mine",
    "watermarking": True,
    "stream_interval": 4,
}


def _wanted(case: Case, endpoint: Endpoint) -> dict[str, Any]:
    """The request's body; a setting of None leaves out what stands there by default."""
    start: dict[str, Any] = (
        {"prompt": "stone and water"}
        if endpoint == "completions"
        else {"messages": [{"role": "user", "content": "Tell me"}]}
    )
    body = start | {"max_tokens": 13, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "model": MODEL}
    body |= case.settings
    return {name: value for name, value in body.items() if value is not None}


class Bench:
    """An engine, the network in front of it and the router in front of that."""

    def __init__(self, engine: int, network: BreakingNetwork, router: str, session: aiohttp.ClientSession) -> None:
        self.engine, self.network, self.router, self.session = f"http://127.0.0.1:{engine}", network, router, session
        self._salts = 0

    async def undisturbed(self, endpoint: Endpoint, body: dict[str, Any], *, stream: bool) -> Answered:
        return await asked(self.session, self.engine, PATHS[endpoint], _for_stream(body, stream=stream))

    async def cut(
        self, endpoint: Endpoint, body: dict[str, Any], after: list[int], kind: Kind, *, stream: bool
    ) -> tuple[Answered, Cuts]:
        self._salts += 1
        salt = f"salt-{self._salts}"
        cuts = self.network.cuts[salt] = Cuts(list(after), kind)
        body = _for_stream(body, stream=stream) | {"cache_salt": salt}
        return await asked(self.session, self.router, PATHS[endpoint], body), cuts


def _for_stream(body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    return {name: value for name, value in body.items() if stream or name != "stream_options"} | {"stream": stream}


@asynccontextmanager
async def _bench(port: int) -> AsyncIterator[Bench]:
    timeout = aiohttp.ClientTimeout(total=300)
    async with (
        BreakingNetwork(port).running() as network,
        routed(network, MODEL) as router,
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        yield Bench(port, network, router, session)


@pytest.fixture(scope="module")
def ports(environment: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Two engines of one process: as a launch script starts it, and one with parsers of tool calls and of thoughts."""
    folder = tmp_path_factory.mktemp("resumability")
    wrapper = folder / "vllm-with-parsers"
    wrapper.write_text(
        '#!/bin/sh\nexec vllm "$@" --enable-auto-tool-choice --tool-call-parser=hermes --reasoning-parser=qwen3\n'
    )
    wrapper.chmod(0o755)
    clusters = []
    plan = local_plan(model, [[8]], in_flight=IN_FLIGHT)
    for name, port in PORTS.items():
        hp.launch(plan, out=folder / name, model=str(model), first_port=port)
        variables = {"HETPLAN_VLLM": str(wrapper)} if name == "parsing" else {}
        clusters.append(Cluster(folder / name, environment, PATIENT | variables))
    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(Cluster.start, clusters))
        yield PORTS
    finally:
        for cluster in clusters:
            cluster.stop()


IN_ALL = [pytest.param(case, endpoint, id=case.name(endpoint)) for case in CASES for endpoint in case.endpoints]


@pytest.mark.parametrize(("case", "endpoint"), IN_ALL)
def test_an_answer_that_is_cut_is_the_answer_that_is_not(case: Case, endpoint: Endpoint, ports: dict[str, int]) -> None:
    asyncio.run(_compare(case, endpoint, ports[case.engine]))


async def _compare(case: Case, endpoint: Endpoint, port: int) -> None:
    async with _bench(port) as bench:
        body = _wanted(case, endpoint)
        if case.derived is not None:
            body |= case.derived((await bench.undisturbed(endpoint, body, stream=False)).content)
        work = taken(_for_stream(body, stream=False), endpoint, 8)
        # What comes in one piece is one request, and given up when it is lost twice.
        whole = case.engine == "parsing" or work.handling in (Handling.WHOLE, Handling.REPLAYED)
        streams = [False] if work.handling is Handling.WHOLE else [False, True]
        answers = await asyncio.gather(*(bench.undisturbed(endpoint, body, stream=stream) for stream in streams))
        expected = dict(zip(streams, answers, strict=True))
        assert expected[False].status == 200, expected[False].content
        if case.matters:
            await _check_that_it_matters(case, endpoint, bench, expected[False])
        tokens = max(
            1, expected[False].content["usage"]["completion_tokens"] // len(expected[False].content["choices"])
        )
        cuts: list[tuple[list[int], Kind, bool]] = []
        for count in range(0, tokens, case.every):
            # Each choice is a request of its own.
            after = [count] * work.choices
            kind: Kind = "error event" if count % 2 else "connection"
            if True in streams:
                cuts.append((after, kind, True))
            if count % 4 < 2 or True not in streams:
                cuts.append(([count] if whole else after, kind, False))
            if case.twice:
                cuts.append((after, "connection" if count % 2 else "error event", True))
                if 0 < count < tokens - 1:
                    cuts.append(([count, (tokens - count) // 2], "connection", whole or count % 2 == 0))
        await at_a_time(IN_FLIGHT, *(_one(case, endpoint, bench, body, cut, expected[cut[2]]) for cut in cuts))


async def _check_that_it_matters(case: Case, endpoint: Endpoint, bench: Bench, expected: Answered) -> None:
    """An answer without the rows is another one: else the case would show nothing."""
    body = _wanted(case, endpoint)
    for name in case.rows:
        body.pop(name, None)
    body = _wanted(Case((), {}), endpoint) | body
    without = await bench.undisturbed(endpoint, body, stream="stream_options" in case.rows)
    if "stream_options" not in case.rows:
        found = set(differences(without.content | {"usage": None}, expected.content | {"usage": None}))
        assert found, without.content


async def _one(
    case: Case,
    endpoint: Endpoint,
    bench: Bench,
    body: dict[str, Any],
    cut: tuple[list[int], Kind, bool],
    expected: Answered,
) -> None:
    after, kind, stream = cut
    got, cuts = await bench.cut(endpoint, body, after, kind, stream=stream)
    said = f"cut after {after} tokens by a {kind}, {'streamed' if stream else 'whole'}: asked {cuts.asked}"
    assert got.status == 200, (said, got.content)
    # It was cut, and another engine asked.
    assert cuts.after_tokens == [], said
    assert len(cuts.asked) > 1, said
    assert got.event_ids == list(range(1, len(got.event_ids) + 1)), said
    if case.same:
        found = list(differences(_comparable(got.content, case), _comparable(expected.content, case)))
        assert found == [], said
    else:
        _check_what_was_kept(got, cuts, expected, body, endpoint)
    if stream:
        _check_usage(got, expected)


def _comparable(answer: dict[str, Any], case: Case) -> dict[str, Any]:
    """Without what is made up anew each time: ids of tool calls, and thoughts as they are counted.

    Engines count them by the text of each chunk, so that bytes which are no characters count in one chunking and not in
    another.
    """
    answer = copy.deepcopy(answer)
    _uncount(answer.get("usage"))
    for choice in answer["choices"]:
        if "prompt_logprobs" not in case.rows:
            # Engines repeat there what an echo has among its logprobs.
            choice.pop("prompt_logprobs", None)
        for name in ("message", "delta"):
            for call in (choice.get(name) or {}).get("tool_calls") or []:
                assert call.pop("id")
    return answer


def _uncount(usage: dict[str, Any] | None) -> None:
    details = (usage or {}).get("completion_tokens_details")
    if usage and details:
        assert 0 <= details.pop("reasoning_tokens") <= usage["completion_tokens"]


def _check_what_was_kept(
    got: Answered, cuts: Cuts, expected: Answered, body: dict[str, Any], endpoint: Endpoint
) -> None:
    """What is drawn anew differs; what came before the cut does not."""
    answers = [choice["token_ids"] for choice in got.content["choices"]]
    assert [len(ids) for ids in answers] == [body["max_tokens"]] * len(answers)
    continued = taken(_for_stream(body, stream=False), endpoint, 8).handling is Handling.EXACT
    if len(answers) == 1 and continued:
        # What broke on its way to the router was drawn anew: nobody had seen it. What the router held it kept.
        prompt = got.content.get("prompt_token_ids") or got.content["choices"][0]["prompt_token_ids"]
        held = cuts.contexts[-1][len(prompt) :]
        passed = [token for part in cuts.passed for token in part]
        assert answers[0][: len(held)] == held
        if len(cuts.passed) == 1:
            assert held == passed[: len(held)]
    else:
        for passed in cuts.passed:
            assert any(ids[: len(passed)] == passed for ids in answers)
    if len(answers) > 1:
        assert answers[0] != answers[1]
    assert {choice["finish_reason"] for choice in got.content["choices"]} == {"length"}
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert got.content.get("usage", {}).get(name) == expected.content.get("usage", {}).get(name)


def _check_usage(got: Answered, expected: Answered) -> None:
    """Usage that is told with each chunk is that of the chunk's choice until there."""
    told, should = _told(got), _told(expected)
    assert list(differences(told, should)) == []
    if told:
        assert all("usage" in chunk for chunk in got.chunks)


def _told(answered: Answered) -> dict[int, Any]:
    """The last usage that was told with a chunk of each choice."""
    told = {}
    for chunk in answered.chunks:
        if chunk["choices"] and "usage" in chunk:
            told[chunk["choices"][0]["index"]] = copy.deepcopy(chunk["usage"])
    for usage in told.values():
        _uncount(usage)
    return told


@pytest.mark.parametrize(("name", "endpoint"), sorted(REFUSED_BY_THE_ENGINE))
def test_what_an_engine_refuses_is_refused_in_its_words(name: str, endpoint: Endpoint, ports: dict[str, int]) -> None:
    async def run() -> None:
        async with _bench(ports["plain"]) as bench:
            body = _wanted(Case((), {name: REFUSED_BY_THE_ENGINE[name, endpoint]}), endpoint)
            for stream in (False, True):
                expected = await bench.undisturbed(endpoint, body, stream=stream)
                got, _ = await bench.cut(endpoint, body, [], "connection", stream=stream)
                assert got.status == expected.status == 400
                assert got.content["error"]["message"] == expected.content["error"]["message"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [(row.name, endpoint) for row in TABLE if row.handling is Handling.REFUSED for endpoint in row.endpoints],
)
def test_a_refused_field_is_refused_by_name_before_an_engine_is_asked(
    name: str, endpoint: Endpoint, ports: dict[str, int]
) -> None:
    async def run() -> None:
        async with _bench(ports["plain"]) as bench:
            body = _wanted(Case((), {name: REFUSED[name]}), endpoint)
            for stream in (False, True):
                got, cuts = await bench.cut(endpoint, body, [], "connection", stream=stream)
                assert got.status == 400
                assert got.content["error"]["param"] == name
                assert name in got.content["error"]["message"]
                assert cuts.asked == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "endpoint", "handling"),
    [
        pytest.param(row.name, endpoint, row.handling, id=f"{endpoint}-{row.name}")
        for row in TABLE
        for endpoint in row.endpoints
    ],
)
def test_every_row_has_a_case(name: str, endpoint: Endpoint, handling: Handling) -> None:
    if handling is Handling.REFUSED:
        assert name in REFUSED
    elif (name, endpoint) not in REFUSED_BY_THE_ENGINE:
        cases = [case for case in CASES if name in case.rows and endpoint in case.endpoints]
        assert cases
        bodies = [_for_stream(_wanted(case, endpoint), stream=False) for case in cases]
        handlings = {taken(body, endpoint, 8).handling for body in bodies}
        if handling in (Handling.REPLAYED, Handling.WHOLE):
            assert handlings == {handling}


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("engine", ["plain", "parsing"])
def test_a_client_of_the_engine_finds_all_it_knows(endpoint: Endpoint, engine: Engine, ports: dict[str, int]) -> None:
    """Keys of OpenAI's API: of answers, and of chunks one by one."""

    async def run() -> None:
        async with _bench(ports[engine]) as bench:
            body = _wanted(Case((), {"stream_options": {"include_usage": True}}), endpoint)
            for stream in (False, True):
                expected = await bench.undisturbed(endpoint, body, stream=stream)
                got, _ = await bench.cut(endpoint, body, [], "connection", stream=stream)
                if stream:
                    for kind in (0, 1, -2, -1):
                        assert _keys(got.chunks[kind]) >= _keys(expected.chunks[kind])
                else:
                    assert _keys(got.content) >= _keys(expected.content)

    asyncio.run(run())


# Of vLLM, and only where an engine was started or asked to give them; and the name of one engine's build, of which
# several may have written an answer.
_NOT_OPENAI = {
    "kv_transfer_params",
    "ec_transfer_params",
    "metrics",
    "routed_experts",
    "prompt_text",
    "prompt_logprobs",
    "system_fingerprint",
}


def _keys(value: Any, where: str = "") -> set[str]:
    if isinstance(value, dict):
        inner = (_keys(part, f"{where}.{name}") | {f"{where}.{name}"} for name, part in value.items())
        return {key for keys in inner for key in keys if key.rpartition(".")[2] not in _NOT_OPENAI}
    if isinstance(value, list) and value:
        return _keys(value[0], f"{where}[]")
    return set()
