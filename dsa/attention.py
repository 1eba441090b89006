"""DSA attention: indexer, exact top-k and MLA over the selected keys, composed.

    scores    = indexer(x, q_latent)                     of all visible pairs
    selection = top-k of the visible keys by score
    out       = MLA over the selection                   (sparse stage)
    loss      = mean over queries of KL(p || softmax(scores))

Keys and latents, O(S), are computed once; all else runs over chunks of queries,
projections included, so that nothing of size T * S is alive at once, forward or
backward. Selecting runs in chunks of its own fixed size: which keys are chosen
never depends on how the attention is chunked.

Gradients: the language-model loss reaches x and the MLA parameters through the
selected keys alone; the indexer learns from its own loss alone.

Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1.
"""

import functools
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dsa import index_scan, losses, mesh, mla, quantization, streaming
from dsa import indexer as indexer_lib
from dsa import selection as selection_lib
from dsa.checks import check_count, check_dtype, check_shape
from dsa.config import DSAConfig
from dsa.params import DSAParams, IndexerParams, MLAParams, check_params
from dsa.selection import Selection

Stage = Literal["sparse", "dense_warmup"]
_STAGES = ("sparse", "dense_warmup")

# Bytes that a chunk's queries, logits and outputs may take by default.
_CHUNK_BYTES = 128 << 20
_SMALLEST_CHUNK, _LARGEST_CHUNK = 16, 1024


class AttentionResult(NamedTuple):
  """What an attention function returns, the same whatever its options.

  Attributes:
    out: [B, T, E]; exactly zero at padding.
    selection: The keys that each query selected.
    indexer_loss: float32 scalar, in nats; zero unless asked for.
  """

  out: jax.Array
  selection: Selection
  indexer_loss: jax.Array


class Attention(Protocol):
  """An attention function made by `make_attention`."""

  def __call__(
    self,
    params: DSAParams[jax.Array],
    x: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    selection: Selection | None = None,
  ) -> AttentionResult:
    """Attends from each token of x to its selected keys; see make_attention."""
    ...


class _Tokens(NamedTuple):
  """What is known of each token: x [B, T, E], the others integers [B, T]."""

  x: jax.Array
  positions: jax.Array
  segment_ids: jax.Array
  order: jax.Array


class _Keys(NamedTuple):
  """What queries need of each key: O(S), computed once.

  Attributes:
    kv_latent: [B, S, C].
    k_rope: [B, S, R].
    index_keys: [B, S, D], or None where no loss is asked for.
    segment_ids: Integers [B, S].
  """

  kv_latent: jax.Array
  k_rope: jax.Array
  index_keys: jax.Array | None
  segment_ids: jax.Array


class _Options(NamedTuple):
  """The static arguments of make_attention that a chunk needs."""

  config: DSAConfig
  backend: mla.Backend
  stage: Stage


