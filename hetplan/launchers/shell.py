"""The target "shell": a folder with the plan, one script per machine, router weights and a README."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetplan.catalog.engines import LIMITS, EngineProfile, block_tokens
from hetplan.errors import InvalidInputError
from hetplan.launchers.commands import SOCKET, Word, engine_variables, engine_words, store_words
from hetplan.launchers.names import comment, quoted
from hetplan.launchers.stores import ShardSource
from hetplan.launchers.vllm import HTTP_PORT, CacheSharing, Node, StoreMemory, model_source, nodes_of, sources_of
from hetplan.plan import Plan

# What a script loads instead of its model, with one model in the folder; with several each has one of its own.
_MODEL_VARIABLE = "HETPLAN_MODEL"


@dataclass(frozen=True, slots=True)
class _Part:
    """A plan that places one model, its machines, what its engines load, and the variable that says otherwise."""

    plan: Plan
    nodes: tuple[Node, ...]
    loaded: str
    variable: str

    @property
    def model(self) -> str:
        return self.plan.placement.model.name


def shell_files(
    plan: Plan,
    engine: EngineProfile,
    *,
    placed: Sequence[Plan] | None = None,
    model: str | Mapping[str, str] | None = None,
    first_port: int = HTTP_PORT,
    sharing: CacheSharing | None = None,
    source: ShardSource | None = None,
) -> dict[str, str]:
    """The files of the target, by name; the same plan gives the same bytes.

    Parameters
    ----------
    plan : Plan
    engine : EngineProfile
        Engine version that the scripts are for.
    placed : sequence of Plan, optional
        Of an allocation plan: what places each of its deployments, in order. By default the plan places one model.
    model : str, or mapping of str to str, optional
        Path or Hugging Face id that the engine loads, where there are several models by their names; by default each
        model's own id.
    first_port : int
        HTTP port of the first pipeline; the others follow.
    sharing : CacheSharing, optional
        How engines hand caches to each other; by default they do not.
    source : ShardSource, optional
        Where the tensor store of each machine reads the weights; by default engines load them themselves.

    Raises
    ------
    EngineLimitError
        If the engine cannot run a pipeline; it names the limit.
    InvalidInputError
        If a name in the plan is not fit for a command line, caches cannot be shared by its pipelines, or what is asked
        for is of one model and the plan has several.
    """
    parts = _parts(plan if placed is None else placed, engine, model, first_port, sharing, source)
    nodes = [node for part in parts for node in part.nodes]
    files = {node.script: _script(node, part) for part in parts for node in part.nodes}
    if source is not None:
        files |= {
            node.store_script: _store_script(node, node.store, source) for node in nodes if node.store is not None
        }
    files["wait-ready.sh"] = _wait_ready(nodes)
    files["router.json"] = json.dumps(_router(plan, parts, sharing), indent=1) + "\n"
    files["plan.json"] = plan.to_json() + "\n"
    files["README.md"] = _readme(plan, engine, parts)
    return files


def _parts(
    placed: Plan | Sequence[Plan],
    engine: EngineProfile,
    model: str | Mapping[str, str] | None,
    first_port: int,
    sharing: CacheSharing | None,
    source: ShardSource | None,
) -> list[_Part]:
    """The machines of each plan, pipelines and ports numbered through."""
    plans = (placed,) if isinstance(placed, Plan) else tuple(placed)
    names = list(dict.fromkeys(one.placement.model.name for one in plans))
    given = sources_of(names, model)
    if source is not None and len(names) > 1:
        raise InvalidInputError(
            f"a store's shards are of one model, and the plan has {', '.join(names)}. Leave store out, or launch each "
            "of hetplan.placement_plans(plan) with its own"
        )
    if sharing is not None and len(plans) > 1:
        raise InvalidInputError(
            f"caches are handed over between pipelines of one deployment, and the plan has {len(plans)}. Leave "
            "kv_connector out, or launch each of hetplan.placement_plans(plan) with it"
        )
    parts: list[_Part] = []
    number = 1
    for one in plans:
        name = one.placement.model.name
        nodes = nodes_of(
            one, engine, first_port=first_port + number - 1, first_pipeline=number, sharing=sharing, source=source
        )
        number = 1 + nodes[-1].pipeline
        variable = _MODEL_VARIABLE if len(names) == 1 else f"{_MODEL_VARIABLE}_{1 + names.index(name)}"
        parts.append(_Part(one, tuple(nodes), model_source(one.placement.model, given.get(name)), variable))
    return parts


def write_shell(
    plan: Plan,
    out: Path,
    engine: EngineProfile,
    *,
    placed: Sequence[Plan] | None = None,
    model: str | Mapping[str, str] | None = None,
    first_port: int = HTTP_PORT,
    sharing: CacheSharing | None = None,
    source: ShardSource | None = None,
    dry_run: bool = False,
) -> list[Path]:
    """Write the files into a new or empty folder; with ``dry_run`` only say which.

    Raises
    ------
    InvalidInputError
        If the folder is not empty or cannot be written.
    """
    files = shell_files(plan, engine, placed=placed, model=model, first_port=first_port, sharing=sharing, source=source)
    paths = [out / name for name in sorted(files)]
    if dry_run:
        return paths
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InvalidInputError(f"{out} exists and is not an empty folder; choose another or empty it")
        out.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.write_text(files[path.name], encoding="utf-8")
            if path.suffix == ".sh":
                path.chmod(0o755)
    except OSError as error:
        raise InvalidInputError(f"cannot write {out}: {error.strerror}. Choose another folder") from None
    return paths


def _script(node: Node, part: _Part) -> str:
    """One machine's script. Values of the plan are quoted words; addresses come from the environment."""
    layers = ", ".join(
        f"{s.layers[0]}-{s.layers[1] - 1} on GPU {','.join(map(str, s.gpu_indices))}" for s in node.stages
    )
    lines = [
        "#!/usr/bin/env bash",
        f"# Pipeline {node.pipeline}, node {node.rank}: {comment(node.instance_type)} ({comment(node.offer)})",
        f"# Layers {layers}",
        "set -euo pipefail",
        "",
        "# Private addresses of this machine and of the pipeline's first. vLLM's own queues speak pickle over TCP:",
        "# only machines of this pipeline may reach them.",
    ]
    for name in dict.fromkeys((node.address, node.head_address)):
        if node.local:
            lines.append(f': "${{{name}:=127.0.0.1}}"')
        else:
            lines.append(f': "${{{name}:?set it to the private address of that machine}}"')
    lines += [f"model={quoted(part.loaded)}", f'model="${{{part.variable}:-$model}}"', ""]
    lines += [f"export {name}={_word(word, node)}" for name, word in engine_variables(node).items()]
    lines += ["", "arguments=("]
    lines += [f"  {_word(word, node)}" for word in engine_words(node)]
    lines += [")", 'exec "${HETPLAN_VLLM:-vllm}" serve "${arguments[@]}"', ""]
    return "\n".join(lines)


