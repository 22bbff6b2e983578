"""What engines are handed: Slurm's script, Kubernetes' manifests; and what is refused before anything is handed in."""

import re
import shlex
import subprocess

import pytest
import yaml
from kubernetes_validate import validate

import polyrhythm
from polyrhythm.errors import RequestError

JOB = {
    "data": "digits",
    "model": "mlp",
    "workers": 3,
    "strategy": "parameter_server(servers=2)",
    "out": "runs/a",
}


def texts(engine, verb="train", **options):
    return polyrhythm.submit(engine, verb, dry_run=True, **options)


def script(engine, verb="train", **options):
    (text,) = texts(engine, verb, **options).values()
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    return text


def directives(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_slurm_gets_a_task_for_every_rank():
    text = script(
        "slurm(nodes=2, cpus=4, gpus=1, partition=main, time='2:00:00', memory='8G', account=me)", **JOB
    )
    assert set(directives(text)) >= {
        "--job-name=a",
        "--nodes=2",
        "--ntasks=5",
        "--cpus-per-task=4",
        "--gpus-per-task=1",
        "--partition=main",
        "--time=2:00:00",
        "--mem=8G",
        "--account=me",
        "--requeue",
        "--signal=TERM@60",
    }
    assert "--out runs/a --resume auto --notice-s 60" in text
    assert "--workers" not in text  # the number of tasks says how many there are


def test_a_run_folder_is_resumed_with_the_ranks_that_it_had(tmp_path):
    (tmp_path / "config.yaml").write_text("data: digits\nworkers: 3\nstrategy: parameter_server(servers=2)\n")
    text = script("slurm(nodes=2)", resume=str(tmp_path))
    assert "--ntasks=5" in directives(text)
    assert f"--resume {tmp_path}" in text
    assert f"--job-name={tmp_path.name}" in directives(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not a run folder"),
        ("workers: 10000000000000000000000000000000000", "workers"),
        ("strategy: {x: 1}", "strategy"),
        ("- 1", "must be lines of"),
        ("!!python/object/apply:os.getcwd []", "recipe"),
        ("link", "is a symbolic link"),
    ],
)
def test_a_folder_to_resume_is_another_persons_data(text, said, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    if text == "link":
        (tmp_path / "secret").write_text("workers: 3")
        (run / "config.yaml").symlink_to(tmp_path / "secret")
    elif text is not None:
        (run / "config.yaml").write_text(text)
    with pytest.raises(RequestError, match=said) as refusal:
        texts("slurm(nodes=2)", resume=str(run))
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("strategy", "workers", "ranks"),
    [
        ("ensemble(members=2, each=parameter_server(servers=1))", 4, 6),
        ('stages("synchronous until 0.5; parameter_server(servers=2)")', 3, 5),
        ("ensemble(members=2, each='stages(\"synchronous until 0.5; easgd(servers=1)\")')", 2, 4),
    ],
)
def test_members_and_stages_have_a_task_for_every_rank_that_they_need(strategy, workers, ranks):
    job = {**JOB, "strategy": strategy, "workers": workers}
    assert f"--ntasks={ranks}" in directives(script("slurm(nodes=2)", **job))
    with pytest.raises(RequestError, match="leave server_options out"):
        script("slurm(nodes=2, server_options='--mem=1G')", **job)


def test_slurm_takes_as_many_nodes_as_are_free():
    text = script("slurm(nodes='1-4', tasks_per_node=2, cpus=3, gpus=1)", **JOB)
    assert {"--nodes=1-4", "--mincpus=6", "--gpus-per-node=2"} <= set(directives(text))
    assert "srun --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=2 --cpus-per-task=3" in text
    assert "SBATCH --ntasks" not in text  # which a requeued job would keep, and with it the nodes that it had


def test_slurm_puts_servers_into_a_component_of_their_own():
    text = script("slurm(server_options='--partition=cpu --mem=2G', partition=gpu)", **JOB)
    first, second = text.split("#SBATCH hetjob")
    assert "--ntasks=3" in first
    assert {"--ntasks=2", "--partition=cpu", "--mem=2G"} <= set(directives(second))
    assert "srun --kill-on-bad-exit=0 --wait=0 --het-group=0,1" in second


