"""A function's results for several arguments, computed by forked processes.

They inherit the function with all that it refers to, so only arguments and results are sent. A fork of a process
with threads that hold locks may hang, so no caller forks by default.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")
_inherited: list[Callable[..., Any]] = []


def forked(
    function: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], processes: int
) -> list[Result]:
    """Return the result of a function for each tuple of arguments, in their order.

    Args:
        function: function of a tuple's values; it needs not be picklable.
        arguments: tuples of picklable values.
        processes: number of processes; 1: none is forked.
    """
    processes = min(processes, len(arguments))
    if processes <= 1:
        return [function(*each) for each in arguments]
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, _begin, (function,)) as pool:
        try:
            return list(pool.map(_call, arguments))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(function: Callable[..., Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted as well, and ends the pool
    _inherited.append(function)


def _call(arguments: tuple[Any, ...]) -> Any:
    return _inherited[-1](*arguments)
