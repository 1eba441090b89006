"""Attention to the selected latents alone: cost grows with T * K, not T * S.

In absorbed (MQA) form all heads of a query share its K selected latents:

    logits[s] = scale * (q_nope w_uk . latent[s] + q_rope . k_rope[s])
    out       = (softmax over selected s of logits . latent[s]) w_uv

which takes T * K * N * (2C + R) multiply-adds. Queries are taken in blocks,
small enough that a block's rows stay in a cache. The backward pass keeps
nothing but the inputs: it gathers each block again and adds the gradients of
the latents up in float32, in the order of the queries.

Source: the MQA form of MLA, arXiv 2405.04434 section 2.1.2; arXiv 2512.02556.
"""

import functools

import jax
import jax.numpy as jnp

from dsa import mla, streaming
from dsa.backends import contract, masking
from dsa.checks import check_count
from dsa.selection import Selection
from dsa.softmax import masked_softmax


def gather(*, block_size: int | None = None) -> mla.Backend:
  """Makes the backend whose cost grows with T * K.

  Args:
    block_size: Queries of each batch row whose keys are gathered at once; by
      default as many as fit a cache.

  Returns:
    A backend that offers `with_probs` and does not read all keys.

  Raises:
    ValueError: If `block_size` is below 1.
    TypeError: If `block_size` is not an integer.
  """
  if block_size is not None:
    block_size = check_count("block_size", block_size)

  def run(
    inputs: mla.MLAInputs,
    selection: Selection,
    *,
    scale: float,
    keep_probs: bool,
  ) -> tuple[jax.Array, ...]:
    contract.check_inputs(inputs, selection)
    inputs, finite, poisoned = masking.skip_nonfinite(inputs, selection)
    tables = inputs.kv_latent, inputs.k_rope
    out_latent, *probs = streaming.map_gathered(
      functools.partial(_attend_block, scale, keep_probs),
      tables,
      finite.indices,
      (mla.absorb_queries(inputs), inputs.q_rope),
      block_size=block_size
      or streaming.gathered_block_size(tables, finite.indices),
    )
    out = mla.expand_values(out_latent, inputs.w_uv)
    return masking.finish(out, selection, poisoned), *probs

  def with_probs(
    inputs: mla.MLAInputs, selection: Selection, *, scale: float
  ) -> tuple[jax.Array, jax.Array]:
    out, probs = run(inputs, selection, scale=scale, keep_probs=True)
    return out, probs

  def attend(
    inputs: mla.MLAInputs, selection: Selection, *, scale: float
  ) -> jax.Array:
    return run(inputs, selection, scale=scale, keep_probs=False)[0]

  return contract.KernelBackend(
    attend, with_probs=with_probs, reads_all_keys=False
  )


def _attend_block(
  scale: float,
  keep_probs: bool,
  queries: tuple[jax.Array, jax.Array],
  rows: tuple[jax.Array, jax.Array],
  valid: jax.Array,
) -> tuple[jax.Array, ...]:
  """Attends from a block of queries to their rows.

  Args:
    scale: Multiplies the logits.
    keep_probs: Whether to return the probabilities' mean.
    queries: [B, T, N, C] against the latent, and [B, T, N, R].
    rows: [B, T, K, C] latents, and [B, T, K, R] rope keys.
    valid: bool [B, T, K].

  Returns:
    [B, T, N, C], the attended latents; if asked for, float32 [B, T, K], the
    probabilities' mean over heads, detached.
  """
  (q_latent, q_rope), (latent, k_rope) = queries, rows
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  # Keys before heads: the product of many rows with few is the faster one.
  logits = dot("btkc,btnc->btkn", latent, q_latent)
  logits += dot("btkr,btnr->btkn", k_rope, q_rope)
  probs = masked_softmax(scale * logits, valid[..., None], axis=2)
  out = dot("btkn,btkc->btnc", probs.astype(latent.dtype), latent)
  out = out.astype(q_latent.dtype)
  if not keep_probs:
    return (out,)
  return out, jnp.mean(jax.lax.stop_gradient(probs), axis=-1)
