"""Times one cached DSA layer: decode steps, their parts, and chunked prefill.

    //testing/benchmarks:decode --batch=1,8 --seq_len=8192,32768 --topk=512

For each length S of a full cache it prints the median time of a step, tokens a
second and the temporary memory that the compiled program needs: of the step,
of its attention alone (a layer that is given its selection), and of dense
attention over the same cache, in the fastest form known (dense_step.py). Then
the same for a prefill of --prefill tokens: one pass of `dsa.make_attention`,
and the cached layer in chunks of --prefill_chunk.
"""

import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags

import dsa
from dsa.examples import report
from testing.benchmarks import dense_step, layer

_BATCH = flags.DEFINE_list("batch", ["1", "8"], "Rows.")
_SEQ_LEN = flags.DEFINE_list(
  "seq_len", ["8192", "32768", "65536"], "Lengths of the cache."
)
_TOPK = flags.DEFINE_integer("topk", 512, "Keys that a query selects.")
_RUNS = flags.DEFINE_integer("runs", 15, "Timed steps, of which the median.")
_PREFILL = flags.DEFINE_integer("prefill", 8192, "Tokens; 0 for none.")
_PREFILL_CHUNK = flags.DEFINE_list("prefill_chunk", ["1024"], "Tokens a call.")
_PREFILL_RUNS = flags.DEFINE_integer("prefill_runs", 3, "Timed prefills.")
_JSON = flags.DEFINE_string("json", None, "File to write the figures to.")


class Figure(NamedTuple):
  """One row of the table.

  Attributes:
    what: The step or the pass.
    batch: B.
    length: S, keys of a step or tokens of a prefill.
    tokens: Tokens that it takes, of all rows.
    seconds: The median.
    temporary_bytes: Of the compiled program, where the platform says.
    ratio: Time of what it is compared with by its own; None for that itself.
  """

  what: str
  batch: int
  length: int
  tokens: int
  seconds: float
  temporary_bytes: int | None
  ratio: float | None = None


def full_cache(config: dsa.DSAConfig, batch: int, length: int) -> dsa.Cache:
  """A cache of random numbers with room for one more token a row."""
  cache = dsa.init_cache(config, batch, length)
  keys = jax.random.split(jax.random.key(3), 3)
  buffers = cache.kv_latent, cache.k_rope, cache.index_keys
  latent, k_rope, index_keys = (
    jax.random.normal(key, buffer.shape)
    for key, buffer in zip(keys, buffers, strict=True)
    if isinstance(buffer, jax.Array)
  )
  return cache._replace(
    kv_latent=latent,
    k_rope=k_rope,
    index_keys=index_keys,
    length=jnp.full(batch, length - 1, jnp.int32),
  )


def random_selection(batch: int, length: int, topk: int) -> dsa.Selection:
  """Keys of a token in each row, other ones in each row."""
  keys = jax.random.split(jax.random.key(4), batch)
  order = jax.vmap(lambda key: jax.random.permutation(key, length))(keys)
  chosen = jnp.sort(order[:, None, :topk], axis=-1)
  return dsa.Selection(chosen.astype(jnp.int32))


def time_step(
  step: Callable[..., tuple[jax.Array, dsa.Cache]],
  params: dsa.DSAParams[jax.Array],
  x: jax.Array,
  cache: dsa.Cache,
) -> tuple[float, int | None]:
  """Median seconds of a step, the cache donated, and its temporary memory."""

  def repeatable(
    params: dsa.DSAParams[jax.Array], x: jax.Array, cache: dsa.Cache
  ) -> tuple[jax.Array, dsa.Cache]:
    out, after = step(params, x, cache)
    return out, after._replace(length=cache.length)

  compiled = (
    jax.jit(repeatable, donate_argnums=2).lower(params, x, cache).compile()
  )
  state = [cache]

  def run() -> jax.Array:
    out, state[0] = compiled(params, x, state[0])
    return out

  report.wait_for(run())
  seconds = report.median_seconds(
    run, budget_s=0.0, min_runs=_RUNS.value, max_runs=_RUNS.value
  )
  return seconds, report.temporary_bytes(compiled)


