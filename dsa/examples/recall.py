"""How much of the attention a choice of keys keeps.

With p the dense attention distribution of a query, mean over heads, a choice
of keys keeps the share

    recall = sum over chosen s of p_s        mean over queries

of its mass. A query with v visible keys keeps min(k, v) / v of it by a random
choice of k of them, on average: each is then chosen equally often.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import dsa
from dsa import mla


class Recall[Leaf](NamedTuple):
  """Shares of the dense attention mass, float32 from 0 to 1.

  Attributes:
    selected: What the indexer's selection keeps.
    recent: What the k most recent visible keys keep.
    random: What k random visible keys keep, on average.
    best: What the k keys with the most mass keep: no choice keeps more.
  """

  selected: Leaf
  recent: Leaf
  random: Leaf
  best: Leaf


def dense_probs(
  params: dsa.MLAParams[jax.Array], x: jax.Array, config: dsa.DSAConfig
) -> jax.Array:
  """The dense attention distribution of each query, mean over heads.

  Args:
    params: Weights of the attention.
    x: Hidden states [B, T, E] of whole sequences, S = T.
    config: The sizes.

  Returns:
    float32 [B, T, S]: zero at keys that are later than the query.
  """
  batch, tokens, _ = x.shape
  positions = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
  q_latent = dsa.query_latent(params, x, config)
  inputs = dsa.MLAInputs(
    *dsa.mla_queries(params, q_latent, positions, config),
    *dsa.kv_latents(params, x, positions, config),
    *mla.split_wkv_b(params, config),
  )
  q, k, _ = mla.expand_heads(inputs)
  mask = jnp.broadcast_to(visible_keys(tokens), (batch, tokens, tokens))
  probs = mla.expanded_probs(q, k, mask, scale=config.softmax_scale)
  return jnp.mean(probs, axis=1)


def visible_keys(tokens: int) -> jax.Array:
  """bool [1, T, S]: the keys that are not later than the query, S = T."""
  ids = jnp.ones((1, tokens), jnp.int32)
  return dsa.visible_mask(ids, ids)


def kept_share(probs: jax.Array, mask: jax.Array) -> jax.Array:
  """The share of the mass that a choice of keys keeps.

  Args:
    probs: float32 [B, T, S], each query's mass sums to 1.
    mask: bool, broadcastable to it: the chosen keys.

  Returns:
    float32 scalar, mean over queries.
  """
  return jnp.mean(jnp.sum(jnp.where(mask, probs, 0.0), axis=-1))


def measure_recall(
  probs: jax.Array, selection: dsa.Selection, *, topk: int
) -> Recall[jax.Array]:
  """Compares a selection with choices that know less or more.

  Args:
    probs: float32 [B, T, S], mass of each visible key; S = T.
    selection: The keys that the indexer selected.
    topk: k, how many keys each choice may take.

  Returns:
    The shares, mean over queries.
  """
  tokens = probs.shape[-1]
  visible = visible_keys(tokens)
  order = jnp.arange(tokens)
  is_recent = visible & (order[:, None] - order < topk)
  chance = jnp.minimum(topk / (order + 1.0), 1.0)[:, None]  # [T, 1]
  best = dsa.topk_mask(probs, topk, visible)
  return Recall(
    selected=kept_share(probs, selection.mask(tokens)),
    recent=kept_share(probs, is_recent),
    random=kept_share(probs * chance, visible),
    best=kept_share(probs, best),
  )
