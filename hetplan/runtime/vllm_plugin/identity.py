"""What tells one model's weights, as an engine lays them out, from another's."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

# What the maker of shards writes beside them, until it has become a manifest.
ROWS = "rows.json"

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Says which library wrote the file, not what the model is.
_BESIDE_THE_MODEL = {"transformers_version", "torch_dtype", "dtype"}


def config_sha256(config: Any) -> str:
    """Digest of a Hugging Face configuration: the same on every machine that has the model."""
    content = json.loads(config.to_json_string(use_diff=False))
    kept = {k: v for k, v in content.items() if not k.startswith("_") and k not in _BESIDE_THE_MODEL}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to by its name; None for embeddings, the final norm and the head."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None
