"""Write docs/schema/plan-1.json, the JSON schema of a plan file: ``python docs/make_schema.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hetplan as hp

FILE = Path(__file__).resolve().parent / "schema" / "plan-1.json"


def schema_text() -> str:
    """The schema as it is written: JSON Schema 2020-12, from the types themselves."""
    schema = hp.Plan.model_json_schema()
    # Docstrings are in the reference; without them the schema changes only when the form does.
    for record in (schema, *schema["$defs"].values()):
        record.pop("description", None)
    whole: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(whole, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
