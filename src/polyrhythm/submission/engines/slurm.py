"""Slurm: a batch script that starts every rank as a task of `srun`.

    sbatch script ─▶ srun ─▶ task p of n = rank p      (launch/torchrun/report_rank.py: variables of srun as torchrun's)
                       │
                       ├─ 0       the job is done
                       ├─ 75      the host is taken away, or the time is up: `scontrol requeue`, and the run continues
                       ├─ 1, 2, 130   the job has failed, was wrong, or was canceled
                       └─ 128 + n     a rank was killed. The others may have continued: the next `srun` continues the
                                  run from its last checkpoint, or finds it done

Verbs of one process (`compare`, `tune`, `simulate`) are one task. With `array=N`, N jobs share the trials of one
`tune`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import Field

from polyrhythm.errors import RequestError
from polyrhythm.escaping import script_line, shell
from polyrhythm.submission.engine import Engine, Outcome, Submission, needed

SCRIPT = "job.sbatch"
_LOOK_EVERY_S = 1.0
_STATES = {
    "OUT_OF_MEMORY": "Slurm has killed it for its memory: ask for more with memory=",
    "TIMEOUT": "its time was up: ask for more with time=",
    "NODE_FAIL": "a node of it has failed",
    "CANCELLED": "it was canceled",
    "PREEMPTED": "it was preempted, and is not requeued automatically",
    "FAILED": "it has failed",
}
_BY_KILL = 128 + 9
_KILLED = "a rank was killed, as for its memory: ask for more with memory="  # srun alone knows; its line is in the log
_OVER = {"COMPLETED", *_STATES, "BOOT_FAIL", "DEADLINE"}


class Slurm(Engine):
    """A job of a Slurm cluster; the run folder and the data must be on a file system that all nodes share.

    Attributes:
        nodes: number of nodes, or a range such as "1-4": as many as are free, also when the job is requeued;
            then `tasks_per_node` determines the number of ranks.
        tasks_per_node: ranks of a node; 0: the ranks that the command asks for, spread by Slurm (1 with a range).
        cpus: cores of a rank.
        gpus: GPUs of a rank.
        memory: memory of a node, as Slurm takes it (`16G`); empty: the cluster's default.
        time: time limit until the job is requeued, as Slurm takes it (`2:00:00`); empty: the cluster's
            default.
        partition: partition of the cluster; empty: the default one.
        account: account to be charged.
        options: further options of sbatch, as one types them.
        server_options: sbatch options of a second component for the servers (a heterogeneous job); empty: servers are
            among the other ranks.
        array: number of jobs that share the trials of one `tune`; 0: no array.
        before: a line of the shell that every job begins with, such as `module load cuda`.
        notice_s: seconds between the warning and the end.
        restarts: number of times that ranks are restarted inside one job.
        command: Polyrhythm's command on the nodes; empty: as this process was called.
    """

    nodes: Annotated[str, Field(pattern=r"^[1-9]\d*(-[1-9]\d*)?$")] = "1"
    tasks_per_node: Annotated[int, Field(ge=0)] = 0
    cpus: Annotated[int, Field(ge=1)] = 1
    gpus: Annotated[int, Field(ge=0)] = 0
    memory: str = ""
    time: str = ""
    partition: str = ""
    account: str = ""
    options: str = ""
    server_options: str = ""
    array: Annotated[int, Field(ge=0)] = 0
    before: str = ""
    notice_s: Annotated[int, Field(ge=1)] = 60
    restarts: Annotated[int, Field(ge=0)] = 3
    command: str = ""

    def __init__(self, **values: object) -> None:
        if isinstance(values.get("nodes"), int):
            values["nodes"] = str(values["nodes"])
        super().__init__(**values)

    @property
    def warns_s(self) -> int:
        return self.notice_s

    @property
    def sets_servers_apart(self) -> bool:
        return bool(self.server_options)

    def texts(self, submission: Submission) -> Mapping[str, str]:
        if self.array and submission.words[0] != "tune":
            raise RequestError(
                f"array={self.array} is for `tune`, not for {submission.words[0]}: leave it out"
            )
        if self.server_options and "-" in self.nodes:
            raise RequestError(
                "a job with servers in a component of their own has a fixed number of nodes: give one"
            )
        if self.server_options and not submission.servers:
            raise RequestError(
                "server_options are for a strategy with servers, and this one has none: leave them out"
            )
        return {SCRIPT: "\n".join(self._lines(submission)) + "\n"}

    def _lines(self, submission: Submission) -> list[str]:
        several = submission.ranks > 1 or self.tasks_per_node > 1 or "-" in self.nodes
        first = {
            "job-name": submission.name,
            "open-mode": "append",
            "nodes": self.nodes,
            "time": self.time,
            "account": self.account,
            "signal": f"TERM@{self.notice_s}",
            "array": f"1-{self.array}" if self.array else "",
        }
        apart = self.sets_servers_apart
        here = submission.workers if apart else submission.ranks
        tasks = (
            {"ntasks-per-node": str(self.tasks_per_node)} if self.tasks_per_node else {"ntasks": str(here)}
        )
        each = {"cpus-per-task": str(self.cpus), "gpus-per-task": str(self.gpus or "")}
        on_each_node = ""
        if "-" in self.nodes:
            # A job that names its tasks keeps their number when it is requeued, and with it the nodes that it had.
            ranks = self.tasks_per_node or 1
            tasks = {"mincpus": str(ranks * self.cpus), "gpus-per-node": str(ranks * self.gpus or "")}
            each, on_each_node = {}, f" --ntasks-per-node={ranks}"
        each |= {"mem": self.memory, "partition": self.partition}
        lines = ["#!/bin/bash", *_directives({**first, **tasks, **each}), "#SBATCH --requeue"]
        lines += [f"#SBATCH {script_line(word, 'options')}" for word in shlex.split(self.options)]
        if apart:
            lines += [
                "#SBATCH hetjob",
                *_directives({"ntasks": str(submission.servers), "cpus-per-task": str(self.cpus)}),
            ]
            more = shlex.split(self.server_options)
            lines += [f"#SBATCH {script_line(word, 'server_options')}" for word in more]
        start = "srun --kill-on-bad-exit=0 --wait=0"
        start += on_each_node
        if apart:
            start += " --het-group=0,1"
        if self.cpus > 1:
            start += f" --cpus-per-task={self.cpus}"  # tasks of a step do not inherit it
        command = self.command or f"{shell(sys.executable)} -m polyrhythm"
        lines += [
            f"cd {shell(submission.directory)} || exit 1",
            *([self.before] if self.before else []),
        ]
        if several:
            lines += [
                "# where the ranks meet: on the first node, which runs this script",
                "export MASTER_ADDR=$(hostname) MASTER_PORT=$((20000 + SLURM_JOB_ID % 30000))",
            ]
        lines += [
            f"for attempt in {' '.join(str(number) for number in range(self.restarts + 1))}; do",
            f"  {start} {command} {' '.join(map(shell, submission.words))}",
            "  status=$?",
            '  if [ "$status" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; exit 75; fi',
            "  # after a rank was killed: the rest of the run is done now, if there is any",
            '  [ "$status" -gt 130 ] || break',
            "done",
            "exit $status",
        ]
        return lines

    def submit(self, submission: Submission, notify: Callable[[str], None], wait: bool) -> Outcome:
        sbatch = needed("sbatch", "submit from a host of the Slurm cluster (Debian: slurm-client)")
        script = self.texts(submission)[SCRIPT]
        done = subprocess.run(
            [sbatch, "--parsable"],
            input=script,
            capture_output=True,
            text=True,
            cwd=submission.directory,
            check=False,
        )
        if done.returncode:
            raise RequestError(f"Slurm refuses the job: {_reason(done.stderr)}")
        job = done.stdout.strip().partition(";")[0]
        shown = f"slurm-{job}{'_*' if self.array else ''}.out"  # Slurm's default output file
        notify(f"job         {job}")
        notify(f"log         {shown}")
        if not wait:
            return Outcome(job, None, f"squeue --job {job} shows it, scancel {job} ends it")
        state, status = _follow(job)
        if status == 0:
            return Outcome(job, status, f"job {job} is done")
        remark = (
            _KILLED
            if state == "FAILED" and status == _BY_KILL
            else _STATES.get(state, f"it ended as {state}")
        )
        return Outcome(job, status, f"job {job}: {remark} ({shown})")


def _directives(options: Mapping[str, str]) -> list[str]:
    return [f"#SBATCH --{name}={shell(script_line(value, name))}" for name, value in options.items() if value]


def _reason(text: str) -> str:
    """Return sbatch's error, in one line."""
    lines = [line.partition("error: ")[2] or line for line in text.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines)) or "it gives no reason"


def _follow(job: str) -> tuple[str, int]:
    """Wait until a job has ended; return its state and exit status."""
    while True:
        done = subprocess.run(
            [needed("scontrol", "submit from a host of the cluster"), "show", "job", "--oneliner", job],
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.findall(r"JobState=(\S+).*?ExitCode=(\d+):(\d+)", done.stdout)
        if done.returncode or not found:
            return "UNKNOWN", 1
        if all(state in _OVER for state, _, _ in found):
            state, code, number = max(found, key=lambda each: each[0] != "COMPLETED")
            ended = int(code) or (128 + int(number) if int(number) else 0)
            return state, ended or int(state != "COMPLETED")
        time.sleep(_LOOK_EVERY_S)