def decode_figures(
  config: dsa.DSAConfig,
  params: dsa.DSAParams[jax.Array],
  batch: int,
  length: int,
) -> list[Figure]:
  """The step, its attention alone, and dense attention, at one length."""
  serve = dsa.make_cached_attention(config, backend=dsa.backends.gather())
  x = jax.random.normal(jax.random.key(2), (batch, 1, config.hidden_size))
  selection = random_selection(batch, length, config.index_topk)

  def select_and_attend(
    params: dsa.DSAParams[jax.Array], x: jax.Array, cache: dsa.Cache
  ) -> tuple[jax.Array, dsa.Cache]:
    result = serve(params, x, cache)
    return result.out, result.cache

  def attend(
    params: dsa.DSAParams[jax.Array], x: jax.Array, cache: dsa.Cache
  ) -> tuple[jax.Array, dsa.Cache]:
    result = serve(params._replace(indexer=None), x, cache, selection=selection)
    return result.out, result.cache

  steps: dict[str, Callable[..., tuple[jax.Array, dsa.Cache]]] = {
    "dense step": functools.partial(dense_step.dense_step, config),
    "step": select_and_attend,
    "its attention": attend,
  }
  figures: list[Figure] = []
  for what, step in steps.items():
    report.progress(f"{what}, batch {batch}, S {length:,} ...")
    seconds, temporary = time_step(
      step, params, x, full_cache(config, batch, length)
    )
    ratio = figures[0].seconds / seconds if figures else None
    figures.append(
      Figure(what, batch, length, batch, seconds, temporary, ratio)
    )
  return figures


def prefill_figures(
  config: dsa.DSAConfig,
  params: dsa.DSAParams[jax.Array],
  batch: int,
  length: int,
  chunks: Sequence[int],
) -> list[Figure]:
  """One pass without a cache, and the cached layer in chunks.

  The passes take turns, so that a slower minute of the machine slows all.
  """
  x = jax.random.normal(jax.random.key(2), (batch, length, config.hidden_size))
  runs: dict[str, tuple[Callable[[], Any], int | None]] = {}
  attention = dsa.make_attention(config, backend=dsa.backends.gather())
  one_pass = jax.jit(attention).lower(params, x).compile()
  runs["one pass"] = (
    functools.partial(one_pass, params, x),
    report.temporary_bytes(one_pass),
  )
  for chunk in chunks:
    if length % chunk:
      raise app.UsageError(f"--prefill_chunk must divide {length}: {chunk}")
    runs[f"chunks of {chunk:,}"] = chunked_prefill(config, params, x, chunk)
  seconds: dict[str, list[float]] = {what: [] for what in runs}
  for what, (run, _) in runs.items():
    report.progress(f"prefill, batch {batch}, {what} ...")
    report.wait_for(run())
  for _ in range(_PREFILL_RUNS.value):
    for what, (run, _) in runs.items():
      start = time.perf_counter()
      report.wait_for(run())
      seconds[what].append(time.perf_counter() - start)
  medians = {what: statistics.median(times) for what, times in seconds.items()}
  return [
    Figure(
      what,
      batch,
      length,
      batch * length,
      median,
      runs[what][1],
      None if what == "one pass" else medians["one pass"] / median,
    )
    for what, median in medians.items()
  ]


def chunked_prefill(
  config: dsa.DSAConfig,
  params: dsa.DSAParams[jax.Array],
  x: jax.Array,
  chunk: int,
) -> tuple[Callable[[], Any], int | None]:
  """A function that fills an empty cache, and its temporary memory."""
  batch, length, _ = x.shape
  serve = jax.jit(
    dsa.make_cached_attention(config, backend=dsa.backends.gather()),
    donate_argnums=2,
  )
  pieces = [x[:, i : i + chunk] for i in range(0, length, chunk)]
  compiled = serve.lower(
    params, pieces[0], dsa.init_cache(config, batch, length)
  ).compile()

  def run() -> list[jax.Array]:
    cache, outs = dsa.init_cache(config, batch, length), []
    for piece in pieces:
      result = compiled(params, piece, cache)
      cache = result.cache
      outs.append(result.out)
    return outs

  return run, report.temporary_bytes(compiled)


def write_table(figures: Sequence[Figure]) -> str:
  """The figures, each beside how many times as fast it is."""
  header = (
    "what",
    "batch",
    "S",
    "time",
    "tokens/s",
    "temporary",
    "times as fast",
  )
  rows = [
    (
      figure.what,
      str(figure.batch),
      f"{figure.length:,}",
      report.format_seconds(figure.seconds),
      f"{figure.tokens / figure.seconds:,.0f}",
      report.format_bytes(figure.temporary_bytes),
      "" if figure.ratio is None else f"{figure.ratio:.2f}",
    )
    for figure in figures
  ]
  return report.format_table(header, rows)


def main(argv: Sequence[str]) -> None:
  """Measures the grid that the flags span."""
  del argv
  config = layer.small_config(_TOPK.value)
  params = dsa.init_params(jax.random.key(1), config)
  figures = []
  for batch in map(int, _BATCH.value):
    for length in map(int, _SEQ_LEN.value):
      figures += decode_figures(config, params, batch, length)
  if _PREFILL.value:
    chunks = [int(chunk) for chunk in _PREFILL_CHUNK.value]
    figures += prefill_figures(config, params, 1, _PREFILL.value, chunks)
  print(write_table(figures))
  if _JSON.value:
    rows = [figure._asdict() for figure in figures]
    Path(_JSON.value).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
  app.run(main)
