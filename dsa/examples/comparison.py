"""Runs one layer with several backends and says what each took."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dsa
from dsa.examples import report

# What the others are held against.
REFERENCE = "dot_product"

_TIMING_BUDGET_S = 1.5

Backends = Mapping[str, Callable[[], dsa.Backend]]


class Measurement(NamedTuple):
  """What a backend answered and took.

  Attributes:
    backend: Its name.
    compile_s: Seconds to trace and compile the layer.
    median_s: Median seconds of a call.
    temporary: Bytes of temporary memory, None where unknown.
    result: The layer's answer.
  """

  backend: str
  compile_s: float
  median_s: float
  temporary: int | None
  result: dsa.AttentionResult


def compile_layer(
  backend: dsa.Backend,
  config: dsa.DSAConfig,
  params: dsa.DSAParams[jax.Array],
  x: jax.Array,
) -> jax.stages.Compiled:
  """Compiles a layer ahead of time.

  Args:
    backend: The attention kernel.
    config: The sizes.
    params: The weights.
    x: Hidden states [B, S, E].

  Returns:
    The compiled function of (params, x).

  Raises:
    MemoryError: If it needs more memory than the device has in all.
    NotImplementedError: If the backend does not run here.
  """
  attention = dsa.make_attention(config, backend=backend)
  compiled = jax.jit(attention).lower(params, x).compile()
  needed = report.temporary_bytes(compiled)
  present = report.device_memory_bytes(jax.devices()[0])
  if needed is not None and present is not None and needed > present:
    raise MemoryError(
      f"{x.shape[1]:,} tokens need {report.format_bytes(needed)} of memory, "
      f"there are {report.format_bytes(present)}"
    )
  return compiled


def compare(
  backends: Backends,
  config: dsa.DSAConfig,
  params: dsa.DSAParams[jax.Array],
  x: jax.Array,
  *,
  skip_refusals: bool,
) -> tuple[list[Measurement], dsa.AttentionResult]:
  """Measures a layer with each backend.

  Args:
    backends: Factories by name.
    config: The sizes.
    params: The weights.
    x: Hidden states [B, S, E].
    skip_refusals: Leave out, with a word on stderr, what raises
      NotImplementedError.

  Returns:
    The measurements in order, and the result of `REFERENCE`, which runs once
    more where it is not among the backends.

  Raises:
    MemoryError: If a layer needs more memory than the device has.
    NotImplementedError: If a backend does not run here.
  """
  measurements = []
  reference = None
  for name, factory in backends.items():
    try:
      measurement = _measure(name, factory(), config, params, x)
    except NotImplementedError as error:
      if not skip_refusals:
        raise NotImplementedError(f"{name}: {error}") from error
      report.progress(f"{name}: does not run here: {error}")
      continue
    measurements.append(measurement)
    if name == REFERENCE:
      reference = measurement.result
  if reference is None:
    report.progress(f"{REFERENCE}: running it to compare with ...")
    definition = dsa.backends.dot_product()
    reference = compile_layer(definition, config, params, x)(params, x)
  return measurements, reference


def attended_share(selection: dsa.Selection) -> float:
  """Selected pairs of query and key by visible ones, of whole sequences."""
  batch, tokens, _ = selection.indices.shape
  selected = np.count_nonzero(np.asarray(selection.indices) >= 0)
  return selected / (batch * tokens * (tokens + 1) / 2)


def write_table(
  measurements: Sequence[Measurement], reference: dsa.AttentionResult
) -> str:
  """A line a backend, under the names of the columns.

  Args:
    measurements: What was measured.
    reference: The answer that the others are held against.

  Returns:
    Lines of text.
  """
  header = (
    "backend",
    "compile",
    "median time",
    "temp memory",
    "difference",
    "attended",
  )
  rows = []
  for each in measurements:
    difference = float(jnp.max(jnp.abs(each.result.out - reference.out)))
    rows.append(
      (
        each.backend,
        report.format_seconds(each.compile_s),
        report.format_seconds(each.median_s),
        report.format_bytes(each.temporary),
        f"{difference:.1e}" if difference else "0",
        f"{attended_share(each.result.selection):.1%}",
      )
    )
  return report.format_table(header, rows)


def _measure(
  name: str,
  backend: dsa.Backend,
  config: dsa.DSAConfig,
  params: dsa.DSAParams[jax.Array],
  x: jax.Array,
) -> Measurement:
  report.progress(f"{name}: compiling ...")
  start = time.perf_counter()
  compiled = compile_layer(backend, config, params, x)
  compile_s = time.perf_counter() - start
  report.progress(f"{name}: running ...")
  start = time.perf_counter()
  result = report.wait_for(compiled(params, x))
  first = report.format_seconds(time.perf_counter() - start)
  report.progress(f"{name}: timing, the first run took {first} ...")
  median_s = report.median_seconds(
    lambda: compiled(params, x), budget_s=_TIMING_BUDGET_S
  )
  temporary = report.temporary_bytes(compiled)
  return Measurement(name, compile_s, median_s, temporary, result)
