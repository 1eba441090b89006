"""Times one DSA layer: backends, lengths and passes, in one process.

    //testing/benchmarks:attention --seq_len=4096,8192 --topk=512

For each it prints the median seconds, the temporary memory that the compiled
program needs, the arithmetic that the definition needs (see work.py), and the
share that this makes of the rate at which this machine multiplies matrices,
measured in the same run. With --peer=transformers the same layer of that
package runs on torch in a process of its own, right before.
"""

import functools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags

import dsa
from dsa.examples import report
from testing.benchmarks import chart, layer, peer, work

_BACKENDS = {
  "auto": dsa.backends.auto,
  "dot_product": dsa.backends.dot_product,
  "gather": dsa.backends.gather,
  "tokamax_flash": dsa.backends.tokamax_flash,
}
_BACKEND = flags.DEFINE_list("backend", ["gather", "dot_product"], "Which.")
_SEQ_LEN = flags.DEFINE_list("seq_len", ["2048", "4096"], "Lengths, T = S.")
_TOPK = flags.DEFINE_list("topk", ["512"], "Keys that a query selects.")
_PASS = flags.DEFINE_list("pass", ["forward"], f"Of {', '.join(layer.PASSES)}.")
_RUNS = flags.DEFINE_integer("runs", 3, "Timed runs, of which the median.")
_CHUNK = flags.DEFINE_integer("query_chunk_size", None, "Default: by shapes.")
_MEMORY_ONLY = flags.DEFINE_bool("memory_only", False, "Compile, do not run.")
_JSON = flags.DEFINE_string("json", None, "File to write the figures to.")
_PLOT = flags.DEFINE_string("plot", None, "PNG of time and memory by length.")
_PEER = flags.DEFINE_enum("peer", None, ["transformers"], "Peer to compare to.")
_PEER_PYTHON = flags.DEFINE_string(
  "peer_python", sys.executable, "Python that has torch and transformers."
)


class Figure(NamedTuple):
  """One row of the table; seconds are None where nothing was run."""

  backend: str
  seq_len: int
  topk: int
  what: str
  seconds: float | None
  temporary_bytes: int | None
  gflop: float
  matmul_share: float | None


def matmul_rate(size: int = 2048) -> float:
  """Operations a second of a float32 matrix product on this machine."""
  matrix = jax.random.normal(jax.random.key(0), (size, size))
  multiply = jax.jit(jnp.matmul)
  report.wait_for(multiply(matrix, matrix))
  seconds = report.median_seconds(
    functools.partial(multiply, matrix, matrix), budget_s=1.0, min_runs=5
  )
  return 2 * size**3 / seconds


def measure(
  backend: str, seq_len: int, topk: int, what: work.Pass, rate: float
) -> Figure:
  """Compiles one pass and, unless only memory is asked for, times it."""
  config = layer.small_config(topk)
  params = dsa.init_params(jax.random.key(1), config)
  x, cotangent = jax.random.normal(
    jax.random.key(2), (2, 1, seq_len, config.hidden_size)
  )
  function = layer.layer_pass(config, _BACKENDS[backend](), what, _CHUNK.value)
  compiled = jax.jit(function).lower(params, x, cotangent).compile()
  operations = work.operations(config, seq_len, what)
  seconds = share = None
  if not _MEMORY_ONLY.value:
    run = functools.partial(compiled, params, x, cotangent)
    report.wait_for(run())
    seconds = report.median_seconds(
      run, budget_s=0.0, min_runs=_RUNS.value, max_runs=_RUNS.value
    )
    share = operations / seconds / rate
  return Figure(
    backend=backend,
    seq_len=seq_len,
    topk=topk,
    what=what,
    seconds=seconds,
    temporary_bytes=report.temporary_bytes(compiled),
    gflop=operations / 1e9,
    matmul_share=share,
  )


def write_table(figures: Sequence[Figure], peers: Sequence[Figure]) -> str:
  """The figures, and how many times as fast as the peer's best each is."""
  best: dict[tuple[int, int, str], float] = {}
  for figure in peers:
    key = figure.seq_len, figure.topk, figure.what
    seconds = figure.seconds or math.inf
    best[key] = min(best.get(key, math.inf), seconds)
  header = "backend S topk pass time temporary GFLOP of-matmul".split()
  if peers:
    header.append("peer/this")
  rows = []
  for figure in (*peers, *figures):
    row = [
      figure.backend,
      f"{figure.seq_len:,}",
      str(figure.topk),
      figure.what,
      "-" if figure.seconds is None else report.format_seconds(figure.seconds),
      report.format_bytes(figure.temporary_bytes),
      f"{figure.gflop:,.0f}",
      "-" if figure.matmul_share is None else f"{figure.matmul_share:.0%}",
    ]
    if peers:
      seconds = best.get((figure.seq_len, figure.topk, figure.what), math.nan)
      ratio = seconds / (figure.seconds or math.nan)
      row.append("-" if math.isnan(ratio) else f"{ratio:.2f}")
    rows.append(row)
  return report.format_table(header, rows)


def run_peer(seq_len: int, topk: int, what: str, rate: float) -> list[Figure]:
  """The peer's rows at one point: eager and sdpa."""
  config = layer.small_config(topk)
  operations = work.operations(config, seq_len, layer.PASSES[what])
  figures = []
  for implementation in ("eager", "sdpa"):
    answer = peer.time_transformers(
      _PEER_PYTHON.value,
      config,
      seq_len=seq_len,
      implementation=implementation,
      gradient=what != "forward",
      runs=_RUNS.value,
    )
    figures.append(
      Figure(
        backend=f"transformers {implementation}",
        seq_len=seq_len,
        topk=topk,
        what=layer.PASSES[what],
        seconds=answer.seconds,
        temporary_bytes=answer.peak_bytes,
        gflop=operations / 1e9,
        matmul_share=operations / answer.seconds / rate,
      )
    )
  return figures


def main(argv: Sequence[str]) -> None:
  """Measures the grid that the flags span."""
  del argv
  if _PLOT.value:
    chart.require_matplotlib()
  for name in _BACKEND.value:
    if name not in _BACKENDS:
      raise app.UsageError(f"--backend must be of {list(_BACKENDS)}: {name}")
  for name in _PASS.value:
    if name not in layer.PASSES:
      raise app.UsageError(f"--pass must be of {list(layer.PASSES)}: {name}")
  rate = matmul_rate()
  report.progress(f"Matrix products run at {rate / 1e9:,.0f} GFLOP/s here.")
  figures, peers = [], []
  for seq_len in map(int, _SEQ_LEN.value):
    for topk in map(int, _TOPK.value):
      for what in _PASS.value:
        if _PEER.value and what != "gradient_with_loss":
          report.progress(f"{_PEER.value}, S {seq_len:,}, {what} ...")
          peers += run_peer(seq_len, topk, what, rate)
        for backend in _BACKEND.value:
          report.progress(f"{backend}, S {seq_len:,}, topk {topk}, {what} ...")
          figures.append(
            measure(backend, seq_len, topk, layer.PASSES[what], rate)
          )
  print(write_table(figures, peers))
  if _JSON.value:
    rows = [figure._asdict() for figure in (*peers, *figures)]
    answer = {"matmul_gflops": rate / 1e9, "figures": rows}
    Path(_JSON.value).write_text(json.dumps(answer, indent=2) + "\n")
  if _PLOT.value:
    chart.draw([f._asdict() for f in (*peers, *figures)], Path(_PLOT.value))


if __name__ == "__main__":
  app.run(main)
