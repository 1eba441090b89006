"""Softmax over the marked entries of a row, safe where nothing is marked.

    softmax(x)[j] = exp(x[j] - m) / sum over marked j of exp(x[j] - m),  m = max

An unmarked entry gets exactly 0 and passes no gradient, whatever it holds; a
row with no mark is all zeros.
"""

import jax
import jax.numpy as jnp


def _shifted(logits: jax.Array, mask: jax.Array, axis: int) -> jax.Array:
  """Logits minus their largest marked one; -inf where unmarked."""
  logits = jnp.where(mask, logits.astype(jnp.float32), -jnp.inf)
  peak = jnp.max(logits, axis=axis, keepdims=True, initial=-jnp.inf)
  # A row with no mark has no peak: -inf - -inf would be NaN.
  peak = jnp.where(jnp.isneginf(peak), 0.0, peak)
  return logits - jax.lax.stop_gradient(peak)


def masked_softmax(
  logits: jax.Array, mask: jax.Array, *, axis: int = -1
) -> jax.Array:
  """Softmax over the marked entries of an axis.

  Args:
    logits: [..., S], any float dtype.
    mask: bool, broadcastable to `logits`.
    axis: The axis of S.

  Returns:
    float32 [..., S]: exactly 0 where unmarked, rows with a mark sum to 1.
  """
  weights = jnp.exp(_shifted(logits, mask, axis))
  total = jnp.sum(weights, axis=axis, keepdims=True)
  weights = weights / jnp.where(total == 0, 1.0, total)
  # A marked NaN or infinity makes its row NaN, but only where it is marked.
  return jnp.where(mask, weights, 0.0)


def masked_log_softmax(logits: jax.Array, mask: jax.Array) -> jax.Array:
  """Logarithm of the softmax over the marked entries of the last axis.

  Args:
    logits: [..., S], any float dtype.
    mask: bool, broadcastable to `logits`.

  Returns:
    float32 [..., S]: finite where marked, 0 where unmarked.
  """
  shifted = _shifted(logits, mask, -1)
  total = jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True)
  log_total = jnp.log(jnp.where(total == 0, 1.0, total))
  return jnp.where(mask, shifted, 0.0) - jnp.where(mask, log_total, 0.0)
