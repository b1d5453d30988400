"""Instances of AWS, against a local stand-in for its API."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from typing import Any

import boto3
import moto
import pytest
from botocore.exceptions import ClientError

from hetplan.catalog.offers import Offer
from hetplan.errors import InvalidInputError
from hetplan.runtime.controller.aws import AwsProvider, AwsSettings
from hetplan.runtime.controller.provider import NoMachineError

OFFER = Offer(
    instance_type="g6.12xlarge",
    provider="aws",
    region="us-west-2",
    market="spot",
    price_usd_per_hour=2.0,
    source="made up",
)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "made-up")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with moto.mock_aws():
        iam = boto3.client("iam")
        iam.create_instance_profile(InstanceProfileName="hetplan-node")
        yield boto3.client("ec2", region_name="us-west-2")


@pytest.fixture
def provider(client: Any) -> AwsProvider:
    subnet = client.describe_subnets()["Subnets"][0]["SubnetId"]
    group = client.describe_security_groups()["SecurityGroups"][0]["GroupId"]
    settings = AwsSettings(
        fleet="fleet-1",
        region="us-west-2",
        image_id=client.describe_images(Owners=["amazon"])["Images"][0]["ImageId"],
        ray_address="10.0.0.5:6379",
        token_parameter="/hetplan/token",
        subnets={"": subnet},
        security_group_ids=(group,),
        instance_profile="hetplan-node",
    )
    return AwsProvider(settings, client)


def instances(client: Any) -> list[dict[str, Any]]:
    return [i for group in client.describe_instances()["Reservations"] for i in group["Instances"]]


def test_a_machine_is_rented_once_and_given_back(provider: AwsProvider, client: Any) -> None:
    provider.request("m-1", OFFER)
    provider.request("m-1", OFFER)
    (instance,) = instances(client)
    assert instance["InstanceLifecycle"] == "spot"
    assert {tag["Key"]: tag["Value"] for tag in instance["Tags"]} == {
        "Name": "fleet-1-m-1",
        "hetplan:fleet": "fleet-1",
        "hetplan:machine": "m-1",
    }
    assert provider.state("m-1").status == "ready"
    assert provider.state("m-1").address == instance["PrivateIpAddress"]
    provider.release("m-1")
    assert provider.state("m-1").status == "failed"
    provider.release("m-1")
    provider.release("never-asked-for")


def test_an_instance_starts_with_no_secret_and_as_plain_words(provider: AwsProvider, client: Any) -> None:
    provider.request("m-2", OFFER.replace(market="on_demand"))
    (instance,) = instances(client)
    assert "InstanceLifecycle" not in instance
    answer = client.describe_instance_attribute(InstanceId=instance["InstanceId"], Attribute="userData")
    script = base64.b64decode(answer["UserData"]["Value"]).decode()
    assert "--resources='{\"hetplan-m-2\": 1.0}'" in script
    assert "RAY_AUTH_MODE=token" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert instance["MetadataOptions"]["HttpTokens"] == "required"


class Refusing:
    """Answers as EC2 does where it has no machine, which the stand-in always has."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.asked: dict[str, Any] = {}

    def describe_instances(self, **_: Any) -> dict[str, Any]:
        return {"Reservations": []}

    def run_instances(self, **asked: Any) -> None:
        self.asked = asked
        raise ClientError({"Error": {"Code": self.code, "Message": "sorry"}}, "RunInstances")


def test_no_capacity_is_no_machine_and_a_refusal_is_an_error(provider: AwsProvider) -> None:
    none_left = Refusing("InsufficientInstanceCapacity")
    with pytest.raises(NoMachineError, match="InsufficientInstanceCapacity"):
        AwsProvider(provider._settings, none_left).request("m-3", OFFER)
    with pytest.raises(InvalidInputError, match="UnauthorizedOperation"):
        AwsProvider(provider._settings, Refusing("UnauthorizedOperation")).request("m-3", OFFER)
    # The same name gives the same token, another name another one.
    again = Refusing("InsufficientInstanceCapacity")
    for name in ("m-3", "m-4"):
        with pytest.raises(NoMachineError):
            AwsProvider(provider._settings, again).request(name, OFFER)
        assert (again.asked["ClientToken"] == none_left.asked["ClientToken"]) is (name == "m-3")
    with pytest.raises(NoMachineError, match="us-west-2"):
        provider.request("m-5", OFFER.replace(region="eu-west-1"))
    with pytest.raises(InvalidInputError, match="zone 'us-west-2a'"):
        provider.request("m-6", OFFER.replace(zone="us-west-2a"))
