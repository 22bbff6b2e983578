"""Price lists: what an hour of a machine costs, in an editable YAML file with currency, date and source.

    currency: EUR
    date: 2025-01
    source: our own invoices
    machines:
      rented: {per_hour: 0.19}                 or per_second, per_minute, per_year
      bought: {purchase: 2400, years: 4, watts: 250, electricity_per_kwh: 0.30}
      larger: {per_hour: 0.76, cores: 16, speed: 3.5}         what it is, for plans that choose among machines

Own hardware costs `purchase / years` and its electricity, for every hour of a year of 8,760, used or not.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from polyrhythm.errors import RequestError, unknown
from polyrhythm.specs import plainly
from polyrhythm.training.quantities import Count, NonNegative, Positive
from polyrhythm.user_files import parse_yaml, read_text

HOURS_A_YEAR = 8760
_READY = files("polyrhythm.simulation") / "price_lists"
_RATES = {"per_second": 3600.0, "per_minute": 60.0, "per_hour": 1.0, "per_year": 1 / HOURS_A_YEAR}


class MachinePrice(BaseModel):
    """What a machine costs: one rate, or what it was bought for; and what it is, where that is told.

    Attributes:
        cores: of it; None: nobody says what it is.
        accelerators: of it.
        workers: places for workers; None: one an accelerator, else one.
        speed: of a worker, over one on a host of speed 1 of a cluster; None: as its cores are to those of the cluster's
            first host, where it has no accelerators.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_second: NonNegative | None = None
    per_minute: NonNegative | None = None
    per_hour: NonNegative | None = None
    per_year: NonNegative | None = None
    purchase: NonNegative | None = None
    years: Positive | None = None
    watts: NonNegative = 0.0
    electricity_per_kwh: NonNegative = 0.0
    cores: Count | None = None
    accelerators: Annotated[int, Field(ge=0)] = 0
    workers: Count | None = None
    speed: Positive | None = None

    @model_validator(mode="after")
    def _check(self) -> MachinePrice:
        given = [name for name in (*_RATES, "purchase") if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"give one of {', '.join(_RATES)} or purchase (given {', '.join(given) or 'none'})"
            )
        if (self.purchase is None) != (self.years is None):
            raise RequestError("purchase goes with years, over which it is written off")
        return self

    @property
    def described(self) -> bool:
        """Whether its price list says what it is, so that a plan may choose it."""
        return self.cores is not None and (self.speed is not None or not self.accelerators)

    @property
    def of_an_hour(self) -> float:
        """Of an hour, electricity included."""
        rates = [
            value * hours for name, hours in _RATES.items() if (value := getattr(self, name)) is not None
        ]
        if self.purchase is not None and self.years is not None:
            rates = [self.purchase / self.years / HOURS_A_YEAR]
        return float(rates[0] + self.watts / 1000 * self.electricity_per_kwh)


class PriceList(BaseModel):
    """Prices of machines by name, with where and when they hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    currency: str
    date: Annotated[str, BeforeValidator(str)]
    source: str
    machines: dict[str, MachinePrice]

    def of_an_hour(self, machine: str) -> float:
        """Return the price of an hour of a machine.

        Raises:
            RequestError: the list has none of that name.
        """
        if machine not in self.machines:
            raise unknown("machine of the price list", machine, self.machines)
        return self.machines[machine].of_an_hour


def ready_price_lists() -> list[str]:
    """Return the names of the price lists that come with the package."""
    names = (entry.name for entry in _READY.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def open_prices(name_or_file: str | Path) -> PriceList:
    """Return a ready price list by name, or the one of a file.

    Raises:
        RequestError: there is none, or a value in it is missing or impossible.
    """
    where = str(name_or_file)
    if where in ready_price_lists():
        text = (_READY / f"{where}.yaml").read_text(encoding="utf-8")
    else:
        path = Path(name_or_file)
        if not path.suffix and not path.exists():
            raise unknown("price list", where, ready_price_lists())
        text = read_text(path, "the price list")
    read = parse_yaml(text, f"price list {where}")
    if not isinstance(read, dict):
        raise RequestError(
            f"price list {where} must be lines of `key: value`, with currency, date, source, machines"
        )
    try:
        return PriceList(**{str(key): value for key, value in read.items()})
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        reason = str(cause) if isinstance(cause, RequestError) else plainly(first["msg"])
        raise RequestError(f"price list {where}: {'.'.join(map(str, first['loc']))}: {reason}") from None
