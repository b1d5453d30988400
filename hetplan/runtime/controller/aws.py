"""Machines of AWS: EC2 instances, spot or on-demand, that join the controller's Ray cluster when they start.

No secret is in what an instance is started with: it reads the cluster's token from an encrypted parameter of Systems
Manager, with the rights of its instance profile.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from typing import Annotated, Any

from pydantic import Field

from hetplan.base import Frozen
from hetplan.catalog.offers import Offer
from hetplan.errors import InvalidInputError
from hetplan.runtime.controller.provider import MachineState, NoMachineError
from hetplan.runtime.controller.ray_agents import resource_of

# What EC2 answers where it has no machine, or none for this account.
_NONE_LEFT = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientCapacity",
        "InsufficientHostCapacity",
        "MaxSpotInstanceCountExceeded",
        "SpotMaxPriceTooLow",
        "InstanceLimitExceeded",
        "VcpuLimitExceeded",
        "Unsupported",
    }
)
_APPEARS_S = 120.0
_PENDING, _READY = {"pending"}, {"running"}
_FLEET, _MACHINE = "hetplan:fleet", "hetplan:machine"


class AwsSettings(Frozen):
    """What instances are started with.

    Attributes
    ----------
    fleet : str
        Name of all machines of one controller; a tag of each.
    region : str
    image_id : str
        An image with hetplan, Ray and the engine in it.
    ray_address : str
        Private address and port of the cluster's head.
    token_parameter : str
        Name of the SecureString parameter that holds the cluster's token.
    subnets : mapping of str to str
        Subnet of each zone; offers without a zone take ``""``.
    security_group_ids : tuple of str
        They must let the machines of the fleet reach each other, and nobody else.
    instance_profile : str
        Name of the profile that may read the parameter, and the weights where those are in S3.
    environment : str
        Folder of the Python environment in the image.
    """

    fleet: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    image_id: Annotated[str, Field(pattern=r"^ami-[0-9a-f]+$")]
    ray_address: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:\[\]-]+:[0-9]+$")]
    token_parameter: Annotated[str, Field(pattern=r"^/?[A-Za-z0-9_./-]+$")]
    subnets: dict[str, str]
    security_group_ids: Annotated[tuple[str, ...], Field(min_length=1)]
    instance_profile: Annotated[str, Field(min_length=1)]
    environment: Annotated[str, Field(pattern=r"^/")] = "/opt/hetplan"


class AwsProvider:
    """Rents EC2 instances of one region; see `MachineProvider`.

    Keys come from the environment, as boto3 finds them.

    Parameters
    ----------
    settings : AwsSettings
    client : optional
        An EC2 client; by default boto3 makes it.

    Raises
    ------
    InvalidInputError
        If boto3 is needed and not installed.
    """

    def __init__(self, settings: AwsSettings, client: Any = None) -> None:
        self._settings = settings
        if client is None:
            try:
                import boto3
            except ModuleNotFoundError:
                raise InvalidInputError("AwsProvider needs boto3; pip install 'hetplan[aws]'") from None
            client = boto3.client("ec2", region_name=settings.region)
        self._client = client
        self._asked_at: dict[str, float] = {}

    def request(self, name: str, offer: Offer) -> None:
        from botocore.exceptions import ClientError

        if offer.provider != "aws" or offer.region != self._settings.region:
            raise NoMachineError(f"{offer.name} is not in AWS {self._settings.region}; give its own provider")
        if self._find(name) is not None:
            return
        try:
            self._client.run_instances(**self._asked(name, offer))
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code in _NONE_LEFT:
                raise NoMachineError(f"AWS has no {offer.name} now: {code}") from None
            raise InvalidInputError(f"AWS refuses {offer.name}: {error}") from None
        self._asked_at[name] = time.monotonic()

    def state(self, name: str) -> MachineState:
        found = self._find(name)
        if found is None:
            if self._may_appear(name):
                return MachineState("pending")
            return MachineState("failed", reason="AWS does not list it")
        status = found["State"]["Name"]
        if status in _PENDING:
            return MachineState("pending")
        if status in _READY:
            return MachineState("ready", found.get("PrivateIpAddress"))
        why = (found.get("StateReason") or {}).get("Message") or f"it is {status}"
        return MachineState("failed", reason=str(why))

    def release(self, name: str) -> None:
        found = self._find(name)
        if found is not None:
            self._client.terminate_instances(InstanceIds=[found["InstanceId"]])
            self._asked_at.pop(name, None)
        elif name in self._asked_at and self._may_appear(name):
            raise NoMachineError(f"AWS does not list {name} yet; it is given back when it does")

    def _may_appear(self, name: str) -> bool:
        """What EC2 has started it lists some seconds later."""
        return time.monotonic() - self._asked_at.setdefault(name, time.monotonic()) < _APPEARS_S

    def _asked(self, name: str, offer: Offer) -> dict[str, Any]:
        settings = self._settings
        zone = offer.zone or ""
        if zone not in settings.subnets:
            raise InvalidInputError(f"no subnet is given for zone {zone!r}; add it to subnets")
        tags = [
            {"Key": "Name", "Value": f"{settings.fleet}-{name}"},
            {"Key": _FLEET, "Value": settings.fleet},
            {"Key": _MACHINE, "Value": name},
        ]
        asked: dict[str, Any] = {
            "ImageId": settings.image_id,
            "InstanceType": offer.instance_type,
            "MinCount": 1,
            "MaxCount": 1,
            # Asked twice, EC2 starts one.
            "ClientToken": hashlib.sha256(f"{settings.fleet}/{name}".encode()).hexdigest(),
            "SubnetId": settings.subnets[zone],
            "SecurityGroupIds": list(settings.security_group_ids),
            "IamInstanceProfile": {"Name": settings.instance_profile},
            # Engines that are talked into fetching an address get no credentials.
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "HttpEndpoint": "enabled"},
            "InstanceInitiatedShutdownBehavior": "terminate",
            "UserData": self._user_data(name),
            "TagSpecifications": [
                {"ResourceType": "instance", "Tags": tags},
                {"ResourceType": "volume", "Tags": tags},
            ],
        }
        if offer.market == "spot":
            asked["InstanceMarketOptions"] = {
                "MarketType": "spot",
                "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
            }
        return asked

    def _user_data(self, name: str) -> str:
        settings = self._settings
        resources = json.dumps({resource_of(name): 1.0})
        read = f"aws ssm get-parameter --with-decryption --region {shlex.quote(settings.region)}"
        return f"""#!/bin/bash
