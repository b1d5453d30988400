"""A client's request as work to do: what is asked of engines at first, after a cut, and again from the start."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetplan.runtime.router.fields import (
    Endpoint,
    Field,
    Handling,
    RefusedField,
    active_fields,
    handling_of,
)
from hetplan.runtime.router.text import StopRule

_SEEDS = 2**63
# Of a linear congruential generator (Knuth, MMIX): makes seeds of neighbouring cuts differ in all bits.
_MULTIPLIER, _INCREMENT = 6_364_136_223_846_793_005, 1_442_695_040_888_963_407
_DEFAULT_MAX_TOKENS = 16
# Fields that are about the whole request, or that were used up by the first attempt.
_NOT_FOR_ENGINES = frozenset(
    {"n", "stream", "stream_options", "return_token_ids", "prompt", "messages", "model", "echo"}
)
_USED_UP = frozenset({"truncate_prompt_tokens", "truncation_side", "add_special_tokens", "suffix", "stop"})


@dataclass(slots=True, frozen=True)
class Work:
    """A request that was taken.

    ``prompts`` has one prompt per group of ``n`` choices, text or token ids; None for a chat before it is rendered.
    """

    endpoint: Endpoint
    body: Mapping[str, Any]
    rows: Mapping[str, Field]
    handling: Handling
    prompts: tuple[Any, ...]
    n: int
    stream: bool
    echo: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    model: str | None
    stop: StopRule

    @property
    def choices(self) -> int:
        """Sequences that are generated."""
        return len(self.prompts) * self.n


def taken(body: Any, endpoint: Endpoint, max_choices: int) -> Work:
    """The work in a request's body.

    Raises
    ------
    RefusedField
        If a field is of the wrong type, out of range, unknown, or not taken.
    """
    if not isinstance(body, dict):
        raise RefusedField("body", f"the body is a {type(body).__name__}; send a JSON object")
    rows = active_fields(body, endpoint)
    stream = _boolean(body, "stream")
    options = body.get("stream_options")
    if options is not None and (not stream or not isinstance(options, dict)):
        raise RefusedField("stream_options", "'stream_options' is an object, and only for stream=true")
    n = _integer(body, "n", 1, max_choices) or 1
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        _integer(body, name, 0, 2**31)
    _integer(body, "seed", -_SEEDS, _SEEDS - 1)
    penalty = body.get("frequency_penalty")
    if penalty is not None and (isinstance(penalty, bool) or not isinstance(penalty, int | float)):
        raise RefusedField("frequency_penalty", f"'frequency_penalty' is {_shown(penalty)}; send a number")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise RefusedField("model", f"'model' is {_shown(model)}; send a name from /v1/models")
    prompts = _prompts(body) if endpoint == "completions" else _messages(body)
    if len(prompts) * n > max_choices:
        raise RefusedField("n", f"{len(prompts)} prompts times n={n} are more than {max_choices} choices; send fewer")
    return Work(
        endpoint=endpoint,
        body=body,
        rows=rows,
        handling=handling_of(body, rows),
        prompts=prompts,
        n=n,
        stream=stream,
        echo=endpoint == "completions" and _boolean(body, "echo"),
        include_usage=bool(options and options.get("include_usage")),
        continuous_usage=bool(options and options.get("include_usage") and options.get("continuous_usage_stats")),
        return_token_ids=_boolean(body, "return_token_ids"),
        model=model,
        stop=StopRule(
            _strings(body, "stop"), _boolean(body, "include_stop_str_in_output"), body.get("min_tokens") or 0
        ),
    )


def first_body(
    work: Work, choice: int, prompt: Any, *, seed: int, rendered: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the first engine is asked for a choice, and every engine that answers from the start."""
    settings = {
        name: value
        for name, value in (work.body if rendered is None else rendered["sampling_params"]).items()
        if name not in _NOT_FOR_ENGINES and (rendered is not None or _for_engines(work, name))
    }
    settings |= _seed(work, choice, seed, replayed=work.handling is Handling.REPLAYED)
    if rendered is not None:
        return _generate_body(rendered, prompt, settings)
    body = settings | {"prompt": prompt, "stream": True, "return_token_ids": True}
    if work.echo:
        body["echo"] = True
    return body


