"""Measuring a compiled function, and writing numbers for a person to read."""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def progress(message: str) -> None:
  """Shows a person, on stderr, that something happens."""
  print(message, file=sys.stderr, flush=True)


def wait_for[Arrays](arrays: Arrays) -> Arrays:
  """Returns a tree of arrays once their values are there."""
  return jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]


def median_seconds(
  function: Callable[[], Any],
  *,
  budget_s: float,
  min_runs: int = 3,
  max_runs: int = 50,
) -> float:
  """Median wall time of a function that was called before.

  Args:
    function: Returns arrays, whose values are waited for.
    budget_s: No run starts after this many seconds,
    min_runs: except that there are at least so many
    max_runs: and at most so many.

  Returns:
    Seconds.
  """
  runs: list[float] = []
  start = time.perf_counter()
  while len(runs) < max_runs:
    before = time.perf_counter()
    if len(runs) >= min_runs and before - start > budget_s:
      break
    wait_for(function())
    runs.append(time.perf_counter() - before)
  return statistics.median(runs)


def temporary_bytes(compiled: jax.stages.Compiled) -> int | None:
  """Memory that a compiled function needs beside its arguments and results.

  Args:
    compiled: From `jax.jit(function).lower(...).compile()`.

  Returns:
    Bytes, or None where the platform does not say.
  """
  analysis = compiled.memory_analysis()
  return None if analysis is None else analysis.temp_size_in_bytes


def device_memory_bytes(device: jax.Device) -> int | None:
  """How much memory a device has in all.

  Args:
    device: One of `jax.devices()`.

  Returns:
    Bytes, or None where it is not known.
  """
  if device.platform == "cpu":
    if not hasattr(os, "sysconf"):
      return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return (device.memory_stats() or {}).get("bytes_limit")


def format_bytes(count: int | None) -> str:
  """Three digits and a binary unit: 39738368 is "37.9 MiB"."""
  if count is None:
    return "unknown"
  if count < 1024:
    return f"{count} B"
  size = float(count)
  for unit in ("KiB", "MiB", "GiB"):
    size /= 1024
    if size < 1024:
      return f"{_three_digits(size)} {unit}"
  return f"{_three_digits(size / 1024)} TiB"


def format_seconds(seconds: float) -> str:
  """Three digits and a unit: 0.4012 is "401 ms"."""
  for unit, size in (("s", 1.0), ("ms", 1e-3)):
    if seconds >= size:
      return f"{_three_digits(seconds / size)} {unit}"
  return f"{_three_digits(seconds / 1e-6)} us"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Columns under their names, the first to the left and others to the right.

  Args:
    header: A name for each column.
    rows: As many cells each.

  Returns:
    Lines without trailing spaces, the header first.
  """
  lines = [header, *rows]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

  def write(cells: Sequence[str]) -> str:
    first = cells[0].ljust(widths[0])
    others = map(str.rjust, cells[1:], widths[1:])
    return "  ".join((first, *others)).rstrip()

  return "\n".join(map(write, lines))


def _three_digits(number: float) -> str:
  if number == 0:
    return "0"
  decimals = 2 - math.floor(math.log10(number))
  return f"{number:,.{min(max(decimals, 0), 2)}f}"
