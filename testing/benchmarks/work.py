"""How much arithmetic a DSA layer's definition needs, counted from shapes.

Two operations (a multiply and an add) for each pair of numbers in a product:

    projections  every token: wq_a, wq_b, wkv_a, wkv_b, wo and the indexer's
    indexer      every visible pair: I * D
    attention    every selected pair: N * (P + R + V), the expanded form

A gradient costs twice the forward pass again for the projections and the
attention. The indexer's scores select and are not differentiated; with the
indexer's loss, the selected pairs are scored and differentiated once more.
"""

from typing import Literal

import dsa

Pass = Literal["forward", "gradient", "gradient with indexer loss"]


def visible_pairs(length: int) -> int:
  """Pairs of a query and a key not later than it."""
  return length * (length + 1) // 2


def selected_pairs(length: int, topk: int) -> int:
  """Pairs of a query and one of its min(topk, visible) selected keys."""
  full = max(length - topk, 0)
  return visible_pairs(min(length, topk)) + full * topk


def operations(config: dsa.DSAConfig, length: int, what: Pass) -> int:
  """Floating-point operations that the definition needs.

  Args:
    config: The sizes.
    length: T = S, one sequence.
    what: The pass.

  Returns:
    Operations, a multiply and an add counted as two.
  """
  heads = config.num_attention_heads
  nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
  latent, value = config.kv_lora_rank, config.v_head_dim
  mla = (
    config.hidden_size * config.q_lora_rank
    + config.q_lora_rank * heads * (nope + rope)
    + config.hidden_size * (latent + rope)
    + latent * heads * (nope + value)
    + heads * value * config.hidden_size
  )
  index_width = config.index_n_heads * config.index_head_dim
  indexer = config.q_lora_rank * index_width + config.hidden_size * (
    config.index_head_dim + config.index_n_heads
  )
  selected = selected_pairs(length, config.index_topk)
  attention = selected * heads * (nope + rope + value)
  forward = length * (mla + indexer) + attention
  forward += visible_pairs(length) * index_width
  differentiated = 0
  if what != "forward":
    differentiated = length * mla + attention
  if what == "gradient with indexer loss":
    # Scored again at the selected keys: half a pass more than its gradient.
    differentiated += length * indexer + selected * index_width * 3 // 2
  return 2 * (forward + 2 * differentiated)
