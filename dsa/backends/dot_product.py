"""The readable definition: expanded heads, one masked softmax over all keys.

    out = softmax(scale * q k^T over the selected keys) v

Cost and memory grow with T * S * N. Every other backend is held against it.
"""

import jax
import jax.numpy as jnp

from dsa import mla
from dsa.backends import contract, masking
from dsa.selection import Selection


def dot_product() -> mla.Backend:
  """Makes the backend that other backends are held against.

  Returns:
    A backend that offers `with_probs`.
  """

  def with_probs(
    inputs: mla.MLAInputs, selection: Selection, *, scale: float
  ) -> tuple[jax.Array, jax.Array]:
    sizes = contract.check_inputs(inputs, selection)
    inputs, poisoned = masking.isolate_nonfinite(inputs, selection)
    q, k, v = mla.expand_heads(inputs)
    mask = selection.mask(sizes["S"])  # [B, T, S]
    probs = mla.expanded_probs(q, k, mask, scale=scale)  # [B, N, T, S]
    out = jnp.einsum(
      "bnts,bsnv->btnv", probs, v, preferred_element_type=jnp.float32
    )
    out = masking.finish(out.astype(q.dtype), selection, poisoned)
    return out, mla.mean_probs_at(probs, selection)

  def attend(
    inputs: mla.MLAInputs, selection: Selection, *, scale: float
  ) -> jax.Array:
    return with_probs(inputs, selection, scale=scale)[0]

  return contract.KernelBackend(attend, with_probs=with_probs)