def test_a_verb_of_one_process_is_one_task():
    text = script("slurm(array=4)", "tune", resume="runs/search")
    assert {"--ntasks=1", "--array=1-4"} <= set(directives(text))
    assert "tune --resume runs/search" in text
    assert "MASTER_ADDR" not in text


@pytest.mark.parametrize("kind", ["job", "jobset", "pytorchjob"])
def test_pods_are_ranks_and_not_root(kind):
    (text,) = texts(f"kubernetes(kind={kind}, gpus=1, namespace=lab)", **JOB).values()
    manifests = list(yaml.safe_load_all(text))
    last = manifests[-1]
    assert last["metadata"]["namespace"] == "lab"
    if kind == "pytorchjob":
        replicas = last["spec"]["pytorchReplicaSpecs"]
        assert [replicas[name]["replicas"] for name in ("Master", "Worker")] == [1, 4]
        pods = [each["template"]["spec"] for each in replicas.values()]
    else:
        job = last["spec"] if kind == "job" else last["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 5, 5)
        pods = [job["template"]["spec"]]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["terminationGracePeriodSeconds"] > 60
        assert pod["containers"][0]["args"][:3] == ["train", "--data", "digits"]
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize("engine", ["kubernetes", "kubernetes(gpus=2, namespace=lab, cpus=0.5)"])
def test_the_manifests_of_a_job_have_the_published_schema(engine):
    (text,) = texts(engine, **JOB).values()
    manifests = list(yaml.safe_load_all(text))
    assert [each["kind"] for each in manifests] == ["Service", "Job"]
    for manifest in manifests:
        validate(manifest, "1.29", strict=True)
    manifests[1]["spec"]["completionMode"] = 3
    with pytest.raises(Exception, match=r"completionMode|string"):
        validate(manifests[1], "1.29", strict=True)


def test_a_pod_of_a_jobset_or_a_pytorchjob_has_the_published_schema():
    for kind in ("jobset", "pytorchjob"):
        (text,) = texts(f"kubernetes(kind={kind})", **JOB).values()
        spec = yaml.safe_load(text)["spec"]
        if kind == "jobset":
            pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        else:
            pod = {**spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]}
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}
        validate(whole, "1.29", strict=True)
        pod["containers"][0]["volumeMount"] = []
        with pytest.raises(Exception, match="volumeMount"):
            validate(whole, "1.29", strict=True)


@pytest.mark.parametrize(
    ("engine", "verb", "options", "complaint"),
    [
        ("slurmm", "train", {}, "unknown engine 'slurmm': did you mean slurm"),
        ("slurm(node=2)", "train", {}, "unknown key of engine slurm 'node'"),
        ("slurm(nodes=0)", "train", {}, "nodes"),
        ("slurm(array=3)", "train", {}, "array=3 is for `tune`"),
        ("slurm(server_options='-p cpu')", "train", {"data": "digits"}, "for a strategy with servers"),
        ("slurm(nodes='1-2', server_options='-p cpu')", "train", JOB, "fixed number of nodes"),
        ("slurm", "doctor", {}, "an engine cannot doctor"),
        ("slurm", "train", {"epochs": "many"}, "epochs should be a whole number"),
        ("slurm", "train", {"epoch": 3}, "unknown key of the run 'epoch'"),
        ("kubernetes(cpus=0)", "train", {}, "cpus"),
        ("ray(placement=ROUND)", "train", {}, "placement"),
        ("ssh", "train", {}, "hosts"),
        ("ssh(hosts='nowhere.txt')", "train", {}, "nowhere.txt"),
    ],
)
def test_what_is_wrong_is_refused_in_a_line(engine, verb, options, complaint):
    with pytest.raises(RequestError, match=complaint) as raised:
        texts(engine, verb, **options)
    assert "\n" not in str(raised.value)


def test_slots_and_ranks_must_agree(tmp_path):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a slots=2\nb\n")
    with pytest.raises(
        RequestError, match=r"3 slots, and the command asks for 3 workers and 2 servers.*--workers 1"
    ):
        texts(f"ssh(hosts='{hosts}')", **JOB)
    plan = "".join(texts(f"ssh(hosts='{hosts}')", **{**JOB, "workers": 1}).values())
    assert "a: ranks 0, 1" in plan
    assert "b: ranks 2" in plan


def test_an_engine_that_is_not_there_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for engine, program in (("slurm", "sbatch"), ("kubernetes", "kubectl")):
        with pytest.raises(RequestError, match=f"{program} is not on this host"):
            polyrhythm.submit(engine, **JOB)


