"""The router's OpenAPI document, made from the table of fields."""

from __future__ import annotations

from typing import Any

from hetplan import __version__
from hetplan.runtime.router.demand import BUCKET_S, MAX_WINDOW_S
from hetplan.runtime.router.fields import TABLE, Endpoint, Handling
from hetplan.runtime.router.settings import MAX_GRACE_S, TargetSet

_TYPES: dict[str, dict[str, Any]] = {
    "model": {"type": "string"},
    "stream": {"type": "boolean"},
    "echo": {"type": "boolean"},
    "return_token_ids": {"type": "boolean"},
    "n": {"type": "integer", "minimum": 1},
    "max_tokens": {"type": "integer", "minimum": 0},
    "max_completion_tokens": {"type": "integer", "minimum": 0},
    "min_tokens": {"type": "integer", "minimum": 0},
    "seed": {"type": "integer"},
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number"},
    "frequency_penalty": {"type": "number"},
    "stop": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "prompt": {
        "oneOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
        ]
    },
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
        },
    },
}
_NOTICE = {
    "type": "object",
    "required": ["pipeline"],
    "properties": {
        "pipeline": {"type": "integer", "minimum": 1},
        "grace_s": {"type": ["number", "null"], "minimum": 0, "maximum": MAX_GRACE_S},
        "address": {"type": "string", "description": "HOST:PORT, where two engines have one number"},
    },
}
_ERROR = {
    "description": "An error, with what was given and the next step",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_STREAM = {"description": "The answer", "content": {"application/json": {}, "text/event-stream": {}}}


def _body(endpoint: Endpoint, required: str) -> dict[str, Any]:
    properties = {
        row.name: {**_TYPES.get(row.name, {}), "description": f"{row.handling.value}: {row.why}"}
        for row in TABLE
        if endpoint in row.endpoints and row.handling is not Handling.REFUSED
    }
    return {"type": "object", "required": [required], "properties": properties}


def document(*, authenticated: bool) -> dict[str, Any]:
    """The document as plain data."""
    errors = {str(status): _ERROR for status in (400, 401, 404, 408, 409, 413, 415, 429, 500, 502, 503, 504)}

    def post(endpoint: Endpoint, name: str) -> dict[str, Any]:
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        return {
            "operationId": endpoint,
            "parameters": [
                {"name": "X-Request-Id", "in": "header", "schema": {"type": "string"}},
                {"name": "X-Query-Type", "in": "header", "schema": {"type": "string"}},
            ],
            "requestBody": {"required": True, "content": content},
            "responses": {"200": _STREAM, **errors},
        }

    def get(name: str, media: str, **more: Any) -> dict[str, Any]:
        return {
            "operationId": name,
            "responses": {"200": {"description": "OK", "content": {media: {}}}, **errors},
            **more,
        }

    def admin(name: str, body: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        operation = get(name, "application/json", security=[{"admin": []}], **more)
        if body is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        return operation

    window_s = {"type": "number", "minimum": BUCKET_S, "maximum": MAX_WINDOW_S, "default": 60}
    target_set = TargetSet.model_json_schema(ref_template="#/components/schemas/{model}")
    security: dict[str, Any] = {"admin": {"type": "http", "scheme": "bearer", "description": "HETPLAN_ADMIN_KEY"}}
    content: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "hetplan router", "version": __version__},
        "paths": {
            "/v1/completions": {"post": post("completions", "Completion")},
            "/v1/chat/completions": {"post": post("chat", "Chat")},
            "/v1/requests/{request_id}": {
                "get": get(
                    "reconnect",
                    "text/event-stream",
                    parameters=[
                        {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}},
                        {"name": "Last-Event-ID", "in": "header", "schema": {"type": "integer", "minimum": 0}},
                    ],
                )
            },
            "/v1/models": {"get": get("models", "application/json")},
            "/health": {"get": get("health", "application/json")},
            "/metrics": {"get": get("metrics", "text/plain")},
            "/admin/notices": {"post": admin("notice", {"$ref": "#/components/schemas/Notice"})},
            "/admin/targets": {
                "get": admin("targets"),
                "put": admin("set_targets", {"$ref": "#/components/schemas/TargetSet"}),
            },
            "/admin/demand": {
                "get": admin("demand", parameters=[{"name": "window_s", "in": "query", "schema": window_s}])
            },
        },
        "components": {
            "schemas": {
                "Completion": _body("completions", "prompt"),
                "Chat": _body("chat", "messages"),
                "Notice": _NOTICE,
                **target_set.pop("$defs"),
                "TargetSet": target_set,
                "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}},
            },
            "securitySchemes": security,
        },
    }
    if authenticated:
        security["key"] = {"type": "http", "scheme": "bearer"}
        content["security"] = [{"key": []}]
    return content
