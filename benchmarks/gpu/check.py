"""All checks of Polyrhythm on a GPU, in calls of at most six minutes.

    python benchmarks/gpu/check.py [--out FOLDER] [--only NAME …] [--again] [--seconds 355]
        [--device cuda|cpu] [--quick]

Each row is written to FOLDER/results.jsonl as soon as it has been made, and a part that fails stops no other. A
further call with the same folder continues with the next row. It needs Python, torch with CUDA and the project's
dependencies, and finds the package in its own checkout.

Exit status: 0 all rows so far hold, 1 a row does not, 2 nothing can be checked here, 3 rows are left for another call.
With `--device cpu --quick` the same code runs without a GPU, as a test of the checks; it says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "src")]

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from checks.setting import Part, Row, Setting

DEPENDENCIES = (
    "torch", "torchvision", "timm", "numpy", "PIL", "safetensors", "pydantic", "yaml", "typer", "rich", "greenlet"
)  # fmt: skip
MODULES = ("correct", "one_gpu", "ranks", "prediction", "augmentation", "compressors", "energy")
"""In the order in which their parts run: what the others need comes first, what is least missed last."""
CALL_S = 355.0
_TRACE_LINES = 8
_TIMES_AS_LONG = {"cuda": 3.0, "cpu": 20.0}
"""As a row is expected to take on a GPU: then it hangs."""
_OFTEN = 2
"""Calls in which a row may be cut off before it counts as failed."""


class Results:
    """The rows of all calls: JSON lines, each written at once.

    A row that a call begins has a line before it has an outcome, so that one at which a call was killed is known.

    Args:
        path: of the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            whole = path.read_text(encoding="utf-8")
            for text in whole.splitlines():
                with suppress(json.JSONDecodeError):  # a call was killed while it wrote
                    self.lines.append(json.loads(text))
            if whole and not whole.endswith("\n"):
                with path.open("a", encoding="utf-8") as file:
                    file.write("\n")

    def add(self, **line: Any) -> None:
        """Append a line, and have it on disk when this returns."""
        self.lines.append(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")
            file.flush()
            os.fsync(file.fileno())

    @property
    def calls(self) -> int:
        """Calls so far."""
        return sum("call" in line for line in self.lines)

    def of_others(self, device: str, quick: bool) -> bool:
        """Return whether calls with another device or size have made rows here."""
        kinds = {(line["device"], line["quick"]) for line in self.lines if "call" in line}
        return bool(self.rows) and kinds != {(device, quick)}

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """The newest outcome of each row, by name."""
        return {line["row"]: line for line in self.lines if "outcome" in line}

    def cut_off(self, row: str) -> int:
        """Return how often a row has begun since its last outcome."""
        count = 0
        for line in self.lines:
            if line.get("row") == row:
                count = 0 if "outcome" in line else count + 1
        return count


def missing() -> list[str]:
    """Return the names of the dependencies that cannot be imported."""
    return [name for name in DEPENDENCIES if importlib.util.find_spec(name) is None]


def machine(device: str) -> dict[str, Any]:
    """Describe this machine, with `impossible` where nothing can be checked on it; called in a process of its own."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "commit": _commit(),
    }
    absent = missing()
    if absent:
        return found | {"impossible": f"packages are missing: {', '.join(absent)}"}
    import torch

    found |= {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    for name in ("torchvision", "timm"):
        with suppress(Exception):
            found[name] = importlib.import_module(name).__version__
    if device == "cuda":
        if torch.version.cuda is None:
            return found | {"impossible": f"torch {torch.__version__} is built without CUDA"}
        if not torch.cuda.is_available():
            return found | {"impossible": "there is no GPU here: torch.cuda.is_available() is false"}
        found |= {
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
            "gpu_bytes": torch.cuda.mem_get_info()[1],
            "driver": _driver(),
            "cudnn": torch.backends.cudnn.version(),
        }
        ones = torch.ones(64, 64, device="cuda")
        if float((ones @ ones)[0, 0]) != 64:
            return found | {"impossible": "the GPU multiplies wrongly"}
    try:
        import polyrhythm

        found["package"] = polyrhythm.__file__
    except Exception as error:
        return found | {"impossible": f"the package cannot be imported: {type(error).__name__}: {error}"}
    return found


def _commit() -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20, check=True
        )  # fmt: skip
        return done.stdout.strip()
    return os.environ.get("POLYRHYTHM_COMMIT")


def _driver() -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        return done.stdout.split("\n")[0].strip()
    return None


def apart(act: Any, arguments: Sequence[Any], limit_s: float) -> Any:
    """Return what a function returns in a forked process of its own, which is killed with all below it at the end.

    An error of the GPU ends the use of it in its process only, and this process never touches it.

    Raises:
        TimeoutError: it took longer than `limit_s`.
        ChildProcessError: it died.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_child, args=(theirs, act, tuple(arguments)))
    gc.freeze()  # the child must not destroy what belongs to this process's threads, neither in a hook of the fork
    try:
        process.start()
    finally:
        gc.unfreeze()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            raise TimeoutError(f"no end after {limit_s:.0f} s")
        try:
            return json.loads(ours.recv_bytes())
        except EOFError:
            process.join(5)
            raise ChildProcessError(f"its process died with status {process.exitcode}") from None
    finally:
        _kill_all(process.pid or 0)
        process.join()


