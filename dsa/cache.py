"""Cached attention: one function for prefill, chunked prefill and decode.

    cache     = cache with the latents and index keys of T new tokens a row
    selection = top-k of the row's tokens up to each query, by index score
    out       = MLA over the selection, in the latents of the cache

A token costs scores of all that came before it, O(length), and attention to K
of them. Only C + R + D numbers of it are kept; no head's keys or values of the
cache are ever built where the backend absorbs them, as `gather` does. The
length of a row is a traced number: a step compiles once for all lengths. Which
keys are selected depends on no bit on how the sequence was cut into calls.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; arXiv 2512.02556.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dsa import costs, index_scan, mla, quantization, streaming
from dsa.cache_buffers import Cache, check_cache, write_rows
from dsa.checks import check_dtype, check_numbers, check_shape
from dsa.composition import backend_and_chunk
from dsa.config import DSAConfig
from dsa.params import DSAParams, IndexerParams, MLAParams, check_params
from dsa.quantization import Blocks
from dsa.selection import Selection, check_selection


class CachedResult(NamedTuple):
  """What a cached attention function returns.

  Attributes:
    out: [B, T, E]; exactly zero at padding and at tokens that did not fit.
    cache: The cache with the new tokens.
    selection: The places in the cache that each query selected.
  """

  out: jax.Array
  cache: Cache
  selection: Selection


class CachedAttention(Protocol):
  """A cached attention function made by `make_cached_attention`."""

  def __call__(
    self,
    params: DSAParams[jax.Array],
    x: jax.Array,
    cache: Cache,
    *,
    num_new: jax.Array | None = None,
    selection: Selection | None = None,
  ) -> CachedResult:
    """Appends the tokens of x and attends; see make_cached_attention."""
    ...


def make_cached_attention(
  config: DSAConfig, *, backend: mla.Backend
) -> CachedAttention:
  """Composes the steps of a DSA layer over a cache into one pure function.

  Args:
    config: The sizes and constants of the layer.
    backend: The attention kernel. One that absorbs, as `dsa.backends.gather()`
      does, builds no head's keys and values of the cache.

  Returns:
    `serve(params, x, cache, num_new=None, selection=None)`, which appends T
    tokens to each row and attends from them over all that the row then holds:
      params: `DSAParams` of the layer.
      x: Hidden states [B, T, E], T at most `max_length`.
      cache: From `init_cache` or an earlier call. It may be donated: then it is
        updated in place.
      num_new: Integers [B], tokens of x to append to each row; the rest of a
        row is padding: it is not stored and its output is zero. T by default.
      selection: Places in the cache to attend to, in place of the indexer's;
        what is not visible in it is dropped. Required where `params.indexer`
        is None.
    Tokens continue the positions of their row. A token that would not fit is
    not stored and overwrites nothing: its output is zero, `cache.length` stays
    at `max_length`, and `cache.overflowed` is set from then on.
    It raises ValueError or TypeError, before any compute, for arguments that do
    not fit the configuration.

  Raises:
    TypeError: If `backend` is not a function.
  """
  if not callable(backend):
    raise TypeError(
      f"backend must be a function, such as gather() makes, got {backend!r}"
    )

  def serve(
    params: DSAParams[jax.Array],
    x: jax.Array,
    cache: Cache,
    *,
    num_new: jax.Array | None = None,
    selection: Selection | None = None,
  ) -> CachedResult:
    check_params(params, config)
    _check_arguments(x, cache, num_new, selection, config)
    tokens, cache = _append(params, x, cache, num_new, config)
    if selection is None:
      selection = _select(params.indexer, tokens, cache, config)
    else:
      visible = selection.indices <= tokens.order[..., None]
      visible &= tokens.segment_ids[..., None] != 0
      selection = Selection(jnp.where(visible, selection.indices, -1))
    out = _attend(params.mla, tokens, cache, selection, config, backend)
    return CachedResult(out, cache, selection)

  return serve


def _append(
  params: DSAParams[jax.Array],
  x: jax.Array,
  cache: Cache,
  num_new: jax.Array | None,
  config: DSAConfig,
) -> tuple[index_scan.Tokens, Cache]:
  """Stores what fits of the new tokens; the others become segment 0."""
  num_tokens, max_length = x.shape[1], cache.k_rope.shape[1]
  if num_new is None:
    num_new = jnp.full_like(cache.length, num_tokens)
  num_new = jnp.clip(num_new.astype(jnp.int32), 0, num_tokens)
  fitting = jnp.minimum(num_new, max_length - cache.length)
  new = jnp.arange(num_tokens, dtype=jnp.int32)
  order = cache.length[:, None] + new
  stored = new < fitting[:, None]
  # What lies in padding, NaN included, must not reach a weight's gradient.
  x = jnp.where(stored[..., None], x, 0)
  # Rounding what is stored would make much of a difference in the last bit.
  exact = jnp.promote_types(x.dtype, params.mla.wkv_a.dtype)
  holds_exact = (
    jnp.promote_types(exact, cache.k_rope.dtype) == cache.k_rope.dtype
  )
  project = (
    mla.kv_latents
    if holds_exact and config.kv_quantization == "none"
    else index_scan.kv_latents
  )
  kv_latent, k_rope = project(params.mla, x, order, config)
  latents = quantization.stored_latents(kv_latent, config)
  index_keys = cache.index_keys
  if params.indexer is not None and index_keys is not None:
    new_keys = index_scan.index_keys(params.indexer, x, order, config)
    index_keys = write_rows(index_keys, new_keys, order, stored)
  tokens = index_scan.Tokens(
    x=x,
    q_latent=index_scan.query_latent(params.mla, x, config),
    positions=order,
    segment_ids=stored.astype(jnp.int32),
    order=order,
  )
  return tokens, Cache(
    kv_latent=write_rows(cache.kv_latent, latents, order, stored),
    k_rope=write_rows(cache.k_rope, k_rope, order, stored),
    index_keys=index_keys,
    length=cache.length + fitting,
    overflowed=cache.overflowed | (fitting < num_new),
  )


def _select(
  indexer: IndexerParams[jax.Array] | None,
  tokens: index_scan.Tokens,
  cache: Cache,
  config: DSAConfig,
) -> Selection:
  """The best of each row's tokens up to each new one, by index score."""
  if indexer is None or cache.index_keys is None:
    raise ValueError(
      "selection is required where params.indexer or cache.index_keys is None"
    )
  indices = streaming.map_chunks(
    functools.partial(_select_chunk, config),
    *jax.lax.stop_gradient((indexer, cache.index_keys, tokens)),
    chunk_size=index_scan.QUERY_CHUNK,
    causal=False,
  )
  return Selection(indices)


