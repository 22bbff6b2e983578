"""Part 3: two ranks share one GPU, and one GPU rank trains with CPU ranks."""

from __future__ import annotations

from functools import partial

from checks.setting import Figures, Network, Part, Row, Setting, hold

STRATEGIES = ("synchronous", "parameter_server", "local_sgd(steps=8)", "ad_psgd")
TOGETHER, MIXED = "two ranks on one GPU", "a GPU rank with CPU ranks"
LEAST = {TOGETHER: 0.4, MIXED: 0.5}
"""Of the sum of the speeds alone. Two ranks of one GPU have half of it each, so 0.5 is no loss at all."""
_MEASURED_S, _WARM_S = 4.0, 3.0


def network_of(setting: Setting) -> Network:
    """Return the network of this part, small enough for a CPU."""
    return Network("cifar_resnet", 32, 8 if setting.quick else 128, precision="float32", channels_last=False)


def cpu_ranks(setting: Setting) -> int:
    """Return how many CPU ranks train with the GPU's."""
    return 1 if setting.quick else 3


def words_of(setting: Setting) -> tuple[str, ...]:
    """Return the options of all runs."""
    return ("--data", str(setting.pictures(32)), *network_of(setting).words)


def measured(setting: Setting, devices: str, workers: int, *words: str) -> Figures:
    """Return the images a second of some workers."""
    rate = setting.measured(
        "ranks", *words_of(setting), "--workers", str(workers), *words,
        device=devices, from_epoch=0, skip_s=0.0 if setting.quick else _WARM_S, seconds=_MEASURED_S,
    )  # fmt: skip
    return {"images_per_s": rate.images_per_s, "seconds": rate.seconds}


def alone(setting: Setting, kind: str) -> Figures:
    """One rank alone is measured, a CPU's with the threads that it has beside the others."""
    if kind == "GPU":
        return measured(setting, setting.device.type, 1)
    threads = max(1, (setting.cores - 1) // cpu_ranks(setting))
    return measured(setting, "cpu", 1, "--threads", str(threads))


def strategy_row(setting_of: str, strategy: str) -> str:
    """Return the name of a strategy's row."""
    return f"{setting_of}: {strategy}"


def with_servers(strategy: str) -> str:
    """Return a strategy for GPU and CPU ranks: a synchronous one by servers, as copies of the model would diverge."""
    return "parameter_server(consistency=synchronous)" if strategy == "synchronous" else strategy


def together(setting: Setting, strategy: str) -> Figures:
    """Two ranks on one GPU lose little of its speed."""
    kind = setting.device.type
    figures = measured(setting, kind, 2, "--strategy", strategy)
    whole = 2 * setting.earlier("a GPU rank alone", "images_per_s", figures)
    return _compared(setting, figures, whole, TOGETHER)


def mixed(setting: Setting, strategy: str) -> Figures:
    """A GPU rank and CPU ranks add up."""
    count, strategy = cpu_ranks(setting), with_servers(strategy)
    devices = ",".join([setting.device.type, *["cpu"] * count])
    figures = measured(setting, devices, 1 + count, "--strategy", strategy) | {"strategy": strategy}
    whole = setting.earlier("a GPU rank alone", "images_per_s", figures)
    whole += count * setting.earlier("a CPU rank alone", "images_per_s", figures)
    return _compared(setting, figures, whole, MIXED)


def _compared(setting: Setting, figures: Figures, whole: float, kind: str) -> Figures:
    share = figures["images_per_s"] / whole
    figures |= {"sum_of_speeds_alone": whole, "share": share}
    hold(setting.quick or share >= LEAST[kind], f"{share:.2f} of the sum of the speeds alone", figures)
    return figures


PART = Part(
    3,
    "Two ranks on one GPU, and one GPU rank with CPU ranks",
    (
        Row("a GPU rank alone", partial(alone, kind="GPU"), 16),
        Row("a CPU rank alone", partial(alone, kind="CPU"), 15),
        *(Row(strategy_row(TOGETHER, each), partial(together, strategy=each), 16) for each in STRATEGIES),
        *(Row(strategy_row(MIXED, each), partial(mixed, strategy=each), 16) for each in STRATEGIES),
    ),
)
