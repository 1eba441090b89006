"""Selects keys so that no bit depends on how a sequence is cut into calls.

    q_latent, q, w, k = projections of the tokens      in blocks of _ROWS tokens
    scores  = sum_i w_i relu(q_i . k)                  in tiles of keys
    indices = top-k of the visible keys

The bits of a matrix product depend on its shape: libraries choose the order of
a sum by the number of rows. So projections run on blocks of one shape, however
many tokens there are. Scores of few queries are a batch of products, one for
each group of keys, which are summed as those of many queries are.

Whole sequences and cached ones are scanned by the same code. The cost follows
the keys that are there, a traced number, not the length of their buffer.

Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp

from dsa import indexer as indexer_lib
from dsa import mesh, mla, quantization, streaming
from dsa import selection as selection_lib
from dsa.config import DSAConfig
from dsa.params import IndexerParams, MLAParams

# Queries that are scored at once: enough to fill a matrix unit.
QUERY_CHUNK = 128

# Tokens that are projected at once, those of all batch rows together.
_ROWS = 64

# Rows of a product, index heads times queries, below which it is cut into
# groups of keys, and the keys of a group.
_FEW_ROWS, _FEWEST_ROWS = 64, 8
_GROUP = 128

# Bytes of a tile of keys.
_TILE_BYTES = 16 << 20

# Keys in the smallest buffer of scores; each larger one has twice as many.
_SMALLEST_PREFIX = 1024


class Tokens(NamedTuple):
  """Tokens that select.

  Attributes:
    x: Hidden states [B, T, E].
    q_latent: [B, T, L], from `query_latent`.
    positions: Integers [B, T], for RoPE alone.
    segment_ids: Integers [B, T], 0 for padding.
    order: int32 [B, T], each token's index among the keys.
  """

  x: jax.Array
  q_latent: jax.Array
  positions: jax.Array
  segment_ids: jax.Array
  order: jax.Array


def query_latent(
  params: MLAParams[jax.Array], x: jax.Array, config: DSAConfig
) -> jax.Array:
  """`mla.query_latent`, the same bits however many tokens there are.

  Args:
    params: Weights of the attention.
    x: Hidden states [B, T, E].
    config: The sizes.

  Returns:
    [B, T, L].
  """
  return _in_row_blocks(_latent_rows, config, params, x)


def index_keys(
  params: IndexerParams[jax.Array],
  x: jax.Array,
  positions: jax.Array,
  config: DSAConfig,
) -> jax.Array | quantization.Blocks:
  """Index keys as they are scanned, the same bits however many there are.

  Args:
    params: Weights of the indexer.
    x: Hidden states [B, S, E].
    positions: Integers [B, S].
    config: The sizes, the layout of RoPE, and how keys are quantised.

  Returns:
    [B, S, D].
  """
  return _in_row_blocks(_key_rows, config, params, (x, positions))


def index_queries(
  params: IndexerParams[jax.Array],
  x: jax.Array,
  q_latent: jax.Array,
  positions: jax.Array,
  config: DSAConfig,
) -> tuple[jax.Array, jax.Array]:
  """Index queries and head weights, the same bits however many there are.

  Args:
    params: Weights of the indexer.
    x: Hidden states [B, T, E].
    q_latent: [B, T, L], from `query_latent`.
    positions: Integers [B, T].
    config: The sizes, the layout of RoPE, and how keys are quantised.

  Returns:
    [B, T, I, D] and float32 [B, T, I], as `scan` takes them.
  """
  tokens = x, q_latent, positions
  return _in_row_blocks(_query_rows, config, params, tokens)


def kv_latents(
  params: MLAParams[jax.Array],
  x: jax.Array,
  positions: jax.Array,
  config: DSAConfig,
) -> tuple[jax.Array, jax.Array]:
  """`mla.kv_latents`, the same bits however many tokens there are.

  Args:
    params: Weights of the attention.
    x: Hidden states [B, S, E].
    positions: Integers [B, S].
    config: The sizes.

  Returns:
    kv_latent [B, S, C] and k_rope [B, S, R].
  """
  return _in_row_blocks(_latent_key_rows, config, params, (x, positions))


@functools.partial(jax.jit, static_argnames=("config", "width"))
def select(
  params: IndexerParams[jax.Array],
  tokens: Tokens,
  keys: jax.Array | quantization.Blocks,
  key_segment_ids: jax.Array,
  num_keys: jax.Array | None = None,
  *,
  config: DSAConfig,
  width: int,
) -> jax.Array:
  """Scores the visible keys of a chunk of queries and keeps the best.

  Args:
    params: Weights of the indexer.
    tokens: The queries, B * T few enough that [B, T, S] may be held.
    keys: [B, S, D], from `index_keys`; anything in those that nobody sees.
    key_segment_ids: Integers [B, S].
    num_keys: int32, keys from the first on that any query may see: cost grows
      with it and not with S. All S by default.
    config: The sizes, and how many keys a query selects.
    width: Places for the keys of a query.

  Returns:
    int32 [B, T, width].
  """
  q, weights = index_queries(params, *tokens[:3], config)

  def within(prefix: int) -> jax.Array:
    visible = selection_lib.visible_mask(
      tokens.segment_ids,
      key_segment_ids[:, :prefix],
      first_query=tokens.order[:, 0],
    )
    scores = scan(q, weights, keys, num_keys, length=prefix)
    indices = selection_lib.topk_indices(scores, config.index_topk, visible)
    fill = (0, 0), (0, 0), (0, width - indices.shape[-1])
    return jnp.pad(indices, fill, constant_values=-1)

  return over_prefixes(within, num_keys, key_segment_ids.shape[1])


def over_prefixes[Answer](
  body: Callable[[int], Answer], num_keys: jax.Array | None, length: int
) -> Answer:
  """Runs a body at the smallest of a few static lengths that holds all keys.

  Args:
    body: Called with a number of keys, at most `length`; each is compiled.
    num_keys: int32, keys that there are; None for `length`.
    length: Keys that there may be.

  Returns:
    What the body returns, at less than twice the cost of `num_keys`.
  """
  if num_keys is None:
    return body(length)
  prefixes = [length]
  while prefixes[0] > _SMALLEST_PREFIX:
    prefixes.insert(0, -(-prefixes[0] // (2 * _GROUP)) * _GROUP)
  at = jnp.searchsorted(jnp.asarray(prefixes), num_keys)
  branches = [functools.partial(body, prefix) for prefix in prefixes]
  return jax.lax.switch(at, branches)


def scan(
  q: jax.Array,
  weights: jax.Array,
  keys: jax.Array | quantization.Blocks,
  num_keys: jax.Array | None = None,
  *,
  length: int,
) -> jax.Array:
  """Scores keys in tiles, a traced number of them.

  Args:
    q: [B, T, I, D], as they score stored keys.
    weights: float32 [B, T, I].
    keys: [B, S, D], as they are stored.
    num_keys: int32, keys to score; all `length` by default.
    length: Keys to hold scores of, at most S.

  Returns:
    float32 [B, T, length]; anything after `num_keys`.
  """
  batch, tokens, heads, _ = q.shape
  key_bytes = sum(
    math.prod(k.shape[2:]) * k.dtype.itemsize for k in jax.tree.leaves(keys)
  )
  fitting = min(
    indexer_lib.PRODUCTS // (batch * tokens * heads),
    _TILE_BYTES // (batch * key_bytes),
  )
  tile = 1 << (max(fitting, 2 * _GROUP).bit_length() - 1)
  tile = min(tile, length)

  def score(i: jax.Array, scores: jax.Array) -> jax.Array:
    # The last tile is moved back where it would not fit.
    start = jnp.minimum(i * tile, length - tile)
    part = jax.tree.map(
      lambda k: jax.lax.dynamic_slice_in_dim(k, start, tile, axis=1), keys
    )
    part = _tile_scores(*_whole((q, weights, part)))
    return jax.lax.dynamic_update_slice_in_dim(scores, part, start, axis=2)

  scores = mesh.vary(
    jnp.zeros((batch, tokens, length), jnp.float32),
    mesh.varying_axes(q, weights, keys),
  )
  num_tiles = -(-(length if num_keys is None else num_keys) // tile)
  return jax.lax.fori_loop(0, num_tiles, score, scores)


def _tile_scores(
  q: jax.Array, weights: jax.Array, keys: jax.Array | quantization.Blocks
) -> jax.Array:
  """float32 [B, T, S] of a tile, in products whose bits agree."""
  _, tokens, heads, _ = q.shape
  length = jax.tree.leaves(keys)[0].shape[1]
  if tokens * heads >= _FEW_ROWS:
    keys = _fill(keys, _GROUP)
    scores = quantization.stored_index_scores(q, keys, weights)
    return _whole(scores)[..., :length]
  keys = _fill(keys, 2 * _GROUP)
  groups = jax.tree.leaves(keys)[0].shape[1] // _GROUP
  q, weights = _fill((q, weights), -(-_FEWEST_ROWS // heads))
  q_groups, weight_groups = jax.tree.map(
    lambda x: jnp.repeat(x, groups, axis=0), (q, weights)
  )
  keys = jax.tree.map(
    lambda k: einops.rearrange(k, "B (g S) w -> (B g) S w", S=_GROUP), keys
  )
  scores = quantization.stored_index_scores(q_groups, keys, weight_groups)
  scores = einops.rearrange(scores, "(B g) T S -> B T (g S)", B=q.shape[0])
  return _whole(scores)[:, :tokens, :length]


def _whole[Tree](tree: Tree) -> Tree:
  """Keeps what is computed here from being merged with what is around it.

  A compiler that merges loops, or leaves out what nobody reads, rounds the
  last few numbers of a row otherwise: alone, and not as a vector.
  """
  kept: Tree = jax.lax.optimization_barrier(  # type: ignore[no-untyped-call]
    tree
  )
  return kept


def _fill(tree: Any, multiple: int) -> Any:
  """Axis 1 of each array filled up with zeros to a multiple."""

  def fill(x: jax.Array) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[1] = 0, -x.shape[1] % multiple
    return jnp.pad(x, widths)

  return jax.tree.map(fill, tree)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _in_row_blocks(
  project: Callable[..., Any], config: DSAConfig, params: Any, tokens: Any
) -> Any:
  """Projects tokens [B, T, ...] in blocks of `_ROWS`, the last filled up."""
  batch, length = jax.tree.leaves(tokens)[0].shape[:2]
  rows = jax.tree.map(
    lambda x: einops.rearrange(x, "B T ... -> 1 (B T) ..."), tokens
  )

  def body(params: Any, keys: None, rows: Any) -> Any:
    del keys
    return _whole(project(config, params, _whole(rows)))

  out = streaming.map_chunks(
    body,
    params,
    None,
    _fill(rows, _ROWS),
    chunk_size=_ROWS,
    causal=False,
  )
  return jax.tree.map(
    lambda x: einops.rearrange(
      x[:, : batch * length], "1 (B T) ... -> B T ...", B=batch
    ),
    out,
  )


def _latent_rows(
  config: DSAConfig, params: MLAParams[jax.Array], x: jax.Array
) -> jax.Array:
  return mla.query_latent(params, x, config)


def _latent_key_rows(
  config: DSAConfig,
  params: MLAParams[jax.Array],
  tokens: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  return mla.kv_latents(params, *tokens, config)


def _query_rows(
  config: DSAConfig,
  params: IndexerParams[jax.Array],
  tokens: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  x, q_latent, positions = tokens
  q = indexer_lib.index_queries(params, q_latent, positions, config)
  weights = indexer_lib.index_head_weights(params, x, config)
  return quantization.stored_index_queries(q, weights, config)


def _key_rows(
  config: DSAConfig,
  params: IndexerParams[jax.Array],
  tokens: tuple[jax.Array, jax.Array],
) -> jax.Array | quantization.Blocks:
  k = indexer_lib.index_keys(params, *tokens, config)
  return quantization.stored_index_keys(k, config)
