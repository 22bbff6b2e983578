"""Why a finished run was slow, and what would help: the verb `why`.

The run is rehearsed as it was and with one thing changed at a time, on the cluster that it was simulated on (or one
that `profile` wrote, for a real run), without its faults. What a change gains is the ratio of both rehearsals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyrhythm.api.rehearsal import Candidate, rehearse, with_servers, write_prediction
from polyrhythm.api.simulate import CLUSTER_FILE, at_its_pace, laid_out
from polyrhythm.compression.payoff import Payoff
from polyrhythm.config.assemble import strategy_from
from polyrhythm.config.dry_run import assemble_dry_run
from polyrhythm.config.recipe import configure
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError
from polyrhythm.reporting.comparison import ComparedRun, read_run
from polyrhythm.reporting.event_log import LOG_FILE, read_events
from polyrhythm.reporting.figures import RunFigures, as_one_run
from polyrhythm.reporting.held_back import held_back
from polyrhythm.run_files import check_in_run
from polyrhythm.simulation.cluster import Cluster, open_cluster
from polyrhythm.specs import Spec, parse
from polyrhythm.strategies.compressing import compressor_of, payoff_of

_OTHERS = ("synchronous", "parameter_server(servers=1)", "local_sgd(steps=8)")
_PLAIN = "no compression"
_NOT_OF_A_REHEARSAL = ("strategy", "workers", "epochs", "until", "seed", "out")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing done otherwise.

    Attributes:
        what: in words.
        images_per_s: of the rehearsal with it.
        gain: over the rehearsal of the run as it was: 0.38 is 38 % more images a second.
        caution: what it changes besides speed; empty if it changes nothing that is learned.
    """

    what: str
    images_per_s: float
    gain: float
    caution: str


@dataclass(frozen=True, kw_only=True)
class Why:
    """What bound a run, and what would help.

    Attributes:
        run: its folder.
        held_back: what bound it, in words.
        images_per_s: of the run.
        rehearsed_images_per_s: of its rehearsal as it was: how far to trust the rest.
        changes: the largest gain first.
        refused: changes that cannot be made, with the reason.
        compression: whether it pays, in words; empty where nothing is compressed.
    """

    run: str
    held_back: str
    images_per_s: float
    rehearsed_images_per_s: float
    changes: tuple[Change, ...]
    refused: Mapping[str, str]
    compression: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON-able dict."""
        return asdict(self)


def why(run: str | Path, *, cluster: str | Path | None = None) -> Why:
    """Find out what bound a finished run, and what would help most.

    Args:
        run: its folder.
        cluster: a cluster file or ready cluster; None: the one that it was simulated on.

    Raises:
        RequestError: there is no such run, or nothing says what cluster it was on.
    """
    folder = Path(run)
    read = read_run(folder)
    where, as_it_was, options, config = _as_it_was(read, cluster)
    strategy, workers, batch = as_it_was.strategy, as_it_was.workers, config.batch_size
    tried: dict[str, tuple[Candidate, str]] = {}

    def offer(what: str, caution: str, spec: str = strategy, **changed: Any) -> None:
        tried[what] = Candidate(strategy=spec, family=what, workers=workers, options=changed), caution

    for spec, servers, placement in _servers(strategy, workers):
        offer(f"{servers} server{'s' * (servers != 1)}{placement}", "", spec)
    if config.balance == "auto" or str(config.balance) == "off":
        offer("parts of the batch by speed (--balance measured)", "", balance="measured")
    offer(
        f"a batch of {2 * batch}",
        "fewer updates an epoch: more images to the same accuracy",
        batch_size=2 * batch,
    )
    plain = _uncompressed(config)
    if plain is not None:
        offer(_PLAIN, "", plain, compress=None)
    for other in _OTHERS:
        if parse(other).name != parse(strategy).name:
            offer(other, "another strategy learns otherwise: `polyrhythm plan` weighs both", other)
    refused: dict[str, str] = {}
    found = rehearse(where, [as_it_was, *(each for each, _ in tried.values())], options, refused)
    rates = {each.family: each.images_per_s for each in found}
    if strategy not in rates:
        raise RequestError(f"{folder} cannot be rehearsed: {next(iter(refused.values()))}")
    base = rates[strategy]
    pays = None if plain is None else _payoff(where, config)
    # Rehearsals know nothing of the time to compress, so the run as it was is slower than its own by that.
    images = workers * batch * max(1, strategy_from(strategy).traits(workers).exchange_every)
    slower = 1.0 if pays is None else 1 + pays.compress_s * base / images
    changes = [
        Change(
            what=what,
            images_per_s=rates[what],
            gain=rates[what] / base * (slower if what == _PLAIN else 1.0) - 1,
            caution=caution,
        )
        for what, (_, caution) in tried.items()
        if what in rates
    ]
    bound = held_back(RunFigures.of(as_one_run(read_events(folder / LOG_FILE))))
    return Why(
        run=str(folder),
        held_back=bound.text if bound else "",
        images_per_s=float(read.known.get("images_per_s", 0.0)),
        rehearsed_images_per_s=base,
        changes=tuple(sorted(changes, key=lambda change: -change.gain)),
        refused=refused,
        compression="" if pays is None else pays.text,
    )


def _uncompressed(config: RunConfig) -> str | None:
    """Return the spec of a run's strategy without compression; None where nothing is compressed."""
    if compressor_of(strategy_from(config.strategy, config.compress)) is None:
        return None
    given = parse(str(config.strategy))
    return str(Spec(given.name, {key: value for key, value in given.arguments.items() if key != "compress"}))


