"""Part 6: `profile` on the GPU, then `simulate` of the runs that parts 2 and 3 measured, within 10 %."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from checks import one_gpu, ranks
from checks.setting import Figures, Network, Part, Problems, Row, Setting, Skipped

WITHIN = 0.10


def _profiled(
    setting: Setting, name: str, network: Network, data: Path, device: str, threads: int
) -> Figures:
    """Measure a step and the links, and write them as a cluster file; return the measurements."""
    from polyrhythm.api.profile import profile

    file = setting.folder / f"profile-{name}.yaml"
    file.unlink(missing_ok=True)
    found = profile(
        steps=5 if setting.quick else 20,
        out=file,
        data=str(data),
        model=network.model,
        batch_size=network.batch,
        image_size=network.side,
        precision=network.precision,
        channels_last=network.channels_last,
        device=device,
        threads=threads,
        epochs=50,
    )
    assert found is not None, "this is no rank of torchrun"
    return found


def _cluster(setting: Setting, name: str, hosts: list[dict[str, Any]] | None = None) -> str:
    """Return a cluster file with other hosts; all of them are one machine, so its inside link connects them."""
    import yaml

    path = setting.folder / f"profile-{name}.yaml"
    cluster = yaml.safe_load(path.read_text(encoding="utf-8"))
    cluster["nic"] = cluster["inside"]
    if hosts is not None:
        cluster["hosts"] = hosts
    else:
        cluster["hosts"] = [cluster["hosts"][0] | {"workers": 1}]
    changed = path.with_name(f"cluster-{name}-{len(cluster['hosts'])}-{cluster['hosts'][0]['workers']}.yaml")
    changed.write_text(yaml.safe_dump(cluster), encoding="utf-8")
    return str(changed)


def _simulated(
    setting: Setting, cluster: str, network: Network, data: Path, workers: int, strategy: str
) -> float:
    words = ["--cluster", cluster, "--gradients", "none", "--steps", "20" if setting.quick else "300"]
    words += ["--data", str(data), "--model", network.model, "--batch-size", str(network.batch)]
    words += ["--image-size", str(network.side), "--workers", str(workers), "--strategy", strategy]
    name = f"simulated-{Path(cluster).stem}-{re.sub(r'[^a-z_]+', '-', strategy)}"
    return float(setting.call("simulate", *words, "--out", str(setting.run_folder(name)))["images_per_s"])


def _all_simulated(
    setting: Setting, cluster: str, network: Network, data: Path, workers: int, strategies: Sequence[str]
) -> list[float]:
    """Return the images a second of strategies, some of which are simulated at a time."""
    return setting.at_once(
        [partial(_simulated, setting, cluster, network, data, workers, each) for each in strategies]
    )


def _compared(setting: Setting, problems: Problems, name: str, predicted: float, row: str) -> Figures:
    """Compare a prediction with the row that measured it."""
    try:
        measured = setting.earlier(row, "images_per_s")
    except Skipped as error:
        problems.expect(False, str(error))
        return {"predicted": predicted}
    ratio = predicted / measured
    problems.expect(
        setting.quick or abs(ratio - 1) <= WITHIN, f"{name}: predicted {ratio:.2f} of what was measured"
    )
    return {"predicted": predicted, "measured": measured, "ratio": ratio}


def one_worker(setting: Setting) -> Figures:
    """The run of one worker is predicted."""
    network = one_gpu.network_of(setting, "resnet50")
    data = setting.pictures(network.side, photographs=not setting.quick)
    _profiled(setting, "one", network, data, setting.device.type, 1)
    predicted = _simulated(setting, _cluster(setting, "one"), network, data, 1, "synchronous")
    problems = Problems()
    return problems.conclude(_compared(setting, problems, "resnet50", predicted, "resnet50: train"))


def two_ranks(setting: Setting) -> Figures:
    """Runs of two ranks on one GPU, each of which has half of it, are predicted."""
    network, data = ranks.network_of(setting), setting.pictures(32)
    _profiled(setting, "gpu", network, data, setting.device.type, 1)
    host = {"name": "gpu", "count": 1, "cores": setting.cores, "workers": 2, "speed": 0.5}
    cluster = _cluster(setting, "gpu", [host])
    problems, found = Problems(), Figures()
    rates = _all_simulated(setting, cluster, network, data, 2, ranks.STRATEGIES)
    for strategy, predicted in zip(ranks.STRATEGIES, rates, strict=True):
        row = ranks.strategy_row(ranks.TOGETHER, strategy)
        found[strategy] = _compared(setting, problems, strategy, predicted, row)
    return problems.conclude(found)


def with_cpu_ranks(setting: Setting) -> Figures:
    """Runs of a GPU rank with CPU ranks, whose speed is profiled too, are predicted."""
    network, data = ranks.network_of(setting), setting.pictures(32)
    count = ranks.cpu_ranks(setting)
    threads = max(1, (setting.cores - 1) // count)
    gpu = _profiled(setting, "mixed", network, data, setting.device.type, 1)
    slow = _profiled(setting, "cpu", network, data, "cpu", threads)
    speed = gpu["step_s"] / slow["step_s"]
    hosts = [
        {"name": "gpu", "count": 1, "cores": 1, "workers": 1, "speed": 1.0},
        {"name": "cpu", "count": 1, "cores": max(1, setting.cores - 1), "workers": count, "speed": speed},
    ]
    cluster = _cluster(setting, "mixed", hosts)
    problems, found = Problems(), Figures(cpu_speed=speed)
    asked = [ranks.with_servers(strategy) for strategy in ranks.STRATEGIES]
    rates = _all_simulated(setting, cluster, network, data, 1 + count, asked)
    for strategy, predicted in zip(ranks.STRATEGIES, rates, strict=True):
        row = ranks.strategy_row(ranks.MIXED, strategy)
        found[strategy] = _compared(setting, problems, strategy, predicted, row)
    return problems.conclude(found)


PART = Part(
    6,
    "Predicted",
    (
        Row("predicted: one worker", one_worker, 25),
        Row("predicted: two ranks on one GPU", two_ranks, 30),
        Row("predicted: a GPU rank with CPU ranks", with_cpu_ranks, 35),
    ),
)
