"""Slurm's variables, said in torchrun's words."""

import pytest

from polyrhythm.launch.torchrun.report_rank import adopt_step, first_host, tasks_of

STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_ID": "40012",
}


def test_a_task_of_several_is_a_rank():
    environment = dict(STEP)
    adopt_step(environment)
    told = {key: value for key, value in environment.items() if key not in STEP}
    assert told == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "30012",
    }


@pytest.mark.parametrize(
    "changed",
    [{"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0"}, {"SLURM_STEP_ID": None}],
    ids=["one task", "torchrun inside the task", "a batch script"],
)
def test_others_stay_as_they_are(changed):
    environment = {key: value for key, value in {**STEP, **changed}.items() if value is not None}
    before = dict(environment)
    adopt_step(environment)
    assert environment == before


def test_a_meeting_place_that_the_script_names_stays():
    environment = {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"}
    adopt_step(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "4711")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("rack[07-09,12],login", "rack07"),
        ("node1", "node1"),
        ("a,b", "a"),
        ("n[1,3]-ib", "n1-ib"),
        ("n[10-12]", "n10"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


def test_the_tasks_of_a_node():
    assert [tasks_of("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
