"""A small decoder with DSA layers and dense MLPs, in pure JAX.

    x = embedding[tokens]
    for each layer:
      x += attend(RMSNorm(x))                       DSA: indexer, top-k, MLA
      y = RMSNorm(x)
      x += (silu(y w_gate) * (y w_up)) w_down
    logits = RMSNorm(x) head

To train, layers are stacked along a first axis and run by a scan. Indexers lie
in a tree of their own, beside the decoder's: what trains one leaves the other
alone.

Source: the dense layers of DeepSeek-V3.2, as its published checkpoints have it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

import dsa
from dsa import norms

NUM_BYTES = 256

# The width of an MLP, in widths of the residual stream.
_MLP_WIDTHS = 3

# Called with a layer's parameters and hidden states [B, T, E]; returns
# [B, T, E] and whatever else is wanted of each layer.
Attend = Callable[[dsa.DSAParams[jax.Array], jax.Array], tuple[jax.Array, Any]]


class LayerParams(NamedTuple):
  """Weights of a layer but for its indexer; F is the width of its MLP.

  Attributes:
    attention_norm: [E], RMSNorm gain.
    mla: The attention's.
    mlp_norm: [E], RMSNorm gain.
    w_gate: [E, F].
    w_up: [E, F].
    w_down: [F, E].
  """

  attention_norm: jax.Array
  mla: dsa.MLAParams[jax.Array]
  mlp_norm: jax.Array
  w_gate: jax.Array
  w_up: jax.Array
  w_down: jax.Array


class DecoderParams[Layers](NamedTuple):
  """Weights of a decoder, but for its indexers.

  Attributes:
    embedding: [vocabulary, E].
    layers: One `LayerParams` of all layers, each array with `layers` in front;
      or a tuple of one for each layer.
    final_norm: [E], RMSNorm gain.
    head: [E, vocabulary].
  """

  embedding: jax.Array
  layers: Layers
  final_norm: jax.Array
  head: jax.Array


# What is trained: all layers at once, each array with `layers` in front.
StackedParams = DecoderParams[LayerParams]
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
) -> tuple[StackedParams, Indexers]:
  """Draws all weights, float32.

  Args:
    key: A JAX random key.
    config: The sizes.

  Returns:
    The decoder's weights for bytes, and its indexers'.
  """
  embed, layers = config.hidden_size, config.num_hidden_layers
  width = _MLP_WIDTHS * embed
  keys = jax.random.split(key, 6)
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
      w_gate=matrix(keys[2], layers, embed, width),
      w_up=matrix(keys[3], layers, embed, width),
      w_down=matrix(keys[4], layers, width, embed),
    ),
    final_norm=jnp.ones(embed),
    head=matrix(keys[5], embed, NUM_BYTES),
  )
  return decoder, cast(Indexers, attention.indexer)


def apply_layer(
  x: jax.Array,
  layer: LayerParams,
  indexer: Indexers | None,
  *,
  attend: Attend,
  eps: float,
) -> tuple[jax.Array, Any]:
  """Runs one layer.

  Args:
    x: The residual stream [B, T, E].
    layer: Its weights.
    indexer: Its indexer's, or None where `attend` needs none.
    attend: Its attention.
    eps: Epsilon of the RMSNorms.

  Returns:
    The residual stream behind it, and what `attend` returned beside the output.
  """
  normed = norms.rms_norm(x, layer.attention_norm, eps=eps)
  out, extra = attend(dsa.DSAParams(layer.mla, indexer), normed)
  x += out
  normed = norms.rms_norm(x, layer.mlp_norm, eps=eps)
  gated = jax.nn.silu(normed @ layer.w_gate) * (normed @ layer.w_up)
  return x + gated @ layer.w_down, extra


def read_out(
  decoder: DecoderParams[Any], x: jax.Array, *, eps: float
) -> jax.Array:
  """Logits [B, T, vocabulary] of the residual stream behind the last layer."""
  return norms.rms_norm(x, decoder.final_norm, eps=eps) @ decoder.head


def apply_decoder(
  decoder: StackedParams,
  indexers: Indexers,
  tokens: jax.Array,
  *,
  attend: Attend,
  eps: float,
) -> tuple[jax.Array, Any]:
  """Runs the decoder.

  Args:
    decoder: Its weights.
    indexers: Its indexers' weights, each array with `layers` in front.
    tokens: Integers [B, T] below the size of the vocabulary.
    attend: The attention of each layer.
    eps: Epsilon of the RMSNorms.

  Returns:
    Logits of the next token [B, T, vocabulary], and what `attend` returned
    beside the output, each array with `layers` in front.
  """

  def run_layer(
    x: jax.Array, weights: tuple[LayerParams, Indexers]
  ) -> tuple[jax.Array, Any]:
    return apply_layer(x, *weights, attend=attend, eps=eps)

  x = decoder.embedding[tokens]  # [B, T, E]
  x, extras = jax.lax.scan(run_layer, x, (decoder.layers, indexers))
  return read_out(decoder, x, eps=eps), extras


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
