"""Ray's own command line, bound to the loopback address: ``python -m ... start --node-ip-address=127.0.0.1``.

Ray takes "127.0.0.1" for a mistake and listens at the machine's public address instead, on every interface. Here it
listens where it is told.
"""

from __future__ import annotations


def bind() -> None:
    """Have Ray in this process take the loopback address for its own."""
    from ray._private import services

    if not callable(getattr(services, "resolve_ip_for_localhost", None)):
        raise SystemExit("this version of Ray cannot be bound to the loopback address; install ray 2.60")
    services.resolve_ip_for_localhost = lambda host: host
    services.get_node_ip_address = lambda address=None: "127.0.0.1"


def main() -> None:
    """Run it."""
    from ray.scripts.scripts import main as ray

    bind()
    ray()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
