"""What clients may ask, and what engines are asked for it."""

from __future__ import annotations

from typing import Any

import pytest

from hetplan.runtime.router.fields import TABLE, Endpoint, Handling, RefusedField
from hetplan.runtime.router.requests import first_body, next_body, taken, whole_body


def work(body: dict[str, Any], endpoint: Endpoint = "completions") -> Any:
    base = {"prompt": [5, 6]} if endpoint == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    return taken({**base, **body}, endpoint, 128)


def test_a_continued_request_asks_for_the_rest() -> None:
    asked = work({"max_tokens": 10, "min_tokens": 7, "stop": ["x"], "logit_bias": {"3": 1.0}, "frequency_penalty": 0.5})
    assert asked.handling is Handling.EXACT
    body = next_body(asked, 0, [5, 6], [3, 3, 4], seed=1, rendered=None)
    assert body == {
        "prompt": [5, 6, 3, 3, 4],
        "max_tokens": 7,
        "min_tokens": 4,
        "frequency_penalty": 0.5,
        "logit_bias": {"3": 0.0, "4": -0.5},
        "stream": True,
        "return_token_ids": True,
    }


def test_the_default_length_is_the_engines() -> None:
    assert next_body(work({}), 0, [5, 6], [1, 2], seed=1, rendered=None)["max_tokens"] == 14
    assert next_body(work({"max_tokens": None}), 0, [5, 6], [1], seed=1, rendered=None)["max_tokens"] is None


def test_choices_count_seeds_up_and_a_continued_one_draws_anew() -> None:
    asked = work({"n": 3, "seed": 11, "prompt": ["a", "b"]})
    assert [first_body(asked, i, "a", seed=0, rendered=None)["seed"] for i in range(6)] == [11, 12, 13, 11, 12, 13]
    later = {next_body(asked, 0, [1], [2] * k, seed=0, rendered=None)["seed"] for k in range(1, 50)}
    assert len(later) == 49
    assert 11 not in later
    assert all(0 <= seed < 2**63 for seed in later)


def test_a_replayed_request_has_a_seed_unless_it_is_greedy() -> None:
    sampled = work({"presence_penalty": 1})
    assert sampled.handling is Handling.REPLAYED
    assert first_body(sampled, 0, [5], seed=99, rendered=None)["seed"] == 99
    assert "seed" not in first_body(work({"presence_penalty": 1, "temperature": 0}), 0, [5], seed=99, rendered=None)


def test_a_chat_is_continued_from_its_rendered_form() -> None:
    rendered = {
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 20, "temperature": 0.0, "stop": ["x"], "n": 2},
        "cache_salt": "salt",
    }
    asked = work({"max_tokens": 20, "n": 2}, "chat")
    body = next_body(asked, 1, [1, 2, 3], [7], seed=0, rendered=rendered)
    assert body["token_ids"] == [1, 2, 3, 7]
    assert body["sampling_params"] == {"max_tokens": 19, "temperature": 0.0, "n": 1}
    assert (body["output_mode"], body["stream"], body["cache_salt"]) == ("text", True, "salt")


@pytest.mark.parametrize("row", [row for row in TABLE if row.handling is Handling.REFUSED], ids=lambda row: row.name)
def test_a_refused_field_is_named(row: Any) -> None:
    for endpoint in row.endpoints:
        with pytest.raises(RefusedField, match=row.name) as refused:
            work({row.name: "x" if row.name != "echo" else True}, endpoint)
        assert refused.value.name == row.name
        work({row.name: None}, endpoint)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": 100, "prompt": ["a", "b"]}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"model": 5}, "model"),
        ({"a_new_field": 1}, "a_new_field"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
    ],
)
def test_a_wrong_value_is_named(body: dict[str, Any], named: str | None) -> None:
    if named is None:
        work(body)
        return
    with pytest.raises(RefusedField) as refused:
        work(body)
    assert refused.value.name == named


def test_images_are_refused_before_anything_runs() -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}
    with pytest.raises(RefusedField, match="only text"):
        work({"messages": [{"role": "user", "content": [part]}]}, "chat")


def test_what_engines_do_not_know_is_not_sent_to_them() -> None:
    assert "metadata" not in whole_body(work({"metadata": {"a": "b"}, "prompt_logprobs": 1}))
    assert "metadata" not in first_body(work({"metadata": {"a": "b"}}), 0, [5], seed=0, rendered=None)
