"""Manifests of JobSet and PyTorchJob against the models that their own projects publish.

These are imported where they are used, not where tests are collected, which each of pytest's processes does.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import polyrhythm

JOB = {"data": "digits", "model": "mlp", "strategy": "parameter_server(servers=2)", "workers": 3}


def jobset(manifest: dict[str, Any]) -> Any:
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    return JobsetV1alpha2JobSet.from_dict(manifest).to_dict()


def pytorchjob(manifest: dict[str, Any]) -> Any:
    from kubeflow.training import ApiClient

    client = ApiClient()
    response = SimpleNamespace(data=json.dumps(manifest))
    return client.sanitize_for_serialization(client.deserialize(response, "KubeflowOrgV1PyTorchJob"))


def without_defaults(known: Any) -> Any:
    for job in known["spec"]["replicatedJobs"]:
        for container in job["template"]["spec"]["template"]["spec"]["containers"]:
            for port in container["ports"]:
                assert port.pop("protocol") == "TCP"
    return known


@pytest.mark.parametrize("more", ["", ", gpus=2, namespace=lab, cpus=0.5, restarts=2"], ids=["plain", "gpus"])
def test_a_jobset_has_the_published_schema(more: str) -> None:
    """What the model does not know is lost on its way through it."""
    (text,) = polyrhythm.submit(f"kubernetes(kind=jobset{more})", dry_run=True, **JOB).values()
    manifest = yaml.safe_load(text)
    assert without_defaults(jobset(manifest)) == manifest
    manifest["spec"]["failurePolicy"]["maxRestart"] = 3
    assert without_defaults(jobset(manifest)) != manifest
    manifest["spec"]["failurePolicy"] = {"maxRestarts": "three"}
    with pytest.raises(ValueError, match="maxRestarts"):
        jobset(manifest)


def with_texts(manifest: Any) -> Any:
    """Write quantities as texts, which are numbers or texts, and the model's are texts."""
    for replicas in manifest["spec"].get("pytorchReplicaSpecs", {}).values():
        for container in replicas["template"]["spec"]["containers"]:
            for quantities in container["resources"].values():
                quantities.update({name: str(value) for name, value in quantities.items()})
    return manifest


@pytest.mark.parametrize("more", ["", ", gpus=2, namespace=lab, cpus=0.5, restarts=2"], ids=["plain", "gpus"])
def test_a_pytorchjob_has_the_published_schema(more: str) -> None:
    (text,) = polyrhythm.submit(f"kubernetes(kind=pytorchjob{more})", dry_run=True, **JOB).values()
    manifest = with_texts(yaml.safe_load(text))
    assert pytorchjob(manifest) == manifest
    manifest["spec"]["runPolicy"]["backofLimit"] = 3
    assert pytorchjob(manifest) != manifest
    del manifest["spec"]["pytorchReplicaSpecs"]
    with pytest.raises(ValueError, match="pytorch_replica_specs"):
        pytorchjob(manifest)
