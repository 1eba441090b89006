"""What fp8 changes in a cached DSA layer, and the memory that it saves.

    //testing/benchmarks:quantization --seq_len=4096 --topk=512

For each format of index keys and latents it prints bytes a token in the cache,
the error of latents and of the layer's output against a cache in --dtype, as a
share of their norm, and how many of the selected keys are still selected. The
weights are random: keys score closer to one another than in a trained indexer,
so that more of them change places.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from absl import app, flags

import dsa
from dsa.config import Quantization
from dsa.examples import report
from testing.benchmarks import layer

_SEQ_LEN = flags.DEFINE_integer("seq_len", 2048, "Tokens in the cache.")
_TOPK = flags.DEFINE_integer("topk", 512, "Keys that a query selects.")
_DTYPE = flags.DEFINE_enum(
  "dtype", "bfloat16", ["bfloat16", "float32"], "Of x."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of weights and x.")


class Figure(NamedTuple):
  """What one pair of formats changes; errors are shares of a norm."""

  index_quantization: Quantization
  kv_quantization: Quantization
  bytes_a_token: int
  latent_error: float
  out_error: float
  still_selected: float


def served(
  config: dsa.DSAConfig, params: dsa.DSAParams[jax.Array], x: jax.Array
) -> dsa.CachedResult:
  """Prefills an empty cache with x in one call."""
  serve = dsa.make_cached_attention(config, backend=dsa.backends.gather())
  batch_size, length, _ = x.shape
  cache = dsa.init_cache(config, batch_size, length, x.dtype)
  result: dsa.CachedResult = jax.jit(serve)(params, x, cache)
  return result


def measure(
  config: dsa.DSAConfig,
  params: dsa.DSAParams[jax.Array],
  x: jax.Array,
  plain: dsa.CachedResult,
) -> Figure:
  """Compares a quantised cache to a plain one.

  Args:
    config: With its quantisation.
    params: Of the layer.
    x: Hidden states [B, T, E].
    plain: What a plain cache answered.

  Returns:
    The figures.
  """
  result = served(config, params, x)
  latent = dsa.quantization.restored_latents(
    result.cache.kv_latent, jnp.dtype(jnp.float32)
  )
  num_keys = x.shape[1]
  wanted = plain.selection.mask(num_keys)
  both = jnp.sum(wanted & result.selection.mask(num_keys))
  return Figure(
    config.index_quantization,
    config.kv_quantization,
    sum(
      buffer.nbytes // buffer.shape[0] // buffer.shape[1]
      for buffer in jax.tree.leaves(result.cache[:3])
    ),
    _error(latent, plain.cache.kv_latent),
    _error(result.out, plain.out),
    float(both / jnp.sum(wanted)),
  )


def _error(actual: Any, wanted: Any) -> float:
  actual, wanted = (jnp.asarray(x, jnp.float32) for x in (actual, wanted))
  return float(jnp.linalg.norm(actual - wanted) / jnp.linalg.norm(wanted))


def main(argv: Sequence[str]) -> None:
  """Measures every pair of formats and prints a table."""
  del argv
  config = layer.small_config(_TOPK.value)
  params_key, x_key = jax.random.split(jax.random.key(_SEED.value))
  params = dsa.init_params(params_key, config, jnp.dtype(_DTYPE.value))
  x = jax.random.normal(
    x_key, (1, _SEQ_LEN.value, config.hidden_size), _DTYPE.value
  )
  plain = served(config, params, x)
  rows = []
  formats = get_args(Quantization)
  for index_quantization, kv_quantization in itertools.product(
    formats, formats
  ):
    quantized = dataclasses.replace(
      config,
      index_quantization=index_quantization,
      kv_quantization=kv_quantization,
    )
    figure = measure(quantized, params, x, plain)
    rows.append(
      (
        figure.index_quantization,
        figure.kv_quantization,
        f"{figure.bytes_a_token:,}",
        f"{figure.latent_error:.2%}",
        f"{figure.out_error:.2%}",
        f"{figure.still_selected:.1%}",
      )
    )
    report.progress("  ".join(rows[-1]))
  header = (
    "index keys",
    "latents",
    "bytes a token",
    "error of latents",
    "error of output",
    "keys still selected",
  )
  print(report.format_table(header, rows))


if __name__ == "__main__":
  app.run(main)