def make_attention(
  config: DSAConfig,
  *,
  backend: mla.Backend,
  stage: Stage = "sparse",
  indexer_loss: bool = False,
  query_chunk_size: int | None = None,
) -> Attention:
  """Composes the steps of a DSA layer into one pure function.

  Args:
    config: The sizes and constants of the layer.
    backend: The attention kernel, for example `dsa.backends.gather()`.
    stage: "sparse" attends to the selected keys. "dense_warmup" attends to all
      visible keys, so that the indexer learns from a dense model; the selection
      is reported all the same.
    indexer_loss: Whether to compute the loss that trains the indexer: over the
      selected keys in the sparse stage, over the visible ones in dense_warmup.
    query_chunk_size: Queries that attend at once; from the shapes by default.
      It changes memory and speed, never the selection. A chunk of T or more
      keeps what autodiff keeps; smaller ones compute it again backward.

  Returns:
    `attention(params, x, positions=None, segment_ids=None, selection=None)`:
      params: `DSAParams` of the layer.
      x: Hidden states [B, T, E].
      positions: Integers [B, T] for RoPE; the index of the token by default.
      segment_ids: Integers [B, T]: a token sees its own segment alone, and 0 is
        padding. All tokens are in segment 1 by default.
      selection: Keys to attend to, in place of the indexer's; what is not
        visible in it is dropped. Required where `params.indexer` is None, and
        then the loss is zero.
    It raises ValueError or TypeError, before any compute, for arguments that do
    not fit the configuration.

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
  options = _Options(config, backend, stage)

  def attention(
    params: DSAParams[jax.Array],
    x: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    selection: Selection | None = None,
  ) -> AttentionResult:
    check_params(params, config)
    tokens = _tokens(x, positions, segment_ids, config)
    if selection is None:
      selection = _select(params, tokens, config)
    else:
      selection = _visible_part(selection, tokens)
    indexer = params.indexer if indexer_loss else None
    reads_all = stage == "dense_warmup" or reads_all_keys(backend)
    out, divergences = streaming.map_chunks(
      functools.partial(_attend_chunk, options),
      (params.mla, indexer),
      _keys(params.mla, indexer, tokens, config),
      (tokens, selection),
      chunk_size=query_chunk_size
      or default_chunk_size(config, x, num_keys=x.shape[1] if reads_all else 0),
      causal=reads_all,
    )
    loss = losses.mean_over_valid(divergences, tokens.segment_ids != 0)
    return AttentionResult(out, selection, loss)

  return attention


def _select(
  params: DSAParams[jax.Array], tokens: _Tokens, config: DSAConfig
) -> Selection:
  """Scores the visible keys of each query and keeps the best; detached."""
  if params.indexer is None:
    raise ValueError("selection is required where params.indexer is None")
  weights, tokens = jax.lax.stop_gradient(
    ((params.mla, params.indexer), tokens)
  )
  select = functools.partial(_select_rows, config)
  return Selection(mesh.map_rows(select, weights, tokens))


def _select_rows(
  config: DSAConfig,
  weights: tuple[MLAParams[jax.Array], IndexerParams[jax.Array]],
  tokens: _Tokens,
) -> jax.Array:
  """int32 [B, T, min(index_topk, S)] for whole sequences."""
  index_keys = index_scan.index_keys(
    weights[1], tokens.x, tokens.positions, config
  )
  indices: jax.Array = streaming.map_chunks(
    functools.partial(_select_chunk, config, tokens.order.shape[1]),
    weights,
    (index_keys, tokens.segment_ids),
    tokens,
    chunk_size=index_scan.QUERY_CHUNK,
    causal=True,
  )
  return indices


def _select_chunk(
  config: DSAConfig,
  num_keys: int,
  weights: tuple[MLAParams[jax.Array], IndexerParams[jax.Array]],
  keys: tuple[jax.Array | quantization.Blocks, jax.Array],
  tokens: _Tokens,
) -> jax.Array:
  """int32 [B, T, min(index_topk, S)] for a chunk of queries."""
  params, indexer = weights
  x, *known = tokens
  q_latent = index_scan.query_latent(params, x, config)
  return index_scan.select(
    indexer,
    index_scan.Tokens(x, q_latent, *known),
    *keys,
    config=config,
    # Early chunks are given fewer keys than later ones select.
    width=min(config.index_topk, num_keys),
  )


def _attend_chunk(
  options: _Options,
  weights: tuple[MLAParams[jax.Array], IndexerParams[jax.Array] | None],
  keys: _Keys,
  queries: tuple[_Tokens, Selection],
) -> tuple[jax.Array, jax.Array]:
  """[B, T, E] and each query's divergence, float32 [B, T]."""
  config = options.config
  params, indexer = weights
  tokens, attended = queries
  if options.stage == "dense_warmup":
    attended = _all_visible(tokens, keys.segment_ids)
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
    heads_out, probs = _attend_with_probs(options, inputs, attended)
    q, head_weights = _index_queries(indexer, q_latent, tokens, config)
    if options.stage == "dense_warmup":
      scores = indexer_lib.weighted_relu_scores(
        q, keys.index_keys, head_weights
      )
    else:
      scores = indexer_lib.selected_scores(
        q, keys.index_keys, head_weights, attended.indices
      )
    divergences = losses.indexer_kl(scores, probs, attended.indices >= 0)
  return mla.output_projection(params, heads_out), divergences


def _attend_with_probs(
  options: _Options, inputs: mla.MLAInputs, selection: Selection
) -> tuple[jax.Array, jax.Array]:
  """[B, T, N, V], and the heads' mean probabilities, float32 [B, T, K]."""
  scale = options.config.softmax_scale
  with_probs = getattr(options.backend, "with_probs", None)
  if with_probs is not None:
    return with_probs(inputs, selection, scale=scale)
  q, k, _ = mla.expand_heads(jax.lax.stop_gradient(inputs))
  mask = selection.mask(k.shape[1])
  probs = mla.expanded_probs(q, k, mask, scale=scale)
  out = options.backend(inputs, selection, scale=scale)
  return out, mla.mean_probs_at(probs, selection)


