"""Kubernetes: manifests, handed to `kubectl apply`.

    kind=job          an Indexed Job: pod i is rank i; a headless service gives pod 0 a name, at which ranks meet
    kind=jobset       the same as a JobSet; its controller restarts all pods together where one cannot continue
    kind=pytorchjob   a PyTorchJob of Kubeflow's training operator, which sets torchrun's variables itself

A pod that fails is started again in its place; SIGTERM is a notice of preemption (`--notice-s`), and status 75 starts a
pod again without counting against the job's limit.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from polyrhythm.errors import RequestError
from polyrhythm.escaping import shell
from polyrhythm.submission.engine import Engine, Outcome, Submission, needed

MANIFEST = "polyrhythm.yaml"
_PORT = 29500
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_USER = 1000
_START_MINUTES, _SILENT_MINUTES = 30, 30
_LOOK_EVERY_S = 1.0
_LONGEST_NAME = 52  # of a job; its pods' names have a suffix


class Kubernetes(Engine):
    """A Kubernetes cluster; a volume that all pods share holds the run folder and the data.

    Attributes:
        image: a container image with Polyrhythm in it (the `Dockerfile` of the project makes one).
        claim: the PersistentVolumeClaim with runs and data; its access mode must be ReadWriteMany.
        mount: path of the volume in the pods; paths of the command begin there.
        namespace: namespace of the cluster; empty: kubectl's current one.
        kind: job, jobset or pytorchjob.
        cpus: CPUs of a rank.
        memory: memory of a rank, as Kubernetes takes it.
        gpus: GPUs of a rank.
        notice_s: seconds between SIGTERM and the end of a pod.
        restarts: number of pod failures allowed in all.
    """

    image: str = "polyrhythm:latest"
    claim: str = "polyrhythm"
    mount: str = "/work"
    namespace: str = ""
    kind: Literal["job", "jobset", "pytorchjob"] = "job"
    cpus: Annotated[float, Field(gt=0)] = 1.0
    memory: str = "4Gi"
    gpus: Annotated[int, Field(ge=0)] = 0
    notice_s: Annotated[int, Field(ge=1)] = 60
    restarts: Annotated[int, Field(ge=0)] = 6

    @property
    def warns_s(self) -> int:
        return self.notice_s

    def texts(self, submission: Submission) -> Mapping[str, str]:
        name = dns_name(submission.name)
        make = {"job": self._job, "jobset": self._jobset, "pytorchjob": self._pytorchjob}[self.kind]
        return {MANIFEST: yaml.safe_dump_all(make(name, submission), sort_keys=False)}

    def _metadata(self, name: str) -> dict[str, Any]:
        where = {"namespace": self.namespace} if self.namespace else {}
        return {"name": name, **where, "labels": {"app.kubernetes.io/name": "polyrhythm"}}

    def _container(self, submission: Submission, environment: list[dict[str, Any]]) -> dict[str, Any]:
        resources: dict[str, Any] = {"cpu": f"{self.cpus:g}", "memory": self.memory}
        limits = {"memory": self.memory, **({"nvidia.com/gpu": self.gpus} if self.gpus else {})}
        return {
            "name": "pytorch",  # the name that the training operator looks for
            "image": self.image,
            "args": list(submission.words),
            "workingDir": self.mount,
            "env": [*environment, {"name": "OMP_NUM_THREADS", "value": str(max(1, int(self.cpus)))}],
            "ports": [{"name": "store", "containerPort": _PORT}],
            "resources": {"requests": resources, "limits": limits},
            **self._probes(submission),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                {"name": "work", "mountPath": self.mount},
                {"name": "memory", "mountPath": "/dev/shm"},
            ],
        }

    def _probes(self, submission: Submission) -> dict[str, Any]:
        """Return probes of the run's log: hanging ranks are the watchdog's business, a hanging node is theirs."""
        if submission.folder is None:
            return {}
        log = f"{submission.folder}/events.jsonl"
        return {
            "startupProbe": {
                "exec": {"command": ["test", "-e", log]},
                "periodSeconds": 10,
                "failureThreshold": 6 * _START_MINUTES,
            },
            "livenessProbe": {
                "exec": {"command": ["sh", "-c", f"find {shell(log)} -mmin -{_SILENT_MINUTES} | grep -q ."]},
                "periodSeconds": 60,
                "timeoutSeconds": 10,
                "failureThreshold": 2,
            },
        }

    def _pod(self, submission: Submission, environment: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            **more,
            "terminationGracePeriodSeconds": self.notice_s + 30,
            "securityContext": {"runAsNonRoot": True, "runAsUser": _USER, "fsGroup": _USER},
            "containers": [self._container(submission, environment)],
            "volumes": [
                {"name": "work", "persistentVolumeClaim": {"claimName": self.claim}},
                {"name": "memory", "emptyDir": {"medium": "Memory"}},
            ],
        }

    def _ranks(self, name: str, submission: Submission) -> list[dict[str, Any]]:
        """Return the environment in which the pods of an Indexed Job are ranks."""
        return [
            {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            {"name": "GROUP_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            {"name": "WORLD_SIZE", "value": str(submission.ranks)},
            {"name": "LOCAL_RANK", "value": "0"},
            {"name": "LOCAL_WORLD_SIZE", "value": "1"},
            {"name": "MASTER_ADDR", "value": f"{name}-0.{name}"},
            {"name": "MASTER_PORT", "value": str(_PORT)},
        ]

    def _indexed(self, submission: Submission, pod: dict[str, Any]) -> dict[str, Any]:
        return {
            "completionMode": "Indexed",
            "completions": submission.ranks,
            "parallelism": submission.ranks,
            "backoffLimit": self.restarts,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "Ignore",
                        "onExitCodes": {"containerName": "pytorch", "operator": "In", "values": [75]},
                    },
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "pytorch", "operator": "In", "values": [2]},
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"metadata": {"labels": {"app.kubernetes.io/name": "polyrhythm"}}, "spec": pod},
        }

    def _job(self, name: str, submission: Submission) -> list[dict[str, Any]]:
        selector = {"batch.kubernetes.io/job-name": name}
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(name),
            # ranks look for each other before all are ready
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector},
        }
        # podFailurePolicy asks for Never: the job makes a pod again with the same index
        pod = self._pod(submission, self._ranks(name, submission), restartPolicy="Never", subdomain=name)
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._metadata(name),
            "spec": self._indexed(submission, pod),
        }
        return [service, job]

    def _jobset(self, name: str, submission: Submission) -> list[dict[str, Any]]:
        ranks = self._ranks(name, submission)
        ranks[5] = {"name": "MASTER_ADDR", "value": f"{name}-ranks-0-0.{name}"}
        pod = self._pod(submission, ranks, restartPolicy="Never")
        jobset = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": self._metadata(name),
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": self.restarts},
                "replicatedJobs": [
                    {"name": "ranks", "replicas": 1, "template": {"spec": self._indexed(submission, pod)}}
                ],
            },
        }
        return [jobset]

    def _pytorchjob(self, name: str, submission: Submission) -> list[dict[str, Any]]:
        pod = self._pod(submission, [])

        def replicas(count: int) -> dict[str, Any]:
            return {"replicas": count, "restartPolicy": "ExitCode", "template": {"spec": pod}}

        others = {"Worker": replicas(submission.ranks - 1)} if submission.ranks > 1 else {}
        job = {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": self._metadata(name),
            "spec": {
                "runPolicy": {"backoffLimit": self.restarts},
                "pytorchReplicaSpecs": {"Master": replicas(1), **others},
            },
        }
        return [job]

    def submit(self, submission: Submission, notify: Callable[[str], None], wait: bool) -> Outcome:
        kubectl = needed("kubectl", "install it, and name the cluster in its configuration")
        done = subprocess.run(
            [kubectl, "apply", "--filename", "-"],
            input=self.texts(submission)[MANIFEST],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            raise RequestError(f"Kubernetes refuses the job: {lines[-1].removeprefix('error: '):.500}")
        name = dns_name(submission.name)
        for line in done.stdout.splitlines():
            notify(line)
        where = ["--namespace", self.namespace] if self.namespace else []
        if not wait or self.kind != "job":
            return Outcome(name, None, f"kubectl logs {' '.join([*where, f'job/{name}'])} --follow shows it")
        waits = [
            subprocess.Popen(
                [kubectl, "wait", *where, f"job/{name}", f"--for=condition={condition}", "--timeout=-1s"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for condition in ("complete", "failed")
        ]
        while all(each.poll() is None for each in waits):
            time.sleep(_LOOK_EVERY_S)
        done_well = waits[0].poll() == 0
        for each in waits:
            each.kill()
            each.wait()
        remark = (
            f"job {name} is done" if done_well else f"job {name} has failed: {_why(kubectl, where, name)}"
        )
        return Outcome(name, 0 if done_well else 1, remark)


def _why(kubectl: str, where: list[str], name: str) -> str:
    """Return why a job has failed, as its pods and it know it, and what to do."""
    pods = ["get", "pods", f"--selector=batch.kubernetes.io/job-name={name}"]
    paths = {
        "pods": [*pods, "--output=jsonpath={.items[*].status.containerStatuses[*].state.terminated.reason}"],
        "job": ["get", f"job/{name}", "--output=jsonpath={.status.conditions[*].reason}"],
    }
    found = {}
    for key, words in paths.items():
        done = subprocess.run([kubectl, *words, *where], capture_output=True, text=True, check=False)
        found[key] = done.stdout.split()
    if "OOMKilled" in found["pods"]:
        return "Kubernetes has killed a pod for its memory: ask for more with memory="
    if "DeadlineExceeded" in found["job"]:
        return "its time was up: the deadline is that of the job, or of its namespace"
    return f"kubectl describe {' '.join([*where, f'job/{name}'])} shows the reason"


def dns_name(name: str) -> str:
    """Return a name that Kubernetes takes: small letters, digits and dashes, beginning with a letter."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"p-{plain}".rstrip("-")
    return plain[:_LONGEST_NAME].rstrip("-")