def test_what_slurm_refuses_is_said_in_a_line(monkeypatch, tmp_path):
    said = (
        "sbatch: error: invalid partition specified: nowhere\nsbatch: error: Batch job submission failed: no"
    )
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        RequestError, match="refuses the job: invalid partition specified: nowhere; Batch job"
    ):
        polyrhythm.submit("slurm(partition=nowhere)", **JOB)


def _programs(folder, monkeypatch, **scripts):
    """Writes programs of an engine that say what they are told to say."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("state", "code", "status", "remark"),
    [
        ("COMPLETED", "0:0", 0, "job 7 is done"),
        ("OUT_OF_MEMORY", "0:125", 253, "job 7: Slurm has killed it for its memory: .* memory= \\(slurm-7.out\\)"),
        ("FAILED", "137:0", 137, "job 7: a rank was killed, as for its memory: .* memory= \\(slurm-7.out\\)"),
        ("TIMEOUT", "0:15", 143, "job 7: its time was up: ask for more with time= \\(slurm-7.out\\)"),
        ("NODE_FAIL", "0:0", 1, "job 7: a node of it has failed \\(slurm-7.out\\)"),
        ("FAILED", "1:0", 1, "job 7: it has failed \\(slurm-7.out\\)"),
    ],
)  # fmt: skip
def test_why_slurm_has_ended_a_job_is_said_in_a_line(monkeypatch, tmp_path, state, code, status, remark):
    shown = f"echo 'JobId=7 JobName=a JobState={state} Reason=None ExitCode={code} RunTime=1'"
    _programs(tmp_path, monkeypatch, sbatch="cat > /dev/null; echo 7", scontrol=shown)
    outcome = polyrhythm.submit("slurm", wait=True, notify=lambda text: None, **JOB)
    assert outcome.status == status
    assert re.fullmatch(remark, outcome.remark)


@pytest.mark.parametrize(
    ("pods", "job", "remark"),
    [
        ("Completed OOMKilled", "BackoffLimitExceeded", "Kubernetes has killed a pod for its memory: .* memory="),
        ("Error", "DeadlineExceeded", "its time was up: the deadline is that of the job, or of its namespace"),
        ("Error", "BackoffLimitExceeded", "kubectl describe --namespace lab job/a shows the reason"),
    ],
)  # fmt: skip
def test_why_kubernetes_has_ended_a_job_is_said_in_a_line(monkeypatch, tmp_path, pods, job, remark):
    script = f"""case "$*" in
apply*) cat > /dev/null; echo "job.batch/a created" ;;
*condition=failed*) ;;
*condition=complete*) exec sleep 100 ;;
"get pods --selector=batch.kubernetes.io/job-name=a "*) echo {pods} ;;
"get job/a "*) echo {job} ;;
esac"""
    _programs(tmp_path, monkeypatch, kubectl=script)
    outcome = polyrhythm.submit("kubernetes(namespace=lab)", wait=True, notify=lambda text: None, **JOB)
    assert outcome.status == 1
    assert re.fullmatch(f"job a has failed: {remark}", outcome.remark)


@pytest.mark.parametrize("where", ["out", "time", "options"])
def test_a_line_end_cannot_add_a_line_to_the_script(where):
    evil = "x\n#SBATCH --wrap=evil"
    job, engine = JOB, "slurm"
    if where == "out":
        job = {**JOB, "out": f"runs/{evil}"}
    else:
        quoted = repr(evil if where == "time" else f"'{evil}'")
        engine = f"slurm({where}={quoted})"
    with pytest.raises(RequestError, match="has a line end or another control character") as refusal:
        script(engine, **job)
    assert len(str(refusal.value).splitlines()) == 1


def test_a_name_is_one_word_of_its_directive():
    text = script("slurm", **{**JOB, "out": "runs/a --wrap=evil"})
    assert "--job-name='a --wrap=evil'" in directives(text)


def test_a_folder_is_one_word_of_a_probe():
    text = "".join(texts("kubernetes(image=i, claim=c)", **{**JOB, "out": "runs/it's; evil"}).values())
    job = next(each for each in yaml.safe_load_all(text) if each["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = container["livenessProbe"]["exec"]["command"][-1]
    assert shlex.split(command)[:2] == ["find", "runs/it's; evil/events.jsonl"]
