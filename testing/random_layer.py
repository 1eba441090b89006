"""Seeded layers small enough for the oracle, with nothing special in them.

Gains and biases of the norms are random too, so that leaving one out shows.
"""

from typing import NamedTuple

import numpy as np

from testing import oracle

CONFIG = oracle.Config(
  hidden_size=24,
  num_attention_heads=3,
  q_lora_rank=10,
  kv_lora_rank=12,
  qk_nope_head_dim=6,
  qk_rope_head_dim=8,
  v_head_dim=5,
  index_n_heads=2,
  index_head_dim=12,
  index_topk=4,
  indexer_rope_interleave=False,
  rope=oracle.Rope(
    rope_type="yarn", factor=40.0, original_max_position_embeddings=64
  ),
)


class RandomLayer(NamedTuple):
  """Parameters and inputs of one layer, float64."""

  mla: oracle.MLAParams
  indexer: oracle.IndexerParams
  x: np.ndarray  # [B, T, E]
  positions: np.ndarray  # [B, T]


def random_layer(seed, config=CONFIG, *, batch=2, length=12):
  """Returns a `RandomLayer`; matrices keep the scale of what they multiply."""
  rng = np.random.default_rng(seed)

  def matrix(fan_in, *shape):
    return rng.normal(size=(*fan_in, *shape)) / np.sqrt(np.prod(fan_in))

  def gain(width):
    return rng.uniform(0.5, 1.5, size=width)

  hidden, heads = config.hidden_size, config.num_attention_heads
  q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
  nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
  index_width = config.index_head_dim
  mla = oracle.MLAParams(
    wq_a=matrix([hidden], q_rank),
    q_norm=gain(q_rank),
    wq_b=matrix([q_rank], heads, nope + rope),
    wkv_a=matrix([hidden], kv_rank + rope),
    kv_norm=gain(kv_rank),
    wkv_b=matrix([kv_rank], heads, nope + config.v_head_dim),
    wo=matrix([heads, config.v_head_dim], hidden),
  )
  indexer = oracle.IndexerParams(
    wq_b=matrix([q_rank], config.index_n_heads, index_width),
    wk=matrix([hidden], index_width),
    k_norm_scale=gain(index_width),
    k_norm_bias=rng.normal(size=index_width) / 2,
    weights_proj=matrix([hidden], config.index_n_heads),
  )
  positions = np.broadcast_to(np.arange(length), (batch, length))
  return RandomLayer(
    mla, indexer, rng.normal(size=(batch, length, hidden)), positions
  )
