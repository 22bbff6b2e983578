"""The worker's end of push and pull, against servers that answer by hand."""

import torch
from torch import nn

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.parameter_server.serving import push_pull
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

CAST = RoleAssignment((0, 1), (2, 3))


class Sent:
    """A handle that counts how often it is waited for."""

    def __init__(self):
        self.waits = 0

    def wait(self):
        self.waits += 1


class Script:
    """A network that notes what is sent and receives what it was told to."""

    def __init__(self, answers):
        self.sent = []
        self.handles = []
        self._answers = dict(answers)
        self.direct = set()

    def send(self, to, message):
        self.sent.append((to, message))

    def start_send(self, to, message):
        self.sent.append((to, message))
        self.handles.append(Sent())
        return self.handles[-1]

    def receive(self, source):
        return source, self._answers[source]

    def receive_into(self, target, source):
        answer = self._answers[source]
        if answer.tensor is None or answer.tensor.shape != target.shape:
            return answer
        self.direct.add(source)
        return answer._replace(tensor=target.copy_(answer.tensor))


def setting(answers):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)  # 5 numbers: shards of 2 and 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = FlatParameters(model)
    network = Script(answers)
    return (
        network,
        flat,
        PushPull(WorkerSetting(network, None, CAST, flat, OptimizerPlan.of(optimizer, flat))),
    )


def answer(values, version, step, stop=False):
    return Message(Kind.PARAMETERS, torch.tensor(values), version=version, step=step, stop=stop)


class Memory:
    """Memory in which a test says what is lent: by the addresses of vectors."""

    def __init__(self):
        self.lent = set()

    def vector(self, like):
        return torch.full_like(like, 7.0)

    def lends(self, tensor):
        return tensor.data_ptr() in self.lent


def lending(answers, memory, monkeypatch):
    monkeypatch.setattr(push_pull, "_LEAST_LENT_BYTES", 1)
    network, flat, ends = setting(answers)
    network.lent_memory = lambda: memory
    ends.lend_gradients()
    return network, flat, ends


def test_answers_are_received_where_the_parameters_lie():
    answers = {2: answer([1.0, 2.0], 1, 1), 3: answer([3.0, 4.0, 5.0], 1, 1)}
    network, flat, ends = setting(answers)
    ends.push_and_pull(Step(0), 1.0, 0.1)
    assert network.direct == {2, 3}
    assert flat.vector.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_lent_gradients_move_when_a_server_still_holds_them(monkeypatch):
    memory = Memory()
    answers = {2: answer([1.0, 2.0], 1, 1), 3: answer([3.0, 4.0, 5.0], 1, 1)}
    network, flat, ends = lending(answers, memory, monkeypatch)
    assert flat.gradients.tolist() == [0.0] * 5
    for number in range(3):
        flat.gradients.copy_(torch.arange(5.0) + number)
        place = flat.gradients.data_ptr()
        memory.lent = {place} if number == 1 else set()
        ends.push_and_pull(Step(number), 1.0, 0.1)
        pushed = [message.tensor for _, message in network.sent[-2:]]
        assert [tensor.data_ptr() for tensor in pushed] == [place, place + 8]
        assert torch.equal(torch.cat(pushed), torch.arange(5.0) + number)
        assert (flat.gradients.data_ptr() == place) == (number != 1)
        assert all(view.holds_gradient() for view in flat.views)
    assert flat.gradients.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