def _in_child(pipe: Connection, act: Any, arguments: tuple[Any, ...]) -> None:
    os.setsid()
    pipe.send_bytes(json.dumps(act(*arguments), default=str).encode())


def _kill_all(pid: int) -> None:
    """Kill a process, those below it, and those of its session."""
    from checks.setting import descendants

    below = descendants(pid)
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:  # else it has not begun, and is in our own group
            os.killpg(pid, signal.SIGKILL)
    for each in (pid, *below):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def outcome_of(row: Row, setting: Setting) -> dict[str, Any]:
    """Make a row; return its outcome, what was found, and the last lines of a traceback."""
    from checks.setting import Failed, NotInstalled, Skipped

    try:
        return {"outcome": "ok", "found": row.check(setting)}
    except Skipped as error:
        return {"outcome": "left out", "why": str(error), "found": error.figures}
    except NotInstalled as error:
        return {"outcome": "not installed", "why": str(error)}
    except Failed as error:
        return {"outcome": "FAILED", "why": str(error), "found": error.figures}
    except Exception as error:
        lines = traceback.format_exc().rstrip().splitlines()
        return {
            "outcome": "FAILED",
            "why": f"{type(error).__name__}: {error}"[:600],
            "trace": lines[-_TRACE_LINES:],
        }


def parts() -> list[Part]:
    """Return the parts in the order in which they run; one that cannot be imported has a row that fails."""
    from checks.setting import Part, Row

    found = []
    for module in MODULES:
        try:
            found.append(importlib.import_module(f"checks.{module}").PART)
        except Exception as error:

            def fails(_: Setting, error: Exception = error) -> dict[str, Any]:
                raise error

            found.append(Part(0, module, (Row(f"{module} can be imported", fails, 1.0),)))
    return found


