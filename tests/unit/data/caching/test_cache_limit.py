from pathlib import Path

import pytest
import torch

from polyrhythm.data.cached_split import CacheLimit, free_bytes
from polyrhythm.errors import RequestError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("none", 0),
        ("0", 0),
        ("1000", 1000),
        ("4GB", 4 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("500mb", 500 * 10**6),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert CacheLimit.parse(text).on(torch.device("cpu")) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "4 parsecs", "auto 3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="give auto, none, or bytes"):
        CacheLimit.parse(text)


def system(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_what_is_free_is_what_the_host_and_the_control_group_leave(tmp_path: Path) -> None:
    told = {"proc__meminfo": "MemTotal: 4000 kB\nMemFree: 1 kB\nMemAvailable: 3000 kB\n"}
    assert free_bytes(system(tmp_path, **told)) == 3000 << 10
    group = {"sys__fs__cgroup__memory_dot_max": "max\n", "sys__fs__cgroup__memory_dot_current": "1000000\n"}
    assert free_bytes(system(tmp_path, **group)) == 3000 << 10
    limited = {"sys__fs__cgroup__memory_dot_max": "1500000\n"}
    assert free_bytes(system(tmp_path, **limited)) == 500_000


def test_nothing_is_free_where_nobody_says_so(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) == 0


def test_auto_takes_half_of_what_is_free() -> None:
    found = CacheLimit.parse("auto").on(torch.device("cpu"))
    assert found == pytest.approx(free_bytes() / 2, rel=0.5)  # others take and give back memory meanwhile