def _word(word: Word, node: Node) -> str:
    """A word of a shell: quoted, or read from a variable."""
    if isinstance(word, str):
        return quoted(word)
    if word.name == SOCKET:
        # The environment's, else one in the user's own folder.
        folder = "${XDG_RUNTIME_DIR:-/tmp/hetplan-$(id -u)}"
        return f'{word.prefix}"${{{SOCKET}:-{folder}/hetplan/{node.name}.sock}}"'
    return f'{word.prefix}"${word.name}"'


def _store_script(node: Node, store: StoreMemory, source: ShardSource) -> str:
    """What serves a machine's weights, and keeps them while engines come and go."""
    lines = [
        "#!/usr/bin/env bash",
        f"# Tensor store of pipeline {node.pipeline}, node {node.rank}: "
        f"{comment(node.instance_type)} ({comment(node.offer)})",
        "set -euo pipefail",
        "",
        "arguments=(",
        *(f"  {_word(word, node)}" for word in store_words(store, source)),
        ")",
        'exec "${HETPLAN:-hetplan}" store serve "${arguments[@]}"',
        "",
    ]
    return "\n".join(lines)


def _wait_ready(nodes: list[Node]) -> str:
    lines = [
        "#!/usr/bin/env bash",
        "# Waits until every pipeline answers; fails after HETPLAN_READY_TIMEOUT_S seconds (default 1800).",
        "set -euo pipefail",
        'limit="${HETPLAN_READY_TIMEOUT_S:-1800}"',
        "ready() {",
        '  until curl --fail --silent --show-error --max-time 5 --output /dev/null "$1" 2>/dev/null; do',
        '    if (( SECONDS > limit )); then echo "not ready after ${limit} s: $1" >&2; exit 1; fi',
        "    sleep 2",
        "  done",
        '  echo "ready: $1"',
        "}",
    ]
    for node in nodes:
        if node.rank == 0:
            default = ":-127.0.0.1" if node.local else ":?set it to the private address of that machine"
            lines.append(f'ready "http://${{{node.address}{default}}}:{node.port}/health"')
    return "\n".join(lines) + "\n"


def _router(plan: Plan, parts: list[_Part], sharing: CacheSharing | None) -> dict[str, object]:
    """Targets and weights for a weighted round-robin: each pipeline's predicted requests per second.

    Of an allocation the weights are what the plan sends to a pipeline, and the routes its shares.
    """
    allocated = plan is not parts[0].plan
    heads = [(node, part.model) for part in parts for node in part.nodes if node.rank == 0]
    rates = [
        pipeline.predictions.requests_per_s.value
        for deployment in plan.deployments
        for pipeline in deployment.pipelines
        for _ in range(pipeline.count)
    ]
    content: dict[str, object] = {
        "model": parts[0].model,
        "targets": [
            {
                "pipeline": node.pipeline,
                "address": f"${{{node.address}:-127.0.0.1}}" if node.local else f"${{{node.address}}}",
                "port": node.port,
                "weight": rate,
            }
            | ({"model": model} if allocated else {})
            for (node, model), rate in zip(heads, rates, strict=True)
        ],
    }
    if allocated:
        content["routes"] = _routes(plan, parts)
    if sharing is not None:
        content["kv_transfer"] = _kv_transfer(parts[0].plan, sharing)
    return content


