"""The steps of a DSA layer for a chunk of queries, on one device or its share.

    select_chunk   queries and index keys to the keys selected
    attend_chunk   queries, keys and a selection to outputs and divergences

Where heads are spread over devices, each works with the heads that it has, and
what is summed over heads is summed over devices too: outputs, the indexer's
scores in its loss, the mean of probabilities. What is selected is never summed
over devices: it is scored with all index heads in one place.

Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from dsa import costs, index_scan, losses, mesh, mla, quantization, streaming
from dsa import indexer as indexer_lib
from dsa.checks import check_count
from dsa.config import DSAConfig
from dsa.params import IndexerParams, MLAParams
from dsa.selection import Selection
from dsa.tokens import Keys, Tokens, all_visible

Stage = Literal["sparse", "dense_warmup"]
_STAGES = ("sparse", "dense_warmup")


class Options(NamedTuple):
  """What is static in an attention function.

  Attributes:
    config: The sizes and constants of the layer.
    backend: The attention kernel.
    stage: "sparse" or "dense_warmup".
    indexer_loss: Whether the indexer's loss is asked for.
    query_chunk_size: Queries that attend at once; None for the default.
    head_axes: Manual mesh axes that the attention heads are spread over.
    index_head_axes: Manual mesh axes that the index heads are spread over.
  """

  config: DSAConfig
  backend: mla.Backend
  stage: Stage
  indexer_loss: bool
  query_chunk_size: int | None
  head_axes: tuple[str, ...] = ()
  index_head_axes: tuple[str, ...] = ()


def make_options(
  config: DSAConfig,
  *,
  backend: mla.Backend,
  stage: Stage,
  indexer_loss: bool,
  query_chunk_size: int | None,
) -> Options:
  """Checks what is static in an attention function.

  Args:
    config: The sizes and constants of the layer.
    backend: The attention kernel.
    stage: "sparse" or "dense_warmup".
    indexer_loss: Whether the indexer's loss is asked for.
    query_chunk_size: Queries that attend at once; None for the default.

  Returns:
    The options, of a layer on one device.

  Raises:
    ValueError: If `stage` is unknown, `query_chunk_size` below 1, or a loss is
      asked for while `config.index_quantization` rounds the scores.
    TypeError: If `backend` is not a function or `query_chunk_size` no integer.
  """
  if not callable(backend):
    raise TypeError(
      f"backend must be a function, such as gather() makes, got {backend!r}"
    )
  if stage not in _STAGES:
    raise ValueError(f"stage must be one of {_STAGES}, got {stage!r}")
  if indexer_loss and config.index_quantization != "none":
    raise ValueError(
      "indexer_loss needs index_quantization='none', which is for inference, "
      f"got {config.index_quantization!r}"
    )
  if query_chunk_size is not None:
    query_chunk_size = check_count("query_chunk_size", query_chunk_size)
  return Options(config, backend, stage, indexer_loss, query_chunk_size)


def select_chunk(
  config: DSAConfig,
  num_keys: int,
  weights: tuple[MLAParams[jax.Array], IndexerParams[jax.Array]],
  keys: tuple[jax.Array | quantization.Blocks, jax.Array],
  tokens: Tokens,
  *,
  num_seen: bool = False,
) -> jax.Array:
  """Selects for a chunk of queries that follow one another.

  Args:
    config: The sizes, and how index keys are quantised.
    num_keys: S of the whole sequence, of which `keys` may be a prefix.
    weights: Of the attention and the indexer.
    keys: Index keys [B, S, D], and segment ids [B, S].
    tokens: The queries.
    num_seen: Whether to leave out, at run time, the keys after the last query.

  Returns:
    int32 [B, T, min(index_topk, num_keys)].
  """
  params, indexer = weights
  x, *known = tokens
  q_latent = index_scan.query_latent(params, x, config)
  return index_scan.select(
    indexer,
    index_scan.Tokens(x, q_latent, *known),
    *keys,
    jnp.max(tokens.order) + 1 if num_seen else None,
    config=config,
    # Early chunks are given fewer keys than later ones select.
    width=min(config.index_topk, num_keys),
  )


def attend(
  options: Options,
  weights: tuple[MLAParams[jax.Array], IndexerParams[jax.Array] | None],
  keys: Keys,
  queries: tuple[Tokens, Selection],
  *,
  causal: bool,
) -> tuple[jax.Array, jax.Array]:
  """Attends in chunks of queries.

  Args:
    options: Of the attention function.
    weights: Of the attention, and of the indexer where its loss is asked for.
    keys: Of the whole sequence.
    queries: Tokens that follow one another, and what they selected.
    causal: Whether the queries are the whole sequence, so that chunks may be
      given a prefix of the keys.

  Returns:
    [B, T, E] and each query's divergence, float32 [B, T].
  """
  (batch, num_queries, _), dtype = queries[0].x.shape, queries[0].x.dtype
  dense, num_keys = options.stage == "dense_warmup", keys.k_rope.shape[1]
  sizes = costs.layer_sizes(
    options.config,
    batch=batch,
    queries=num_queries,
    keys=num_keys,
    selected=num_keys if dense else queries[1].indices.shape[-1],
    heads=weights[0].wo.shape[0],
  )
  backend, chunk_size = backend_and_chunk(
    options.backend, sizes, dtype.itemsize, dense=dense
  )
  options = options._replace(backend=backend)
  out, divergences = streaming.map_chunks(
    functools.partial(attend_chunk, options),
    weights,
    keys,
    queries,
    chunk_size=options.query_chunk_size or chunk_size,
    causal=causal and (dense or reads_all_keys(backend)),
  )
  return out, divergences


def attend_chunk(
  options: Options,
  weights: tuple[MLAParams[jax.Array], IndexerParams[jax.Array] | None],
  keys: Keys,
  queries: tuple[Tokens, Selection],
) -> tuple[jax.Array, jax.Array]:
  """Attends for a chunk of queries that follow one another.

  Args:
    options: Of the attention function.
    weights: Of the attention, and of the indexer where its loss is asked for.
    keys: Of the whole sequence, or a prefix that all of the queries see.
    queries: The tokens, and what they selected.

  Returns:
    [B, T, E] and each query's divergence, float32 [B, T].
  """
  config = options.config
  params, indexer = weights
  tokens, attended = queries
  if options.stage == "dense_warmup":
    attended = all_visible(tokens, keys.segment_ids)
  q_latent = mla.query_latent(params, tokens.x, config)
  q_nope, q_rope = mla.mla_queries(params, q_latent, tokens.positions, config)
  w_uk, w_uv = mla.split_wkv_b(params, config)
  inputs = mla.MLAInputs(
    q_nope, q_rope, keys.kv_latent, keys.k_rope, w_uk, w_uv
  )
  if indexer is None or keys.index_keys is None:
    heads_out = options.backend(inputs, attended, scale=config.softmax_scale)
    divergences = jnp.zeros(tokens.order.shape, jnp.float32)
  else:
    heads_out, probs = mla.attend_with_probs(
      options.backend, inputs, attended, scale=config.softmax_scale
    )
    probs = mesh.mean_over(options.head_axes, probs)
    q, head_weights = _index_queries(indexer, q_latent, tokens, config)
    if options.stage == "dense_warmup":
      scores = indexer_lib.weighted_relu_scores(
        q, keys.index_keys, head_weights
      )
    else:
      scores = indexer_lib.selected_scores(
        q, keys.index_keys, head_weights, attended.indices
      )
    scores = mesh.sum_over(options.index_head_axes, scores)
    divergences = losses.indexer_kl(scores, probs, attended.indices >= 0)
  out = mla.output_projection(params, heads_out)
  return mesh.sum_over(options.head_axes, out), divergences


def _index_queries(
  params: IndexerParams[jax.Array],
  q_latent: jax.Array,
  tokens: Tokens,
  config: DSAConfig,
) -> tuple[jax.Array, jax.Array]:
  """Index queries [B, T, I, D] and head weights, float32 [B, T, I]."""
  q = indexer_lib.index_queries(params, q_latent, tokens.positions, config)
  return q, indexer_lib.index_head_weights(params, tokens.x, config)


def reads_all_keys(backend: mla.Backend) -> bool:
  """Whether a backend's cost grows with the number of keys."""
  return getattr(backend, "reads_all_keys", True)


def backend_and_chunk(
  backend: mla.Backend, sizes: costs.Sizes, itemsize: int, *, dense: bool
) -> tuple[mla.Backend, int]:
  """What a backend picks for some sizes, and how many queries it is given.

  Args:
    backend: The attention kernel.
    sizes: Of the attention, by letter, as `costs.layer_sizes` gives them.
    itemsize: Bytes of a number.
    dense: Whether queries attend to all that they see.

  Returns:
    The backend to run, and the queries that attend at once.
  """
  for_sizes = getattr(backend, "for_sizes", None)
  if for_sizes is not None:
    backend = for_sizes(sizes, itemsize)
  return backend, costs.query_chunk_size(
    sizes, itemsize=itemsize, reads_all_keys=dense or reads_all_keys(backend)
  )