def _index_queries(
  params: IndexerParams[jax.Array],
  q_latent: jax.Array,
  tokens: _Tokens,
  config: DSAConfig,
) -> tuple[jax.Array, jax.Array]:
  """Index queries [B, T, I, D] and head weights, float32 [B, T, I]."""
  q = indexer_lib.index_queries(params, q_latent, tokens.positions, config)
  return q, indexer_lib.index_head_weights(params, tokens.x, config)


def _keys(
  params: MLAParams[jax.Array],
  indexer: IndexerParams[jax.Array] | None,
  tokens: _Tokens,
  config: DSAConfig,
) -> _Keys:
  x, positions = tokens.x, tokens.positions
  kv_latent, k_rope = mla.kv_latents(params, x, positions, config)
  index_keys = None
  if indexer is not None:
    index_keys = indexer_lib.index_keys(indexer, x, positions, config)
  return _Keys(kv_latent, k_rope, index_keys, tokens.segment_ids)


def _visible(tokens: _Tokens, key_segment_ids: jax.Array) -> jax.Array:
  """bool [B, T, S]: which keys a chunk's queries may see."""
  return selection_lib.visible_mask(
    tokens.segment_ids, key_segment_ids, first_query=tokens.order[:, 0]
  )


def _all_visible(tokens: _Tokens, key_segment_ids: jax.Array) -> Selection:
  """Every visible key selected, each at the place of its own index."""
  keys = jnp.arange(key_segment_ids.shape[1], dtype=jnp.int32)
  return Selection(jnp.where(_visible(tokens, key_segment_ids), keys, -1))


def _visible_part(selection: Selection, tokens: _Tokens) -> Selection:
  """A given selection without what its queries may not see."""
  batch, queries = tokens.order.shape
  selection_lib.check_selection(selection, B=batch, T=queries)
  indices = selection.indices
  key_ids = jax.vmap(lambda ids, i: ids[i])(
    tokens.segment_ids, jnp.clip(indices, 0, queries - 1)
  )
  query_ids = tokens.segment_ids[..., None]
  visible = (indices <= tokens.order[..., None]) & (key_ids == query_ids)
  return Selection(jnp.where(visible & (query_ids != 0), indices, -1))


def reads_all_keys(backend: mla.Backend) -> bool:
  """Whether a backend's cost grows with the number of keys."""
  return getattr(backend, "reads_all_keys", True)


def default_chunk_size(
  config: DSAConfig, x: jax.Array, *, num_keys: int
) -> int:
  """Queries that attend at once.

  Args:
    config: The sizes.
    x: Hidden states [B, T, E].
    num_keys: Keys that logits of each query are held of, beside the selected.

  Returns:
    A power of two whose chunk fits `_CHUNK_BYTES`.
  """
  heads = config.num_attention_heads
  widths = (
    2 * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    + 2 * (config.kv_lora_rank + config.qk_rope_head_dim)
    + 2 * config.v_head_dim
  )
  query_bytes = heads * widths * x.dtype.itemsize
  query_bytes += 2 * heads * num_keys * 4  # Float32 logits, probabilities.
  fitting = max(_CHUNK_BYTES // (x.shape[0] * query_bytes), 1)
  power = 1 << (fitting.bit_length() - 1)
  return min(max(power, _SMALLEST_CHUNK), _LARGEST_CHUNK)


def _tokens(
  x: jax.Array,
  positions: jax.Array | None,
  segment_ids: jax.Array | None,
  config: DSAConfig,
) -> _Tokens:
  """Checks what was passed and fills in the defaults."""
  sizes = check_shape("x", x, "B T E", E=config.hidden_size)
  check_dtype("x", x, jnp.floating)
  if 0 in x.shape:
    raise ValueError(f"x must hold at least one token, got shape {x.shape}")
  for name, array in (("positions", positions), ("segment_ids", segment_ids)):
    if array is not None:
      check_shape(name, array, "B T", B=sizes["B"], T=sizes["T"])
      check_dtype(name, array, jnp.integer)
  # Made from x, to be spread over devices as x is.
  order = jnp.zeros_like(x[..., 0], jnp.int32)
  order += jnp.arange(sizes["T"], dtype=jnp.int32)
  if positions is None:
    positions = order
  if segment_ids is None:
    segment_ids = jnp.ones_like(order)
  # What lies in padding, NaN included, must not reach a weight's gradient.
  x = jnp.where(segment_ids[..., None] == 0, 0, x)
  return _Tokens(x, positions, segment_ids, order)
