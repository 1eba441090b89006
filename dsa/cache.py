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

from dsa import index_scan, mla, quantization, streaming
from dsa.attention import default_chunk_size, reads_all_keys
from dsa.checks import check_count, check_dtype, check_shape
from dsa.config import DSAConfig
from dsa.params import DSAParams, IndexerParams, MLAParams, check_params
from dsa.quantization import Blocks
from dsa.selection import Selection, check_selection


class Cache(NamedTuple):
  """What is kept of the tokens of one layer; S is the `max_length`.

  Attributes:
    kv_latent: [B, S, C].
    k_rope: [B, S, R].
    index_keys: [B, S, D] as they are scored, in fp8 where the configuration
      quantises them; None in a layer that is given its selection.
    length: int32 [B], tokens that each row holds, from the first place on.
    overflowed: bool [B], whether a row was given more tokens than fit.
  """

  kv_latent: jax.Array
  k_rope: jax.Array
  index_keys: jax.Array | Blocks | None
  length: jax.Array
  overflowed: jax.Array


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


def init_cache(
  config: DSAConfig,
  batch_size: int,
  max_length: int,
  dtype: Any = jnp.float32,
  *,
  index_keys: bool = True,
) -> Cache:
  """An empty cache for one layer.

  Args:
    config: The sizes, and how index keys are quantised.
    batch_size: B, rows.
    max_length: S, tokens that a row may hold.
    dtype: A float dtype; what is stored is rounded to it.
    index_keys: Whether to hold keys for the indexer; a layer that is given its
      selection, `params.indexer` None, needs none.

  Returns:
    The cache, of length zero.

  Raises:
    ValueError: If a size is below 1.
    TypeError: If a size is no integer or `dtype` no float dtype.
  """
  batch_size = check_count("batch_size", batch_size)
  max_length = check_count("max_length", max_length)
  dtype = jax.dtypes.canonicalize_dtype(dtype)
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(f"dtype must be a float dtype, got {dtype}")
  zeros = functools.partial(jnp.zeros, dtype=dtype)
  rows = batch_size, max_length
  keys = jax.eval_shape(
    lambda: quantization.stored_index_keys(
      zeros((*rows, config.index_head_dim)), config
    )
  )
  return Cache(
    kv_latent=zeros((*rows, config.kv_lora_rank)),
    k_rope=zeros((*rows, config.qk_rope_head_dim)),
    index_keys=jax.tree.map(jnp.zeros_like, keys) if index_keys else None,
    length=jnp.zeros(batch_size, jnp.int32),
    overflowed=jnp.zeros(batch_size, bool),
  )


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
  num_tokens, max_length = x.shape[1], cache.kv_latent.shape[1]
  if num_new is None:
    num_new = jnp.full_like(cache.length, num_tokens)
  num_new = jnp.clip(num_new.astype(jnp.int32), 0, num_tokens)
  fitting = jnp.minimum(num_new, max_length - cache.length)
  new = jnp.arange(num_tokens, dtype=jnp.int32)
  order = cache.length[:, None] + new
  stored = new < fitting[:, None]
  # What lies in padding, NaN included, must not reach a token beside it.
  x = jnp.where(stored[..., None], x, 0)
  kv_latent, k_rope = mla.kv_latents(params.mla, x, order, config)
  index_keys = cache.index_keys
  if params.indexer is not None and index_keys is not None:
    new_keys = index_scan.index_keys(params.indexer, x, order, config)
    index_keys = _write(index_keys, new_keys, order, stored)
  tokens = index_scan.Tokens(
    x=x,
    q_latent=index_scan.query_latent(params.mla, x, config),
    positions=order,
    segment_ids=stored.astype(jnp.int32),
    order=order,
  )
  return tokens, Cache(
    kv_latent=_write(cache.kv_latent, kv_latent, order, stored),
    k_rope=_write(cache.k_rope, k_rope, order, stored),
    index_keys=index_keys,
    length=cache.length + fitting,
    overflowed=cache.overflowed | (fitting < num_new),
  )