def _select_chunk(
  config: DSAConfig,
  indexer: IndexerParams[jax.Array],
  keys: jax.Array | Blocks,
  tokens: index_scan.Tokens,
) -> jax.Array:
  """int32 [B, T, min(index_topk, S)] for a chunk of queries."""
  rows = jax.tree.leaves(keys)[0].shape[:2]
  return index_scan.select(
    indexer,
    tokens,
    keys,
    jnp.ones(rows, jnp.int32),
    _num_seen(tokens),
    config=config,
    width=min(config.index_topk, rows[1]),
  )


def _num_seen(tokens: index_scan.Tokens) -> jax.Array:
  """int32, places in the cache from the first on that any token may see."""
  return jnp.max(jnp.where(tokens.segment_ids != 0, tokens.order + 1, 0))


def _attend(
  params: MLAParams[jax.Array],
  tokens: index_scan.Tokens,
  cache: Cache,
  selection: Selection,
  config: DSAConfig,
  backend: mla.Backend,
) -> jax.Array:
  """[B, T, E]: attention of the new tokens to what they selected."""
  batch, queries, selected = selection.indices.shape
  sizes = costs.layer_sizes(
    config,
    batch=batch,
    queries=queries,
    keys=cache.k_rope.shape[1],
    selected=selected,
  )
  backend, chunk_size = backend_and_chunk(
    backend, sizes, tokens.x.dtype.itemsize, dense=False
  )
  return streaming.map_chunks(
    functools.partial(_attend_chunk, config, backend),
    params,
    (cache.kv_latent, cache.k_rope),
    (tokens, selection),
    chunk_size=chunk_size,
    causal=False,
  )


def _attend_chunk(
  config: DSAConfig,
  backend: mla.Backend,
  params: MLAParams[jax.Array],
  tables: tuple[jax.Array | Blocks, jax.Array],
  queries: tuple[index_scan.Tokens, Selection],
) -> jax.Array:
  """[B, T, E] for a chunk of queries."""
  tokens, selection = queries
  q = mla.mla_queries(params, tokens.q_latent, tokens.positions, config)
  halves = mla.split_wkv_b(params, config)

  def attend(
    tables: tuple[jax.Array | Blocks, jax.Array], selection: Selection
  ) -> jax.Array:
    latent, k_rope = tables
    latent = quantization.restored_latents(latent, k_rope.dtype)
    inputs = mla.MLAInputs(*q, latent, k_rope, *halves)
    return backend(inputs, selection, scale=config.softmax_scale)

  length = tables[1].shape[1]
  _, num_queries, width = selection.indices.shape
  if num_queries * width <= length:
    heads_out = attend(*_selected_rows(tables, selection))
  else:
    heads_out = index_scan.over_prefixes(
      lambda prefix: attend(
        jax.tree.map(lambda table: table[:, :prefix], tables), selection
      ),
      _num_seen(tokens),
      length,
    )
  return mla.output_projection(params, heads_out)


def _selected_rows(tables: Any, selection: Selection) -> tuple[Any, Selection]:
  """The selected rows alone, [B, T * K, ...], and where they now lie."""
  indices = selection.indices
  batch, num_queries, width = indices.shape
  places = jnp.maximum(indices, 0).reshape(batch, -1)
  rows = jax.tree.map(
    lambda table: jax.vmap(
      lambda rows, at: rows.at[at].get(mode="promise_in_bounds")
    )(table, places),
    tables,
  )
  order = jnp.arange(num_queries * width, dtype=jnp.int32)
  order = order.reshape(num_queries, width)
  return rows, Selection(jnp.where(indices < 0, -1, order))


def _check_arguments(
  x: jax.Array,
  cache: Cache,
  num_new: jax.Array | None,
  selection: Selection | None,
  config: DSAConfig,
) -> None:
  """Checks what was passed to a cached attention function."""
  sizes = check_shape("x", x, "B T E", E=config.hidden_size)
  check_numbers("x", x)
  if 0 in x.shape:
    raise ValueError(f"x must hold at least one token, got shape {x.shape}")
  max_length = check_cache(cache, config, batch_size=sizes["B"])
  if sizes["T"] > max_length:
    raise ValueError(
      f"x must hold at most max_length={max_length} tokens a row, got "
      f"{sizes['T']}"
    )
  if num_new is not None:
    check_shape("num_new", num_new, "B", B=sizes["B"])
    check_dtype("num_new", num_new, jnp.integer)
  if selection is not None:
    check_selection(selection, B=sizes["B"], T=sizes["T"])
