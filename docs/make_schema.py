"""Write docs/schema/plan-1.json, the JSON schema of a plan file: ``python docs/make_schema.py``."""

from __future__ import annotations

import json
from pathlib import Path

import hetplan as hp

FILE = Path(__file__).resolve().parent / "schema" / "plan-1.json"


def schema_text() -> str:
    """The schema as it is written: JSON Schema 2020-12, from the types themselves."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **hp.Plan.model_json_schema()}
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