def make_rows(
    rows: Iterable[tuple[Part, Row]], results: Results, place: dict[str, Any], end_s: float, *, again: bool
) -> list[str]:
    """Make rows until the call's end; return the names of those that are left.

    Args:
        rows: in their order.
        results: where they are written.
        place: `device`, `folder` and `quick` of a `Setting`.
        end_s: of the call, by the monotonic clock.
        again: whether rows that failed or were left out are made again.
    """
    from checks.setting import Setting

    left, made = list(rows), 0
    while left:
        part, row = left[0]
        before = results.rows.get(row.name)
        if before is not None and not (again and before["outcome"] in ("FAILED", "left out")):
            left.pop(0)
            continue
        line = {"row": row.name, "part": part.number}
        if results.cut_off(row.name) >= _OFTEN:
            results.add(**line, outcome="FAILED", why=f"it was cut off in {_OFTEN} calls", seconds=0.0)
            _print(results.lines[-1])
            left.pop(0)
            continue
        remaining_s = end_s - time.monotonic()
        expected_s = 0.0 if place["quick"] else row.seconds
        if remaining_s <= 1 or (made and remaining_s < expected_s):
            break
        results.add(**line, began=_now())
        own_s = _TIMES_AS_LONG[place["device"]] * max(row.seconds, 20.0)
        earlier = {name: each.get("found") or {} for name, each in results.rows.items()}
        setting = Setting(place["device"], place["folder"], quick=place["quick"], earlier=earlier)
        began_s = time.monotonic()
        try:
            outcome = apart(outcome_of, (row, setting), min(own_s, remaining_s))
        except TimeoutError as error:
            if own_s > remaining_s:
                break  # the call's end, not the row's: the next call begins with it
            outcome = {"outcome": "FAILED", "why": str(error)}
        except ChildProcessError as error:
            outcome = {"outcome": "FAILED", "why": str(error)}
        results.add(**line, **outcome, seconds=round(time.monotonic() - began_s, 1))
        _print(results.lines[-1])
        made += 1
        left.pop(0)
    return [row.name for _, row in left]


def _print(line: dict[str, Any]) -> None:
    figures = ", ".join(f"{name} {_short(value)}" for name, value in (line.get("found") or {}).items())
    why = f"{line['why']} " if line.get("why") else ""
    text = f"{why}{figures}".replace("\n", " ").replace("|", "/")
    print(f"| {line['part']} | {line['row']} | {line['outcome']} | {line['seconds']} | {text} |", flush=True)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_short(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def main(words: Sequence[str] | None = None) -> int:
    """Make the rows of one call; print a table of them, and return the exit status."""
    began_s = time.monotonic()
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-results"),
        help="the folder of the results, kept from call to call",
    )
    options.add_argument("--only", nargs="+", default=None, help="names of rows, or numbers of parts")
    options.add_argument("--again", action="store_true", help="make rows again that failed or were left out")
    options.add_argument("--seconds", type=float, default=CALL_S, help="longest time of this call")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--quick", action="store_true", help="small sizes, nothing claimed of speed")
    chosen = options.parse_args(words)
    out: Path = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out / "results.jsonl")
    if results.of_others(chosen.device, chosen.quick):
        print(f"{out} holds rows of another device or size: name another folder with --out", file=sys.stderr)
        return 2
    try:
        here = apart(machine, (chosen.device,), 140.0)
    except (TimeoutError, ChildProcessError) as error:
        here = {"impossible": f"the GPU does not answer: {error}"}
    results.add(call=results.calls + 1, began=_now(), device=chosen.device, quick=chosen.quick, machine=here)
    print(json.dumps(here), flush=True)
    if "impossible" in here:
        print(f"nothing can be checked: {here['impossible']}", file=sys.stderr)
        return 2
    rows = [(part, row) for part in parts() for row in part.rows]
    if chosen.only:
        wanted = set(chosen.only)
        unknown = wanted - {row.name for _, row in rows} - {str(part.number) for part, _ in rows}
        if unknown:
            options.error(
                f"no row or part {', '.join(sorted(unknown))}: there are {[row.name for _, row in rows]}"
            )
        rows = [(part, row) for part, row in rows if row.name in wanted or str(part.number) in wanted]
    print("\n| part | row | outcome | seconds | found |\n|---|---|---|---|---|", flush=True)
    place = {"device": chosen.device, "folder": out / "work", "quick": chosen.quick}
    shutil.rmtree(out / "work" / "runs", ignore_errors=True)
    left = make_rows(rows, results, place, began_s + chosen.seconds, again=chosen.again)
    seconds = round(time.monotonic() - began_s, 1)
    results.add(call_ended=_now(), seconds=seconds, left=left)
    failed = [row.name for _, row in rows if results.rows.get(row.name, {}).get("outcome") == "FAILED"]
    print(
        f"\n{seconds} s; {len(rows) - len(left)} of {len(rows)} rows made, {len(failed)} failed", flush=True
    )
    if left:
        print(f"left for another call: {', '.join(left)}", flush=True)
    return 1 if failed else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
