"""The indexer's loss: how far its distribution is from the attention's.

For each valid query, with p the mean over heads of the attention distribution
(detached) and I the index scores, both over the same keys:

    KL(p || softmax(I)) = sum_s p_s (log p_s - log softmax(I)_s)

averaged over the valid queries. Its gradient in I is softmax(I) - p: none of it
goes through the attention. Float32, and no epsilon inside a logarithm.

Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1.1, equations 3 and 4.
"""

import jax
import jax.numpy as jnp

from dsa import mesh
from dsa.checks import check_dtype, check_shape
from dsa.softmax import masked_log_softmax


def indexer_kl(
  index_scores: jax.Array, probs: jax.Array, mask: jax.Array
) -> jax.Array:
  """KL(p || softmax(I)) of each query.

  Args:
    index_scores: I, float32 [B, T, K], unmasked.
    probs: p, float32 [B, T, K]; sums to 1 over the marked keys; detached.
    mask: bool [B, T, K], the keys that both distributions run over.

  Returns:
    float32 [B, T], in nats; 0 for a query with no key.

  Raises:
    ValueError: If the shapes differ.
    TypeError: If a dtype is not of its kind.
  """
  sizes = check_shape("index_scores", index_scores, "B T K")
  check_shape("probs", probs, "B T K", **sizes)
  check_shape("mask", mask, "B T K", **sizes)
  check_dtype("index_scores", index_scores, jnp.floating)
  check_dtype("probs", probs, jnp.floating)
  check_dtype("mask", mask, jnp.bool_)
  probs = jax.lax.stop_gradient(probs).astype(jnp.float32)
  counted = mask & (probs > 0)  # p log p is 0 at p = 0
  log_probs = jnp.log(jnp.where(counted, probs, 1.0))
  log_index = masked_log_softmax(index_scores, mask)
  return jnp.sum(
    jnp.where(counted, probs * (log_probs - log_index), 0.0), axis=-1
  )


def mean_over_valid(
  values: jax.Array, valid: jax.Array, *, axes: tuple[str, ...] = ()
) -> jax.Array:
  """Averages over the queries that count.

  Args:
    values: float32 [B, T].
    valid: bool [B, T], false for padding.
    axes: Manual mesh axes over which queries are spread.

  Returns:
    float32 scalar; 0 where no query is valid.
  """
  total = mesh.sum_over(axes, jnp.sum(jnp.where(valid, values, 0.0)))
  return total / jnp.maximum(mesh.sum_over(axes, jnp.sum(valid)), 1)


def indexer_kl_loss(
  index_scores: jax.Array,
  probs: jax.Array,
  mask: jax.Array,
  *,
  valid: jax.Array | None = None,
) -> jax.Array:
  """The indexer's loss: KL(p || softmax(I)), averaged over valid queries.

  Args:
    index_scores: I, float32 [B, T, K], unmasked.
    probs: p, float32 [B, T, K]; sums to 1 over the marked keys; detached.
    mask: bool [B, T, K], the keys that both distributions run over: the visible
      ones while the indexer warms up, the selected ones after that.
    valid: bool [B, T], the queries that count; by default those with a key.

  Returns:
    float32 scalar, in nats.

  Raises:
    ValueError: If the shapes differ.
    TypeError: If a dtype is not of its kind.
  """
  divergences = indexer_kl(index_scores, probs, mask)
  if valid is None:
    valid = jnp.any(mask, axis=-1)
  check_shape("valid", valid, "B T", B=mask.shape[0], T=mask.shape[1])
  check_dtype("valid", valid, jnp.bool_)
  return mean_over_valid(divergences, valid)
