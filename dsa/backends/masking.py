"""What an attention kernel cannot promise for rows under a mask.

A kernel multiplies every key of a block, masked or not, so a key of NaN that
nobody selected still reaches the block's answers as 0 * NaN, forward and
backward. And a query that selected nothing has no softmax. Both are settled
around the kernel instead of inside it:

    clean, poisoned = isolate_nonfinite(inputs, selection)  # finite only
    out = finish(kernel(clean), selection, poisoned)  # zeros and NaN put in

Both select whole rows by `where`, so the rows that they replace pass a
gradient of exactly zero to the kernel, whatever the gradient of `out` is. A
kernel that reads selected keys alone is spared them: `skip_nonfinite`.
"""

import jax
import jax.numpy as jnp

from dsa.mla import MLAInputs
from dsa.selection import Selection


def isolate_nonfinite(
  inputs: MLAInputs, selection: Selection
) -> tuple[MLAInputs, jax.Array]:
  """Replaces tokens that hold a NaN or an infinity by zeros.

  Args:
    inputs: The latent form.
    selection: The selected keys.

  Returns:
    The inputs with the rows of such tokens zeroed, and bool [B, T]: the
    queries whose answer is NaN, because they are such a token or selected one.
  """
  bad_query, bad_key = _bad_queries(inputs), _bad_keys(inputs)
  clean = _zero_queries(inputs, bad_query)._replace(
    kv_latent=jnp.where(bad_key[:, :, None], 0, inputs.kv_latent),
    k_rope=jnp.where(bad_key[:, :, None], 0, inputs.k_rope),
  )
  selected_bad = _at(bad_key, selection.indices) & (selection.indices >= 0)
  return clean, bad_query | selected_bad.any(axis=-1)


def skip_nonfinite(
  inputs: MLAInputs, selection: Selection
) -> tuple[MLAInputs, Selection, jax.Array]:
  """Takes tokens that hold a NaN or an infinity out of the selection.

  No key is copied: that is for a kernel which reads selected keys alone.

  Args:
    inputs: The latent form.
    selection: The selected keys.

  Returns:
    The inputs with such queries zeroed, the selection with -1 in place of such
    keys, and bool [B, T]: the queries whose answer is NaN.
  """
  bad_query, indices = _bad_queries(inputs), selection.indices
  if indices.shape[1] * indices.shape[2] < inputs.kv_latent.shape[1]:
    # As in decoding: few keys are selected of many.
    selected = inputs._replace(
      kv_latent=_at(inputs.kv_latent, indices),
      k_rope=_at(inputs.k_rope, indices),
    )
    selected_bad = _bad_keys(selected)
  else:
    selected_bad = _at(_bad_keys(inputs), indices)
  selected_bad &= indices >= 0
  return (
    _zero_queries(inputs, bad_query),
    Selection(jnp.where(selected_bad, -1, indices)),
    bad_query | selected_bad.any(axis=-1),
  )


def _bad_queries(inputs: MLAInputs) -> jax.Array:
  """bool [B, T]: the queries that are not finite."""
  return ~(
    jnp.isfinite(inputs.q_nope).all(axis=(-2, -1))
    & jnp.isfinite(inputs.q_rope).all(axis=(-2, -1))
  )


def _bad_keys(inputs: MLAInputs) -> jax.Array:
  """bool [B, ...]: the keys that are not finite."""
  return ~(
    jnp.isfinite(inputs.kv_latent).all(axis=-1)
    & jnp.isfinite(inputs.k_rope).all(axis=-1)
  )


def _zero_queries(inputs: MLAInputs, bad_query: jax.Array) -> MLAInputs:
  bad_query = bad_query[:, :, None, None]
  return inputs._replace(
    q_nope=jnp.where(bad_query, 0, inputs.q_nope),
    q_rope=jnp.where(bad_query, 0, inputs.q_rope),
  )


def _at(table: jax.Array, indices: jax.Array) -> jax.Array:
  """Rows [B, T, K, ...] of a table [B, S, ...]; any row for -1."""
  return jax.vmap(lambda rows, i: rows.at[i].get(mode="clip"))(table, indices)


def finish(
  out: jax.Array, selection: Selection, poisoned: jax.Array
) -> jax.Array:
  """Puts in the answers that a kernel cannot give.

  Args:
    out: [B, T, N, V], the kernel's answers; anything in the rows replaced.
    selection: The selected keys.
    poisoned: bool [B, T], from `isolate_nonfinite`.

  Returns:
    [B, T, N, V]: zero for queries that selected nothing, NaN for poisoned
    ones, `out` for the others. Only these others pass a gradient on: a NaN
    shows in the answer of its own queries and in no gradient.
  """
  empty = ~(selection.indices >= 0).any(axis=-1)
  out = jnp.where(poisoned[:, :, None, None], jnp.nan, out)
  return jnp.where(empty[:, :, None, None], 0, out)