def _write(buffers: Any, rows: Any, order: jax.Array, stored: jax.Array) -> Any:
  """Puts rows [B, T, ...] in their places, those that are to be stored."""
  batch = jnp.arange(order.shape[0])[:, None]

  def write(buffer: jax.Array, rows: jax.Array) -> jax.Array:
    places = jnp.where(stored, order, buffer.shape[1])
    return buffer.at[batch, places].set(rows.astype(buffer.dtype), mode="drop")

  return jax.tree.map(write, buffers, rows)


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
    jax.lax.stop_gradient(indexer),
    cache.index_keys,
    tokens,
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
  num_keys = cache.kv_latent.shape[1] if reads_all_keys(backend) else 0
  return streaming.map_chunks(
    functools.partial(_attend_chunk, config, backend),
    params,
    (cache.kv_latent, cache.k_rope),
    (tokens, selection),
    chunk_size=default_chunk_size(config, tokens.x, num_keys=num_keys),
    causal=False,
  )


def _attend_chunk(
  config: DSAConfig,
  backend: mla.Backend,
  params: MLAParams[jax.Array],
  tables: tuple[jax.Array, jax.Array],
  queries: tuple[index_scan.Tokens, Selection],
) -> jax.Array:
  """[B, T, E] for a chunk of queries."""
  tokens, selection = queries
  q = mla.mla_queries(params, tokens.q_latent, tokens.positions, config)
  halves = mla.split_wkv_b(params, config)

  def attend(
    tables: tuple[jax.Array, jax.Array], selection: Selection
  ) -> jax.Array:
    inputs = mla.MLAInputs(*q, *tables, *halves)
    return backend(inputs, selection, scale=config.softmax_scale)

  length = tables[0].shape[1]
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
  check_dtype("x", x, jnp.floating)
  if 0 in x.shape:
    raise ValueError(f"x must hold at least one token, got shape {x.shape}")
  if not isinstance(cache, Cache):
    raise TypeError(f"cache must be a Cache, got {type(cache).__name__}")
  known = {"B": sizes["B"]}
  widths = {"kv_latent": config.kv_lora_rank, "k_rope": config.qk_rope_head_dim}
  for name, width in widths.items():
    buffer = getattr(cache, name)
    known = check_shape(f"cache.{name}", buffer, f"B S {width}", **known)
    check_dtype(f"cache.{name}", buffer, jnp.floating)
  if cache.index_keys is not None:
    _check_index_keys(cache.index_keys, known, config)
  check_shape("cache.length", cache.length, "B", B=sizes["B"])
  check_dtype("cache.length", cache.length, jnp.integer)
  check_shape("cache.overflowed", cache.overflowed, "B", B=sizes["B"])
  check_dtype("cache.overflowed", cache.overflowed, jnp.bool_)
  if sizes["T"] > known["S"]:
    raise ValueError(
      f"x must hold at most max_length={known['S']} tokens a row, got "
      f"{sizes['T']}"
    )
  if num_new is not None:
    check_shape("num_new", num_new, "B", B=sizes["B"])
    check_dtype("num_new", num_new, jnp.integer)
  if selection is not None:
    check_selection(selection, B=sizes["B"], T=sizes["T"])


def _check_index_keys(
  keys: jax.Array | Blocks, sizes: dict[str, int], config: DSAConfig
) -> None:
  """Checks that index keys are stored as the configuration says."""
  wanted = Blocks if config.index_quantization != "none" else jax.Array
  if not isinstance(keys, wanted):
    raise TypeError(
      f"cache.index_keys must be {wanted.__name__} where index_quantization is "
      f"{config.index_quantization!r}, got {type(keys).__name__}"
    )
  width = config.index_head_dim
  if isinstance(keys, Blocks):
    check_shape("cache.index_keys.values", keys.values, f"B S {width}", **sizes)
    check_shape("cache.index_keys.scales", keys.scales, "B S 1", **sizes)
  else:
    check_shape("cache.index_keys", keys, f"B S {width}", **sizes)
    check_dtype("cache.index_keys", keys, jnp.floating)
