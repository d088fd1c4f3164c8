"""Check a ParallelCluster configuration with ParallelCluster's own schema and validators.

Runs in an environment that has the package `aws-parallelcluster`, without an account and without
a network: validators that ask AWS about the account (does this subnet exist?) are listed as not
run; what they ask about instance types is answered from the table below.

    python tools/check_parallelcluster.py configs/parallelcluster/trn1.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import yaml

NEEDS_ACCOUNT = "needs an AWS account"
# What a validator says that swallows the refusal.
NOT_RUN = (NEEDS_ACCOUNT, "Cannot validate secret")
AMI = "ami-00000000000000000"
AMI_GIB = 45  # no smaller than ParallelCluster's images; a root volume must hold it


def _instance(name: str, vcpus: int, gib: int, cards: int = 1, efa: int = 0) -> dict[str, Any]:
    """What `aws ec2 describe-instance-types` says of a type, as far as the validators look."""
    return {
        "InstanceType": name,
        "VCpuInfo": {"DefaultVCpus": vcpus, "DefaultCores": vcpus // 2, "DefaultThreadsPerCore": 2},
        "MemoryInfo": {"SizeInMiB": gib * 1024},
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "NetworkInfo": {
            "EfaSupported": efa > 0,
            "EfaInfo": {"MaximumEfaInterfaces": efa},
            "NetworkCards": [
                {"NetworkCardIndex": card, "MaximumNetworkInterfaces": 5} for card in range(cards)
            ],
        },
        "PlacementGroupInfo": {"SupportedStrategies": ["cluster", "partition", "spread"]},
        "EbsInfo": {"EbsOptimizedSupport": "default"},
        "SupportedUsageClasses": ["on-demand", "spot"],
        "InstanceStorageSupported": efa > 0,
    }


# AWS's product pages for m6i and trn1.
INSTANCES = {
    instance["InstanceType"]: instance
    for instance in (
        _instance("m6i.4xlarge", 16, 64),
        _instance("trn1.32xlarge", 128, 512, cards=8, efa=8),
        _instance("trn1n.32xlarge", 128, 512, cards=16, efa=16),
    )
}


Report = dict[str, list[str]]  # errors, warnings, validators that ran and that did not


def check(path: Path) -> Report:
    """Load a cluster configuration through the schema, then run the validators."""
    from marshmallow import ValidationError
    from pcluster.schemas.cluster_schema import ClusterSchema

    report: Report = {"errors": [], "warnings": [], "ran": [], "not_run": []}
    ran, not_run = set[str](), set[str]()
    text = path.read_text(encoding="utf-8")
    tree = yaml.safe_load(text)
    if not isinstance(tree, dict):
        report["errors"].append(f"{path}: no mapping")
        return report
    # ParallelCluster takes the region from the environment, as its own command sets it.
    os.environ["AWS_DEFAULT_REGION"] = str(tree.get("Region", "us-east-1"))
    asyncio.set_event_loop(asyncio.new_event_loop())
    try:
        config = ClusterSchema(cluster_name="trn1").load(tree)
    except ValidationError as error:
        report["errors"].append(json.dumps(error.messages, default=str))
        return report
    config.source_string = text
    _answer_from_the_table()
    for result in config.validate(suppressors=[_listener(ran)]):
        level, message = str(result.level), f"{result.validator_type}: {result.message}"
        if any(words in result.message for words in NOT_RUN):
            not_run.add(result.validator_type)
        elif level == "ERROR":
            report["errors"].append(message)
        else:
            report["warnings"].append(message)
    return report | {"ran": sorted(ran - not_run), "not_run": sorted(not_run)}


def _listener(ran: set[str]) -> Any:
    """A suppressor that suppresses nothing and writes down which validators run."""
    from pcluster.config.common import ValidatorSuppressor

    class Listener(ValidatorSuppressor):  # type: ignore[misc, unused-ignore]
        def suppress_validator(self, validator: Any) -> bool:
            ran.add(validator.type)
            return False

    return Listener()


def _answer_from_the_table() -> None:
    """Put a stand-in in the place of ParallelCluster's AWS clients."""
    import boto3
    from pcluster.aws.aws_api import AWSApi
    from pcluster.aws.aws_resources import InstanceTypeInfo
    from pcluster.aws.common import AWSClientError

    def refuse(name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise AWSClientError(function_name=name, message=NEEDS_ACCOUNT)

        return call

    class Image:
        """The image that a cluster of this version would start from."""

        id, name, device_name, volume_size, architecture = AMI, AMI, "/dev/sda1", AMI_GIB, "x86_64"

        def __getattr__(self, name: str) -> Any:
            raise AWSClientError(function_name=f"describe_image.{name}", message=NEEDS_ACCOUNT)

    class Service:
        def __init__(self, name: str, **answers: Any) -> None:
            self._name = name
            self.meta = MagicMock()  # of botocore: where its clients hook in
            self.__dict__.update(answers)

        def __getattr__(self, name: str) -> Any:
            return refuse(f"{self._name}.{name}")

    def instance_type_info(name: str) -> Any:
        if name not in INSTANCES:
            raise AWSClientError("get_instance_type_info", f"{name} is not in INSTANCES")
        return InstanceTypeInfo(json.loads(json.dumps(INSTANCES[name])))

    ec2 = Service(
        "ec2",
        get_instance_type_info=instance_type_info,
        list_instance_types=lambda: list(INSTANCES),
        get_official_image_id=lambda *_, **__: AMI,
        describe_image=lambda *_, **__: Image(),
        get_subnet_avail_zone=lambda *_: "one-zone",
        get_subnets_az_mapping=lambda subnets: dict.fromkeys(subnets, "one-zone"),
        get_supported_architectures=lambda name: instance_type_info(name).supported_architecture(),
    )
    stand_in = type("StandIn", (), {"ec2": ec2, "__getattr__": lambda _, name: Service(name)})()
    AWSApi.instance = staticmethod(lambda: stand_in)
    # Some validators make their own.
    boto3.client = boto3.resource = lambda name, **_: Service(name)


def main() -> int:
    """Print the report; 0 without an error, 1 with one, 2 where the package is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    try:
        report = check(args.file)
    except ImportError as error:
        print(f"{error}; pip install aws-parallelcluster, in a venv of its own", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        for kind, lines in report.items():
            print(f"{kind}: {len(lines)}")
            print("".join(f"  {line}\n" for line in lines), end="")
    return 1 if report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
