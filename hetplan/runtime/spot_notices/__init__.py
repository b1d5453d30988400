"""What the clouds tell a machine before they take it: watchers of their metadata services.

A watcher asks the service of its cloud every ``interval_s`` and hands out each `Notice` once. An answer that is late,
too long or not what the cloud documents is an error and never a notice; errors are counted, and a service that
answers nothing is asked ever more slowly. Nothing here drains an engine or installs a signal handler.
"""

from __future__ import annotations

from typing import Any

from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.runtime.spot_notices.aws import AwsWatcher
from hetplan.runtime.spot_notices.azure import AzureWatcher
from hetplan.runtime.spot_notices.gcp import GcpWatcher
from hetplan.runtime.spot_notices.notice import Action, Kind, Notice, Provider
from hetplan.runtime.spot_notices.watcher import Watcher

__all__ = [
    "WATCHERS",
    "Action",
    "AwsWatcher",
    "AzureWatcher",
    "GcpWatcher",
    "Kind",
    "Notice",
    "Provider",
    "Watcher",
    "make_watcher",
]

WATCHERS: dict[str, type[Watcher]] = {"aws": AwsWatcher, "azure": AzureWatcher, "gcp": GcpWatcher}


def make_watcher(provider: str, *, base_url: str | None = None, vm_name: str | None = None, **options: Any) -> Watcher:
    """The watcher of a cloud.

    Parameters
    ----------
    provider : "aws", "gcp" or "azure"
        Whose metadata service is asked.
    base_url : str, optional
        Address of the service; by default the cloud's own.
    vm_name : str, optional
        This machine's name as Azure's events have it; by default the service is asked for it. For Azure only.
    **options
        What every `Watcher` takes: ``interval_s``, ``timeout_s``, ``now``, ``sleep``.

    Returns
    -------
    Watcher
        Nothing is asked before its ``notices()`` are read.

    Raises
    ------
    UnknownNameError
        If the provider has no watcher.
    InvalidInputError
        If an option is wrong, or aiohttp is not installed.
    """
    if provider not in WATCHERS:
        raise UnknownNameError(
            "provider", provider, WATCHERS, "Where none is watched, make a notice with Notice.from_sigterm."
        )
    if provider == "azure":
        return AzureWatcher(base_url=base_url, vm_name=vm_name, **options)
    if vm_name is not None:
        raise InvalidInputError(f"vm_name is {vm_name!r}; {provider} names no machines in its notices. Leave it out")
    return WATCHERS[provider](base_url=base_url, **options)