def next_body(
    work: Work,
    choice: int,
    prompt: list[int],
    emitted: list[int],
    *,
    seed: int,
    rendered: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What an engine is asked to continue an answer after its emitted tokens."""
    body = first_body(work, choice, prompt, seed=seed, rendered=rendered)
    settings = body if rendered is None else body["sampling_params"]
    for name in _USED_UP | {"echo"}:
        settings.pop(name, None)
    settings["max_tokens"] = rest_of_tokens(work, rendered, emitted)
    if settings.get("min_tokens"):
        settings["min_tokens"] = max(0, settings["min_tokens"] - len(emitted))
    if work.body.get("seed") is not None:
        settings["seed"] = (settings["seed"] * _MULTIPLIER + len(emitted) * _INCREMENT) % _SEEDS
    penalty = work.body.get("frequency_penalty")
    if penalty:
        bias = {str(token): float(value) for token, value in (settings.get("logit_bias") or {}).items()}
        for token, count in Counter(emitted).items():
            bias[str(token)] = bias.get(str(token), 0.0) - penalty * count
        settings["logit_bias"] = bias
    if rendered is None:
        body["prompt"] = prompt + emitted
    else:
        body["token_ids"] = prompt + emitted
    return body


def chat_body(work: Work, choice: int, *, seed: int) -> dict[str, Any]:
    """What an engine with a parser is asked: the chat itself, with a seed so that it can be answered again."""
    body = {name: value for name, value in work.body.items() if _for_engines(work, name)}
    # An engine that hides thoughts hides the token ids of the whole answer too; they are left out here instead.
    body |= {
        "messages": work.body["messages"],
        "stream": True,
        "return_token_ids": True,
        "n": 1,
        "include_reasoning": True,
    }
    if work.include_usage:
        # Only the engine's parser can count thoughts.
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return body | _seed(work, choice, seed, replayed=True)


def whole_body(work: Work) -> dict[str, Any]:
    """What an engine is asked for an answer that comes whole."""
    return {name: value for name, value in work.body.items() if not _ignored(work, name)}


def rest_of_tokens(work: Work, rendered: Mapping[str, Any] | None, emitted: list[int]) -> int | None:
    """Tokens that an answer may still have; None for as many as the engine's length allows."""
    if rendered is not None:
        limit = rendered["sampling_params"].get("max_tokens")
    else:
        limit = work.body.get("max_tokens", _DEFAULT_MAX_TOKENS)
    return None if limit is None else max(0, limit - len(emitted))


def _generate_body(rendered: Mapping[str, Any], prompt: Any, settings: dict[str, Any]) -> dict[str, Any]:
    kept = ("cache_salt", "priority", "reasoning_ended", "reasoning_parser_kwargs")
    body = {name: rendered[name] for name in kept if rendered.get(name) is not None}
    return body | {
        "token_ids": prompt,
        "sampling_params": settings | {"n": 1},
        "stream": True,
        "return_token_ids": True,
        "output_mode": "text",
    }


def _seed(work: Work, choice: int, seed: int, *, replayed: bool) -> dict[str, int]:
    """The seed of a choice, counted up as engines do; what may be drawn again is given one."""
    given = work.body.get("seed")
    if given is not None:
        return {"seed": (given + choice % work.n + _SEEDS) % (2 * _SEEDS) - _SEEDS}
    if replayed and work.body.get("temperature") != 0:
        return {"seed": (seed + choice) % _SEEDS}
    return {}


def _for_engines(work: Work, name: str) -> bool:
    return name not in _NOT_FOR_ENGINES and not _ignored(work, name)


def _ignored(work: Work, name: str) -> bool:
    row = work.rows.get(name)
    return row is not None and row.handling is Handling.IGNORED


def _prompts(body: Mapping[str, Any]) -> tuple[Any, ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if all(_is_token(part) for part in prompt):
            return (prompt,)
        if all(isinstance(part, str) for part in prompt):
            return tuple(prompt)
        if all(isinstance(part, list) and part and all(map(_is_token, part)) for part in prompt):
            return tuple(prompt)
    raise RefusedField("prompt", "'prompt' is a text, a list of token ids, or a list of either; it may not be empty")


def _messages(body: Mapping[str, Any]) -> tuple[Any, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise RefusedField("messages", "'messages' is a list of messages; it may not be empty")
    for message in messages:
        parts = message.get("content")
        if isinstance(parts, list) and any(not isinstance(p, dict) or p.get("type") != "text" for p in parts):
            raise RefusedField("messages", "a message holds a part that is no text; only text is token ids")
    return (None,)


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RefusedField(name, f"{name!r} is {_shown(value)}; send true or false")
    return bool(value)


def _integer(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise RefusedField(name, f"{name!r} is {_shown(value)}; send a whole number from {low} to {high}")
    return value


def _strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = body.get(name)
    strings = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise RefusedField(name, f"{name!r} is {_shown(value)}; send a text or a list of texts, none of them empty")
    return tuple(strings)


def _shown(value: Any) -> str:
    # Unlike repr, also of what is nested a thousand levels deep.
    return reprlib.repr(value)[:80]
