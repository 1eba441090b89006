"""The lightning indexer: a cheap score of every key for every query.

    q = rope(q_latent wq_b)                   I index heads of width D
    k = rope(LayerNorm(x wk))                 one key for all index heads
    w = (x weights_proj) I^-1/2 D^-1/2        float32
    score[t, s] = sum_i w[t, i] relu(q[t, i] . k[s])

RoPE turns the first R of the D dims, the rest has no position. x and q_latent
are detached: the indexer learns from its own loss, which reaches nothing else.

Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1, equation 1.
"""

import math

import einops
import jax
import jax.numpy as jnp

from dsa import norms, rope, streaming
from dsa.checks import check_dtype, check_shape
from dsa.config import DSAConfig
from dsa.params import IndexerParams

# Products of an index query and an index key that are held at once: few enough
# to stay in a cache between the product and the sum over heads.
PRODUCTS = 1 << 21
_FEWEST_KEYS = 128


def index_queries(
  params: IndexerParams[jax.Array],
  q_latent: jax.Array,
  positions: jax.Array,
  config: DSAConfig,
) -> jax.Array:
  """Queries of the index heads.

  Args:
    params: Weights of the indexer.
    q_latent: [B, T, L], the query latent after its RMSNorm; detached.
    positions: Integers [B, T].
    config: The sizes and the layout of RoPE.

  Returns:
    [B, T, I, D], [rope | rest].

  Raises:
    ValueError: If a shape does not fit the configuration.
    TypeError: If a dtype is not of its kind.
  """
  check_shape("q_latent", q_latent, "B T L", L=config.q_lora_rank)
  q_latent = jax.lax.stop_gradient(q_latent)
  q = jnp.einsum("btl,lid->btid", q_latent, params.wq_b)
  return _rotate(q, positions, config)


def index_keys(
  params: IndexerParams[jax.Array],
  x: jax.Array,
  positions: jax.Array,
  config: DSAConfig,
) -> jax.Array:
  """The index key of each token, shared by all index heads.

  Args:
    params: Weights of the indexer.
    x: Hidden states [B, S, E]; detached.
    positions: Integers [B, S].
    config: The sizes and the layout of RoPE.

  Returns:
    [B, S, D], [rope | rest].

  Raises:
    ValueError: If a shape does not fit the configuration.
    TypeError: If a dtype is not of its kind.
  """
  check_shape("x", x, "B S E", E=config.hidden_size)
  k = jnp.einsum("bse,ed->bsd", jax.lax.stop_gradient(x), params.wk)
  k = norms.layer_norm(
    k, params.k_norm_scale, params.k_norm_bias, eps=config.index_k_norm_eps
  )
  return _rotate(k, positions, config)


def index_head_weights(
  params: IndexerParams[jax.Array], x: jax.Array, config: DSAConfig
) -> jax.Array:
  """How much each index head counts for each query.

  Args:
    params: Weights of the indexer.
    x: Hidden states [B, T, E]; detached.
    config: The sizes.

  Returns:
    float32 [B, T, I], with I^-1/2 D^-1/2 multiplied in.

  Raises:
    ValueError: If a shape does not fit the configuration.
  """
  check_shape("x", x, "B T E", E=config.hidden_size)
  scale = (config.index_n_heads * config.index_head_dim) ** -0.5
  # HIGHEST: on TPU the default would round float32 operands to bfloat16.
  weights = jnp.einsum(
    "bte,ei->bti",
    jax.lax.stop_gradient(x).astype(jnp.float32),
    params.weights_proj.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )
  return weights * scale


