"""A small decoder over bytes, with DSA layers, in pure JAX.

    x = embedding[tokens]
    for each layer:
      x += attend(RMSNorm(x))                       DSA: indexer, top-k, MLA
      x += gelu(RMSNorm(x) w_up) w_down
    logits = RMSNorm(x) head

Layers are stacked along a first axis and run by a scan. Indexers lie in a tree
of their own, beside the decoder's: what trains one leaves the other alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

import dsa
from dsa import norms

NUM_BYTES = 256

# Called with a layer's parameters and hidden states [B, T, E]; returns
# [B, T, E] and whatever else is wanted of each layer.
Attend = Callable[[dsa.DSAParams[jax.Array], jax.Array], tuple[jax.Array, Any]]


class LayerParams(NamedTuple):
  """Weights of all layers but for their indexers, stacked along a first axis.

  Attributes:
    attention_norm: [layers, E], RMSNorm gain.
    mla: The attention's; each array with `layers` in front.
    mlp_norm: [layers, E], RMSNorm gain.
    w_up: [layers, E, 4 E].
    w_down: [layers, 4 E, E].
  """

  attention_norm: jax.Array
  mla: dsa.MLAParams[jax.Array]
  mlp_norm: jax.Array
  w_up: jax.Array
  w_down: jax.Array


class DecoderParams(NamedTuple):
  """Weights of a decoder, but for its indexers.

  Attributes:
    embedding: [256, E].
    layers: Those of the layers.
    final_norm: [E], RMSNorm gain.
    head: [E, 256].
  """

  embedding: jax.Array
  layers: LayerParams
  final_norm: jax.Array
  head: jax.Array


# The indexers of all layers, each array with `layers` in front.
Indexers = dsa.IndexerParams[jax.Array]


def decoder_config(
  *,
  hidden_size: int,
  layers: int,
  heads: int,
  index_heads: int,
  topk: int,
) -> dsa.DSAConfig:
  """A narrow DSA layer whose other widths follow from E and N.

  Args:
    hidden_size: E.
    layers: How many.
    heads: N; E must be a multiple of 4 N.
    index_heads: I.
    topk: Keys that a query selects.

  Returns:
    The configuration, with plain RoPE.

  Raises:
    ValueError: If the sizes do not fit each other.
  """
  if hidden_size % (4 * heads):
    raise ValueError(
      f"hidden_size must be a multiple of 4 * heads = {4 * heads}, got "
      f"{hidden_size}"
    )
  head_dim = hidden_size // heads
  return dsa.DSAConfig(
    hidden_size=hidden_size,
    num_hidden_layers=layers,
    num_attention_heads=heads,
    q_lora_rank=hidden_size // 2,
    kv_lora_rank=hidden_size // 2,
    qk_nope_head_dim=head_dim // 2,
    qk_rope_head_dim=head_dim // 2,
    v_head_dim=head_dim,
    index_n_heads=index_heads,
    index_head_dim=head_dim,
    index_topk=topk,
    rope=dsa.RopeConfig(),
  )


def init_decoder(
  key: jax.Array, config: dsa.DSAConfig
) -> tuple[DecoderParams, Indexers]:
  """Draws all weights, float32.

  Args:
    key: A JAX random key.
    config: The sizes.

  Returns:
    The decoder's weights, and its indexers'.
  """
  embed, layers = config.hidden_size, config.num_hidden_layers
  keys = jax.random.split(key, 5)
  attention = jax.vmap(lambda key: dsa.init_params(key, config))(
    jax.random.split(keys[0], layers)
  )

  def matrix(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) * shape[-2] ** -0.5

  decoder = DecoderParams(
    embedding=jax.random.normal(keys[1], (NUM_BYTES, embed)),
    layers=LayerParams(
      attention_norm=jnp.ones((layers, embed)),
      mla=attention.mla,
      mlp_norm=jnp.ones((layers, embed)),
      w_up=matrix(keys[2], layers, embed, 4 * embed),
      w_down=matrix(keys[3], layers, 4 * embed, embed),
    ),
    final_norm=jnp.ones(embed),
    head=matrix(keys[4], embed, NUM_BYTES),
  )
  return decoder, cast(Indexers, attention.indexer)


def apply_decoder(
  decoder: DecoderParams,
  indexers: Indexers,
  tokens: jax.Array,
  *,
  attend: Attend,
  eps: float,
) -> tuple[jax.Array, Any]:
  """Runs the decoder.

  Args:
    decoder: Its weights.
    indexers: Its indexers' weights.
    tokens: Integers [B, T] below 256.
    attend: The attention of each layer.
    eps: Epsilon of the RMSNorms.

  Returns:
    Logits of the next byte [B, T, 256], and what `attend` returned beside the
    output, each array with `layers` in front.
  """

  def run_layer(
    x: jax.Array, weights: tuple[LayerParams, Indexers]
  ) -> tuple[jax.Array, Any]:
    layer, indexer = weights
    normed = norms.rms_norm(x, layer.attention_norm, eps=eps)
    out, extra = attend(dsa.DSAParams(layer.mla, indexer), normed)
    x += out
    normed = norms.rms_norm(x, layer.mlp_norm, eps=eps)
    return x + jax.nn.gelu(normed @ layer.w_up) @ layer.w_down, extra

  x = decoder.embedding[tokens]  # [B, T, E]
  x, extras = jax.lax.scan(run_layer, x, (decoder.layers, indexers))
  return norms.rms_norm(x, decoder.final_norm, eps=eps) @ decoder.head, extras


def next_byte_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """The language-model loss.

  Args:
    logits: [B, T, 256].
    targets: Integers [B, T], the byte that follows each token.

  Returns:
    Scalar, mean nats a byte.
  """
  log_probs = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)
  return -jnp.mean(chosen)