def _routes(plan: Plan, parts: list[_Part]) -> list[dict[str, object]]:
    """The share of each query type that goes to each model, on whichever machines."""
    shares: dict[tuple[str, str], float] = {}
    for route in plan.routes:
        key = (route.query_type, parts[route.deployment].model)
        shares[key] = min(shares.get(key, 0.0) + route.fraction, 1.0)
    return [{"query_type": kind, "model": model, "fraction": share} for (kind, model), share in shares.items()]


def _kv_transfer(plan: Plan, sharing: CacheSharing) -> dict[str, object]:
    """How caches are sent, and what that takes: the slowest link between machines of the plan."""
    model = plan.placement.model
    link = min((m.inter_node_link for m in plan.placement.cluster.instance_types), key=lambda link: link.bytes_per_s)
    return {
        "storage": sharing.storage,
        "block_tokens": max(block_tokens(machine) for machine in plan.placement.cluster.instance_types),
        "layers": model.layer_count,
        "cache_bytes_per_token": model.kv_bytes_per_token(),
        "bytes_per_s": link.bytes_per_s,
        "latency_s": link.latency_s,
        "source": "the plan's slowest link between machines; measure a transfer and write what it takes here",
    }


def _readme(plan: Plan, engine: EngineProfile, parts: list[_Part]) -> str:
    nodes = [node for part in parts for node in part.nodes]
    loads = {part.variable: part for part in parts}
    names = ", ".join(comment(part.model) for part in loads.values())
    loaded = ", ".join(f"`{comment(part.loaded)}`" for part in loads.values())
    lines = [
        f"# {names} on {len(nodes)} machine{'s' if len(nodes) > 1 else ''}",
        "",
        f"{plan.requests_per_s:.3f} requests/s predicted, {plan.cost_usd_per_hour:.4f} $/h. "
        f"For {engine.name} ({engine.checked} here). Loads {loaded}; set {', '.join(loads)} to load another path.",
        "",
        "| script | machine | offer | layers | listens on |",
        "|---|---|---|---|---|",
    ]
    for node in nodes:
        layers = ", ".join(f"{s.layers[0]}-{s.layers[1] - 1}" for s in node.stages)
        listens = f"HTTP {node.port} on ${node.address}" if node.rank == 0 else "vLLM's own ports"
        lines.append(
            f"| {node.script} | {comment(node.instance_type)} | {comment(node.offer)} | {layers} | {listens} |"
        )
    plugin = " and, into its environment, the plugin (`pip install --no-deps hetplan`)"
    exports = "\n".join(f"export {node.address}=..." for node in nodes)
    steps = [
        f"On every machine: install the engine{plugin if any(node.staged for node in nodes) else ''}, "
        f"and export the private addresses:\n\n```bash\n{exports}\n```\n"
    ]
    if any(node.store is not None for node in nodes):
        steps.append(
            "Start each machine's store before its engine, `pipeline-...-store.sh`: it holds the weights, and goes on\n"
            "   when an engine is replaced. They meet at a socket, HETPLAN_STORE where that is set."
        )
    steps += [
        "Start the scripts of a pipeline in any order; node 0 answers when all have joined.",
        "`./wait-ready.sh` returns when every pipeline answers on /health.",
        "`hetplan router router.json` serves them at one address, 127.0.0.1:8080 unless told, by the weights in\n"
        "   `router.json`; streams go on when a pipeline is lost.",
    ]
    if plan is not parts[0].plan:
        kinds = ", ".join(f"`{comment(kind)}`" for kind in dict.fromkeys(route.query_type for route in plan.routes))
        steps.append(
            "Requests that name no model and say their type in the header X-Query-Type are sent to models by the\n"
            f"   plan's shares: {kinds}."
        )
    lines += [
        "",
        "## Start",
        "",
        *(f"{number}. {step}" for number, step in enumerate(steps, start=1)),
        "",
        "SIGTERM to node 0 drains: running requests finish (for up to 120 s), new ones are refused.",
        "",
        "## Safety",
        "",
        "- Engines bind to the private addresses given, never to all interfaces. vLLM's own queues between machines",
        "  speak pickle over TCP: let only the machines of one pipeline reach each other's ports.",
        "- Set VLLM_API_KEY in the environment to require a key; no secret stands in these files.",
        "",
        "## Limits of the engine",
        "",
        *(f"- {name}: {LIMITS[name]}." for name in engine.limits),
        "",
    ]
    return "\n".join(lines)