def weighted_relu_scores(
  q: jax.Array,
  k: jax.Array,
  weights: jax.Array,
  *,
  key_scales: jax.Array | None = None,
) -> jax.Array:
  """Scores every key for every query: sum_i w_i relu(q_i . k).

  Heads are added one by one, in order; keys are taken in tiles, so that no
  head's [B, T, S] is ever held.

  Args:
    q: Index queries [B, T, I, D]; fp8 is widened tile by tile.
    k: Index keys [B, S, D], likewise.
    weights: float32 [B, T, I].
    key_scales: float32 [B, S], what the scores of each key are multiplied by;
      nothing by default.

  Returns:
    float32 [B, T, S], unmasked.

  Raises:
    ValueError: If the shapes do not fit each other.
    TypeError: If the weights or scales are not float32.
  """
  sizes = check_shape("q", q, "B T I D")
  keys = check_shape("k", k, "B S D", B=sizes["B"], D=sizes["D"])
  del sizes["D"]
  check_shape("weights", weights, "B T I", **sizes)
  check_dtype("weights", weights, jnp.float32)
  if key_scales is not None:
    check_shape("key_scales", key_scales, "B S", B=keys["B"], S=keys["S"])
    check_dtype("key_scales", key_scales, jnp.float32)
  rows = max(math.prod(sizes.values()), 1)
  fitting = max(PRODUCTS // rows, _FEWEST_KEYS)
  scores: jax.Array = streaming.map_chunks(
    _score_tile,
    (
      einops.rearrange(q, "B T I D -> B I T D"),
      einops.rearrange(weights, "B T I -> B I T 1"),
    ),
    None,
    (k, key_scales),
    chunk_size=1 << (fitting.bit_length() - 1),
    causal=False,
    out_axis=2,
  )
  return scores


def _score_tile(
  queries: tuple[jax.Array, jax.Array],
  keys: None,
  tile: tuple[jax.Array, jax.Array | None],
) -> jax.Array:
  """([B, I, T, D], [B, I, T, 1]) and a tile of keys [B, S, D] to [B, T, S]."""
  del keys
  q, weights = queries
  k, key_scales = tile
  dots = jnp.einsum(
    "bitd,bsd->bits", _wide(q), _wide(k), preferred_element_type=jnp.float32
  )
  scores = jnp.zeros(dots[:, 0].shape, jnp.float32)
  for i in range(q.shape[1]):
    scores += weights[:, i] * jax.nn.relu(dots[:, i])
  return scores if key_scales is None else scores * key_scales[:, None]


def _wide(x: jax.Array) -> jax.Array:
  """fp8 in bfloat16, which holds it exactly and adds up in float32."""
  # fp8 matrix units add up with fewer bits than float32.
  return x.astype(jnp.bfloat16) if x.dtype.itemsize == 1 else x


def selected_scores(
  q: jax.Array, k: jax.Array, weights: jax.Array, indices: jax.Array
) -> jax.Array:
  """Scores the selected keys alone: cost grows with T * K.

  Args:
    q: Index queries [B, T, I, D].
    k: Index keys [B, S, D].
    weights: float32 [B, T, I].
    indices: int32 [B, T, K], -1 for no key.

  Returns:
    float32 [B, T, K]; the gradient of k is added up in float32.
  """
  return streaming.map_gathered(
    _score_rows,
    k,
    indices,
    (q, weights),
    block_size=streaming.gathered_block_size(k, indices),
  )


def _score_rows(
  queries: tuple[jax.Array, jax.Array], rows: jax.Array, valid: jax.Array
) -> jax.Array:
  """[B, T, I, D], [B, T, I] and rows [B, T, K, D] to [B, T, K]."""
  del valid
  q, weights = (einops.rearrange(x, "B T ... -> (B T) 1 ...") for x in queries)
  k = einops.rearrange(rows, "B T K D -> (B T) K D")
  scores = weighted_relu_scores(q, k, weights)
  return einops.rearrange(scores, "(B T) 1 K -> B T K", B=rows.shape[0])


def indexer_scores(
  params: IndexerParams[jax.Array],
  x: jax.Array,
  q_latent: jax.Array,
  positions: jax.Array,
  config: DSAConfig,
) -> jax.Array:
  """Scores every token of a sequence for every other.

  Args:
    params: Weights of the indexer.
    x: Hidden states [B, T, E]; detached.
    q_latent: [B, T, L], the query latent after its RMSNorm; detached.
    positions: Integers [B, T].
    config: The sizes and the layout of RoPE.

  Returns:
    float32 [B, T, S] with S = T, unmasked: later tokens have scores too.

  Raises:
    ValueError: If a shape does not fit the configuration.
    TypeError: If a dtype is not of its kind.
  """
  return weighted_relu_scores(
    index_queries(params, q_latent, positions, config),
    index_keys(params, x, positions, config),
    index_head_weights(params, x, config),
  )


def _rotate(x: jax.Array, positions: jax.Array, config: DSAConfig) -> jax.Array:
  turn = (
    rope.yarn_rope_interleaved
    if config.indexer_rope_interleave
    else rope.yarn_rope_concat
  )
  turned = turn(x[..., : config.qk_rope_head_dim], positions, config.rope)
  return jnp.concatenate((turned, x[..., config.qk_rope_head_dim :]), axis=-1)
