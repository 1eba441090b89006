"""The layer that figures are quoted for, and the passes that are compiled."""

from typing import Any

import jax
import jax.numpy as jnp

import dsa
from testing.benchmarks import work

# By the name of the flag.
PASSES: dict[str, work.Pass] = {
  "forward": "forward",
  "gradient": "gradient",
  "gradient_with_loss": "gradient with indexer loss",
}


def small_config(topk: int) -> dsa.DSAConfig:
  """The size that figures are quoted at."""
  return dsa.DSAConfig(
    hidden_size=1024,
    num_hidden_layers=1,
    num_attention_heads=16,
    q_lora_rank=512,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_n_heads=16,
    index_head_dim=128,
    index_topk=topk,
    rope=dsa.RopeConfig(),
  )


def layer_pass(
  config: dsa.DSAConfig,
  backend: dsa.Backend,
  what: work.Pass,
  query_chunk_size: int | None,
) -> Any:
  """The function of (params, x, cotangent) that is compiled."""
  attention = dsa.make_attention(
    config,
    backend=backend,
    indexer_loss=what == "gradient with indexer loss",
    query_chunk_size=query_chunk_size,
  )

  def value(
    params: dsa.DSAParams[jax.Array], x: jax.Array, cotangent: jax.Array
  ) -> jax.Array:
    result = attention(params, x)
    return jnp.vdot(result.out, cotangent) + result.indexer_loss

  def forward(
    params: dsa.DSAParams[jax.Array], x: jax.Array, cotangent: jax.Array
  ) -> dsa.AttentionResult:
    del cotangent
    return attention(params, x)

  return forward if what == "forward" else jax.grad(value, argnums=(0, 1))
