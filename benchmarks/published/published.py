"""Reads published measurements of throughput against the number of workers, and divides their rows.

    python benchmarks/published/published.py

Prints the list of tables as README.md has it. Every file of the folder `tables` is one table of one source.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from statistics import mean
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

FOLDER = Path(__file__).parent / "tables"
FIT_AT_MOST = 8
"""Largest number of workers of a row that a model may be fitted to."""
UNITS = {
    "throughput": {"images/s", "samples/s", "sentences/s", "sequences/s"},
    "time of an epoch": {"s"},
}

Text = Annotated[str, StringConstraints(min_length=1)]
Figure = Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?$")]
"""Number with the digits that the source prints."""


class Entry(BaseModel):
    """Part of a table; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Source(Entry):
    """Publication of the figures.

    Attributes:
        link: Address of the text, with the revision where there is one.
        place: Section, table or column of the figures in that text.
        published: Year of the measurement or of its publication, where the source gives it.
    """

    link: Annotated[str, StringConstraints(pattern=r"^https://\S+$")]
    place: Text
    published: Annotated[int, Field(ge=2015, le=2026)] | None


class Hardware(Entry):
    """Machines as the source describes them; None where it does not.

    Attributes:
        device: Processor or accelerator that computes.
        devices_per_host: Devices of one host.
        host: Kind of host.
        inside: Connection between the devices of one host.
        between: Connection between hosts.
    """

    device: Text | None
    devices_per_host: Annotated[int, Field(ge=1)] | None
    host: Text | None
    inside: Text | None
    between: Text | None


class Row(Entry):
    """One measurement.

    Attributes:
        workers: Number of workers.
        value: Figure as printed, or several of the same measurement.
        hosts: Number of hosts.
        servers: Number of parameter servers.
        batch: Batch size as printed, where the source does not give one per worker.
        accumulated: Steps whose gradients are accumulated between two updates.
        algorithm: Variant of the series' algorithm.
        composition: Devices of this row and their regions, where they differ.
        place: File or folder of this row in the source.
    """

    workers: Annotated[int, Field(ge=1, le=1024)]
    value: Figure | Annotated[list[Figure], Field(min_length=2)]
    hosts: Annotated[int, Field(ge=1)] | None = None
    servers: Annotated[int, Field(ge=0)] | None = None
    batch: Figure | None = None
    accumulated: Annotated[int, Field(ge=1)] | None = None
    algorithm: Text | None = None
    composition: Text | None = None
    place: Text | None = None

    @property
    def figure(self) -> float:
        """Printed figure as a number; the mean of several."""
        return mean(map(float, self.value if isinstance(self.value, list) else [self.value]))


class Series(Entry):
    """Rows of one network and one algorithm.

    Attributes:
        network: Network, as the source names it.
        weights: Number or size of its weights, where the source gives it.
        batch_per_worker: Batch size of each worker.
        precision: Precision, as the source names it.
        algorithm: Algorithm and its options, as the source names them.
        family: Our classification of that algorithm.
        rows: Measurements.
    """

    network: Text
    weights: Text | None
    batch_per_worker: Annotated[int, Field(ge=1)] | None
    precision: Text | None
    algorithm: Text | None
    family: Literal["all-reduce", "parameter server", "accumulation", "pipeline"]
    rows: Annotated[list[Row], Field(min_length=3)]

    @property
    def fit_at_most(self) -> int:
        """Largest number of workers to fit: 8, or half of the largest number where no row has more than 8."""
        largest = max(row.workers for row in self.rows)
        return FIT_AT_MOST if largest > FIT_AT_MOST else largest // 2

    @property
    def fitted(self) -> list[Row]:
        """Rows that a model may be fitted to."""
        return [row for row in self.rows if row.workers <= self.fit_at_most]

    @property
    def predicted(self) -> list[Row]:
        """Rows to predict."""
        return [row for row in self.rows if row.workers > self.fit_at_most]

    @model_validator(mode="after")
    def _has_both_kinds(self) -> Self:
        if not (self.fitted and self.predicted):
            raise ValueError(f"{self.network}: at least one row to fit and one to predict are needed")
        return self


class Table(Entry):
    """Measurements of one source on one kind of hardware.

    Attributes:
        title: Name for people.
        source: Publication.
        hardware: Machines.
        worker: Process or device that counts as one worker.
        data: Training data.
        software: Software and its versions.
        quantity: Measured quantity.
        unit: Unit of the figures.
        series: Rows by network and algorithm.
    """

    title: Text
    source: Source
    hardware: Hardware
    worker: Text
    data: Text | None
    software: Text | None
    quantity: Literal["throughput", "time of an epoch"]
    unit: Text
    series: Annotated[list[Series], Field(min_length=1)]

    @property
    def rows(self) -> list[Row]:
        """Rows of all series."""
        return [row for series in self.series for row in series.rows]

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that change with any series, row or figure."""
        figures = [series.model_dump(exclude_none=True) for series in self.series]
        return hashlib.sha256(json.dumps(figures).encode()).hexdigest()[:8]

    @model_validator(mode="after")
    def _unit_fits(self) -> Self:
        if self.unit not in UNITS[self.quantity]:
            raise ValueError(f"{self.title}: {self.unit} is no unit of {self.quantity}")
        return self


def read(file: Path) -> Table:
    """Return one table.

    Raises:
        ValueError: A key is missing or unknown, or a value is not of its form.
    """
    return Table.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))


def tables() -> dict[str, Table]:
    """Return all tables by the name of their file."""
    return {file.stem: read(file) for file in sorted(FOLDER.glob("*.yaml"))}


def overview() -> list[str]:
    """Return the lines of the list of tables in README.md."""
    lines = [
        "| table | source | families | workers | series | to fit | to predict | digest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, table in tables().items():
        workers = [row.workers for row in table.rows]
        families = ", ".join(dict.fromkeys(series.family for series in table.series))
        fitted, predicted = (
            sum(len(getattr(series, part)) for series in table.series) for part in ("fitted", "predicted")
        )
        cells = [
            f"[{table.title}](tables/{name}.yaml)",
            f"[link]({table.source.link})",
            families,
            f"{min(workers)} to {max(workers)}",
            f"{len(table.series)}",
            f"{fitted}",
            f"{predicted}",
            f"`{table.digest}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(overview()))