def _payoff(where: Cluster, config: RunConfig) -> Payoff | None:
    dry_run, _ = assemble_dry_run(config, 1)
    link = laid_out(where, dry_run).slowest_link_bytes_per_s
    return payoff_of(dry_run.strategy, dry_run.sizes.shapes, dry_run.sizes.dtype, config.workers, link)


def _as_it_was(
    read: ComparedRun, cluster: str | Path | None
) -> tuple[Cluster, Candidate, dict[str, Any], RunConfig]:
    """Return what a run is rehearsed on, the run as it was, its other options, and its configuration."""
    file = read.folder / CLUSTER_FILE
    if cluster is None and not file.is_file():
        raise RequestError(
            f"{read.folder} was a real run: write its machines down with `polyrhythm profile`, and give --cluster "
            "profile.yaml"
        )
    if cluster is None:
        check_in_run(file)
    given = {key: value for key, value in read.config.items() if value is not None}
    config = configure({}, given)
    where = at_its_pace(open_cluster(file if cluster is None else cluster), config)
    options = {key: value for key, value in given.items() if key not in _NOT_OF_A_REHEARSAL}
    strategy = str(config.strategy)
    return (
        where,
        Candidate(strategy=strategy, family=strategy, workers=config.workers, options={}),
        options,
        config,
    )


def predict_run(run: str | Path, cluster: str | Path) -> Path:
    """Rehearse a run as it was, and write what that predicts beside its events, for its report.

    Args:
        run: its folder.
        cluster: a cluster file or ready cluster, of the machines that it ran on.

    Returns:
        The file.

    Raises:
        RequestError: there is no such run or cluster, or the run cannot be rehearsed on it.
    """
    folder = Path(run)
    where, as_it_was, options, _ = _as_it_was(read_run(folder), cluster)
    refused: dict[str, str] = {}
    found = rehearse(where, [as_it_was], options, refused)
    if not found:
        raise RequestError(f"{folder} cannot be rehearsed: {next(iter(refused.values()))}")
    return write_prediction(folder, where.name, found[0])


def _servers(strategy: str, workers: int) -> list[tuple[str, int, str]]:
    """Return the strategy with other numbers and places of servers, where it has any."""
    given = parse(strategy)
    now = strategy_from(strategy).traits(workers).servers
    bare = {key: value for key, value in given.arguments.items() if key not in ("servers", "placement")}
    found = []
    for spec in with_servers(str(Spec(given.name, bare)), workers) if now else []:
        arguments = parse(spec).arguments
        servers = int(arguments.get("servers", now))
        place = str(arguments.get("placement", "shared"))
        if (servers, place) != (now, str(given.arguments.get("placement", "shared"))):
            found.append((spec, servers, " on hosts of their own" if place == "dedicated" else ""))
    return found
