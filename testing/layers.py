"""The oracle's seeded layers, as the library takes them.

`oracle_params` undoes it, so that both work on the same rounded numbers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dsa
from testing import oracle, random_layer


class Layer(NamedTuple):
  """One layer and what it is given."""

  config: dsa.DSAConfig
  params: dsa.DSAParams[jax.Array]
  x: jax.Array  # [B, T, E]
  positions: jax.Array  # [B, T]


def layer(
  seed: int,
  *,
  batch: int = 2,
  length: int = 12,
  dtype: Any = jnp.float32,
  **changes: Any,
) -> Layer:
  """A `random_layer` in the library's types.

  Args:
    seed: of the numbers.
    batch: B.
    length: T.
    dtype: of the parameters, `weights_proj` excepted, and of x.
    **changes: fields of the oracle's `Config` that differ from the usual ones.
  """
  config = random_layer.CONFIG._replace(**changes)
  numbers = random_layer.random_layer(seed, config, batch=batch, length=length)
  indexer = dsa.IndexerParams(*(jnp.asarray(w, dtype) for w in numbers.indexer))
  weights_proj = jnp.asarray(numbers.indexer.weights_proj, jnp.float32)
  params = dsa.DSAParams(
    dsa.MLAParams(*(jnp.asarray(w, dtype) for w in numbers.mla)),
    indexer._replace(weights_proj=weights_proj),
  )
  return Layer(
    library_config(config),
    params,
    jnp.asarray(numbers.x, dtype),
    jnp.asarray(numbers.positions, jnp.int32),
  )


def library_config(config: oracle.Config) -> dsa.DSAConfig:
  """The oracle's configuration in the library's type."""
  rope = config.rope._asdict()
  del rope["mscale"]  # Equal to mscale_all_dim in every model.
  fields = config._asdict() | {"rope": dsa.RopeConfig(**rope)}
  return dsa.DSAConfig(num_hidden_layers=1, **fields)


def oracle_params(
  params: dsa.DSAParams[jax.Array],
) -> tuple[oracle.MLAParams, oracle.IndexerParams | None]:
  """The library's parameters in the oracle's types, float64."""
  mla = oracle.MLAParams(*(np.asarray(w, np.float64) for w in params.mla))
  if params.indexer is None:
    return mla, None
  indexer = (np.asarray(w, np.float64) for w in params.indexer)
  return mla, oracle.IndexerParams(*indexer)
