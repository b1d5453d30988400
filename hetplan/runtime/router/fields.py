"""How each field of a request survives the loss of an engine: the resumability table.

A request that streams is continued by sending its prompt's and its emitted token ids, and the rest of ``max_tokens``,
to another engine. That engine knows the emitted tokens only as a prompt, so that a field is one of

- exact: it looks at single tokens or at the whole sequence, and continues as if nothing had happened;
- emulated: it counts or compares what was emitted; the router does that part itself, or restates it;
- replayed: it keeps a state in the engine that cannot be restated. The answer is generated again from its start with
  the same seed, compared token by token with what was sent, and goes on where it stopped;
- whole: it cannot be streamed. The request is passed on as it is, and anew when its engine dies: nothing of the answer
  was sent yet;
- ignored: engines take no notice of it, nor does the router;
- refused: by name, before anything runs.

A field that is not in the table is refused too: what it does to a continued answer is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

Endpoint = Literal["completions", "chat"]


class Handling(Enum):
    """What becomes of a field when an engine is lost."""

    EXACT = "exact"
    EMULATED = "emulated"
    REPLAYED = "replayed"
    WHOLE = "whole"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """One row: a field, how it survives, why, and for which values (by default all but null)."""

    name: str
    handling: Handling
    why: str
    active: Callable[[Any], bool] = lambda value: value is not None
    endpoints: tuple[Endpoint, ...] = ("completions", "chat")
    values: str = "any"


def _nonzero(value: Any) -> bool:
    return value not in (None, 0, 0.0, False)


def _given(value: Any) -> bool:
    return value not in (None, [], {}, "", False)


def _not_one(value: Any) -> bool:
    return value not in (None, 1)


def _format(value: Any) -> bool:
    return _given(value) and not (isinstance(value, dict) and value.get("type") == "text")


def _tools_wanted(value: Any) -> bool:
    return value not in (None, "none")


EXACT, EMULATED, REPLAYED = Handling.EXACT, Handling.EMULATED, Handling.REPLAYED
WHOLE, IGNORED, REFUSED = Handling.WHOLE, Handling.IGNORED, Handling.REFUSED
_COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
_CHAT: tuple[Endpoint, ...] = ("chat",)

_PARSED = "the engine's parser reads the answer from its start"
_TOKENWISE = "looks at one position at a time"

TABLE: tuple[Field, ...] = (
    Field("model", EXACT, "routes the request; each engine is asked by the name it serves"),
    Field("stream", EXACT, "engines always stream to the router"),
    Field("prompt", EXACT, "its token ids, as the first engine gave them, are sent again", endpoints=_COMPLETIONS),
    Field("messages", EXACT, "rendered to token ids once, by an engine's own endpoint", endpoints=_CHAT),
    *(
        Field(name, EXACT, _TOKENWISE)
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "logit_bias",
            "allowed_token_ids",
            "ignore_eos",
            "stop_token_ids",
        )
    ),
    Field("repetition_penalty", EXACT, "counts prompt and answer alike"),
    Field("skip_special_tokens", EXACT, "looks at one token at a time"),
    Field("truncate_prompt_tokens", EXACT, "done once: the truncated ids are sent again"),
    Field("truncation_side", EXACT, "done once: the truncated ids are sent again"),
    Field("add_special_tokens", EXACT, "done once: the ids hold them"),
    Field("suffix", EXACT, "rendered into the token ids once", endpoints=_COMPLETIONS),
    *(
        Field(name, EXACT, "rendered into the token ids once", endpoints=_CHAT)
        for name in (
            "add_generation_prompt",
            "continue_final_message",
            "documents",
            "chat_template",
            "chat_template_kwargs",
            "reasoning_effort",
        )
    ),
    *(Field(name, EXACT, "passed on with each attempt") for name in ("priority", "cache_salt", "session_id")),
    Field("return_tokens_as_token_ids", EXACT, "passed on with each attempt", _nonzero, _COMPLETIONS),
    Field("return_tokens_as_token_ids", REPLAYED, "only an engine's own chat writes them so", _nonzero, _CHAT),
    Field("max_tokens", EMULATED, "the rest of it is asked for"),
    Field("max_completion_tokens", EMULATED, "the rest of it is asked for", endpoints=_CHAT),
    Field("min_tokens", EMULATED, "the rest of it is asked for"),
    Field("n", EMULATED, "each choice is a request of its own; seeds are counted up as the engine does"),
    Field("seed", EMULATED, "emitted tokens are kept; what follows is drawn with a seed derived from it"),
    Field("stop", EMULATED, "after a cut the router looks for them itself, also across it", _given),
    Field("include_stop_str_in_output", EMULATED, "after a cut the router does it itself"),
    Field(
        "echo",
        EMULATED,
        "the prompt's text is put before the first tokens, unless ids are asked for",
        _nonzero,
        _COMPLETIONS,
    ),
    Field("logprobs", EMULATED, "text offsets are counted on", endpoints=_COMPLETIONS),
    Field("logprobs", EXACT, _TOKENWISE, endpoints=_CHAT),
    Field("top_logprobs", EXACT, _TOKENWISE, endpoints=_CHAT),
    Field("logprob_token_ids", EXACT, _TOKENWISE, _given, _COMPLETIONS),
    Field("logprob_token_ids", REPLAYED, "only an engine's own chat gives them", _given, _CHAT),
    Field("return_token_ids", EMULATED, "always asked for; passed on where the client asked"),
    Field("stream_options", EMULATED, "the router counts"),
    Field("frequency_penalty", EMULATED, "emitted tokens are counted into logit_bias", _nonzero),
    Field("presence_penalty", REPLAYED, "the engine would count a token that comes again twice", _nonzero),
    Field("bad_words", REPLAYED, "words of several tokens may lie across a cut", _given),
    Field("response_format", REPLAYED, "the grammar's state is the engine's", _format, values="but type text"),
    Field("structured_outputs", REPLAYED, "the grammar's state is the engine's", _given),
    Field("thinking_token_budget", REPLAYED, "the engine counts what was thought"),
    Field("repetition_detection", REPLAYED, "the engine looks back at what it generated"),
    Field(
        "spaces_between_special_tokens",
        REPLAYED,
        "depends on the token before",
        lambda value: value is False,
        values="false",
    ),
    Field("tools", REPLAYED, _PARSED, _given, _CHAT),
    Field("tool_choice", REPLAYED, _PARSED, _tools_wanted, _CHAT, "but none"),
    Field(
        "parallel_tool_calls",
        REPLAYED,
        _PARSED,
        lambda v: v is False,
        _CHAT,
        "false",
    ),
    Field(
        "include_reasoning",
        REPLAYED,
        _PARSED,
        lambda v: v is False,
        _CHAT,
        "false",
    ),
    Field("prompt_logprobs", WHOLE, "engines give them in one answer only"),
    Field("use_beam_search", WHOLE, "engines give its answer at once", _nonzero),
    Field("length_penalty", WHOLE, "belongs to beam search", _not_one),
    *(
        Field(name, IGNORED, "no engine setting")
        for name in ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
    ),
    Field("best_of", REFUSED, "engines do not know it; use n", _not_one, _COMPLETIONS),
    Field("functions", REFUSED, "replaced by tools", endpoints=_CHAT),
    Field("function_call", REFUSED, "replaced by tool_choice", endpoints=_CHAT),
    Field("prompt_embeds", REFUSED, "has no token ids to send again", _given, _COMPLETIONS),
    Field("echo", REFUSED, "the last message would be sent before the answer", _nonzero, _CHAT),
    Field("audio", REFUSED, "is not token ids", endpoints=_CHAT),
    Field("modalities", REFUSED, "only text is token ids", lambda v: v not in (None, ["text"]), _CHAT, "but text"),
    Field("mm_processor_kwargs", REFUSED, "only text is token ids", _given, _CHAT),
    Field("media_io_kwargs", REFUSED, "only text is token ids", _given, _CHAT),
    Field("kv_transfer_params", REFUSED, "is the router's own; from a client it would reach other requests' caches"),
    Field("ec_transfer_params", REFUSED, "is the router's own; from a client it would reach other requests' caches"),
    Field("vllm_xargs", REFUSED, "what an extension keeps in the engine is not known", _given),
    Field("request_id", REFUSED, "is the router's own; send X-Request-Id", _given),
    Field("watermarking", REFUSED, "its state is the engine's", _nonzero),
    Field("stream_interval", REFUSED, "tokens are passed on as they come", _not_one),
)

_ROWS: Mapping[tuple[Endpoint, str], Field] = {(e, row.name): row for row in TABLE for e in row.endpoints}


class RefusedField(Exception):
    """A field that the router does not take; the message says which, why, and the next step."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def active_fields(body: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Field]:
    """The rows of the fields that a body sets to something.

    Raises
    ------
    RefusedField
        If a field is not in the table, or its row says refused.
    """
    rows = {}
    for name, value in body.items():
        row = _ROWS.get((endpoint, name))
        if row is None:
            if value is None:
                continue
            raise RefusedField(
                name[:64], f"{name[:64]!r} is not a field that is known to survive the loss of an engine; leave it out"
            )
        if not row.active(value):
            continue
        if row.handling is Handling.REFUSED:
            raise RefusedField(name, f"{name!r} is not taken: {row.why}. Leave it out")
        rows[name] = row
    return rows


def handling_of(body: Mapping[str, Any], rows: Mapping[str, Field]) -> Handling:
    """How a request as a whole survives: EXACT (continued, with what is emulated), REPLAYED or WHOLE.

    Raises
    ------
    RefusedField
        If a field that cannot be streamed meets ``"stream": true``.
    """
    handlings = {row.handling for row in rows.values()}
    if Handling.WHOLE in handlings:
        if body.get("stream"):
            name = next(name for name, row in rows.items() if row.handling is Handling.WHOLE)
            raise RefusedField(name, f"{name!r} cannot be streamed: {rows[name].why}. Send stream=false")
        return Handling.WHOLE
    # A counted penalty is restated as a bias, which the engine applies before it scales by the repetition penalty.
    scaled = "frequency_penalty" in rows and _not_one(body.get("repetition_penalty"))
    if scaled or Handling.REPLAYED in handlings:
        return Handling.REPLAYED
    return Handling.EXACT