set -euo pipefail
PATH={shlex.quote(settings.environment)}/bin:$PATH
umask 077
mkdir -p /run/hetplan
{read} --name {shlex.quote(settings.token_parameter)} --query Parameter.Value --output text > /run/hetplan/token
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/run/hetplan/token RAY_USAGE_STATS_ENABLED=0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 XDG_RUNTIME_DIR=/run/hetplan
metadata=http://169.254.169.254/latest
session=$(curl -sf -X PUT "$metadata/api/token" -H 'X-aws-ec2-metadata-token-ttl-seconds: 60')
own=$(curl -sf -H "X-aws-ec2-metadata-token: $session" "$metadata/meta-data/local-ipv4")
# A machine that cannot join, or is no longer part of the cluster, costs money for nothing.
ray start --address={shlex.quote(settings.ray_address)} --node-ip-address="$own" --num-cpus=1 --num-gpus=0 \\
  --resources={shlex.quote(resources)} --disable-usage-stats --include-log-monitor=false --block || true
shutdown -h now
"""

    def _find(self, name: str) -> dict[str, Any] | None:
        answer = self._client.describe_instances(
            Filters=[
                {"Name": f"tag:{_FLEET}", "Values": [self._settings.fleet]},
                {"Name": f"tag:{_MACHINE}", "Values": [name]},
            ]
        )
        found = [instance for group in answer["Reservations"] for instance in group["Instances"]]
        alive = [i for i in found if i["State"]["Name"] in _PENDING | _READY]
        return next(iter(alive or found), None)
