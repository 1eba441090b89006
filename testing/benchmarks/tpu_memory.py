"""Memory of DeepSeek-V3.2's layer on one TPU chip, compiled ahead of time.

    //testing/benchmarks:tpu_memory --seq_len=32768 --pass=gradient_with_loss

Needs libtpu and no TPU. Temporaries are what the compiled program needs beside
its arguments and results.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.experimental import topologies

import dsa
from dsa.examples import report
from testing.benchmarks import layer

_TOPOLOGY = flags.DEFINE_string("topology", "v5p:2x2x1", "Of which one chip.")
_SEQ_LEN = flags.DEFINE_list("seq_len", ["32768"], "Lengths, T = S.")
_PASS = flags.DEFINE_list("pass", ["forward"], f"Of {', '.join(layer.PASSES)}.")
_CHUNK = flags.DEFINE_integer("query_chunk_size", None, "Default: by shapes.")


def compile_for(
  device: jax.Device, seq_len: int, what: str
) -> jax.stages.Compiled:
  """Compiles one pass for a device that need not be there.

  Args:
    device: Of a topology description.
    seq_len: T = S.
    what: A name in `layer.PASSES`.

  Returns:
    The compiled program.
  """
  config = dsa.deepseek_v32()
  sharding = jax.sharding.SingleDeviceSharding(device)
  hidden = jax.ShapeDtypeStruct((1, seq_len, config.hidden_size), jnp.bfloat16)
  arguments = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    (dsa.abstract_params(config, jnp.bfloat16), hidden, hidden),
  )
  function = layer.layer_pass(
    config, dsa.backends.gather(), layer.PASSES[what], _CHUNK.value
  )
  return jax.jit(function).lower(*arguments).compile()


def main(argv: Sequence[str]) -> None:
  """Compiles the grid that the flags span and prints a table."""
  del argv
  topology = topologies.get_topology_desc(
    platform="tpu", topology_name=_TOPOLOGY.value
  )
  rows = []
  for seq_len in map(int, _SEQ_LEN.value):
    for what in _PASS.value:
      start = time.perf_counter()
      compiled = compile_for(topology.devices[0], seq_len, what)
      analysis: Any = compiled.memory_analysis()
      rows.append(
        (
          layer.PASSES[what],
          f"{seq_len:,}",
          report.format_bytes(report.temporary_bytes(compiled)),
          report.format_bytes(analysis.argument_size_in_bytes),
          report.format_seconds(time.perf_counter() - start),
        )
      )
      report.progress("  ".join(rows[-1]))
  header = ("pass", "S", "temporary", "arguments", "compiled in")
  print(report.format_table(header, rows))


if __name__ == "__main__":
  app.run(main)
