"""What a decode step is compared with: dense MLA over the same cache.

    logits = scale * (q_nope w_uk . latent + q_rope . k_rope)     of all keys
    out    = (softmax of logits . latent) w_uv

in absorbed form, without an indexer. Keys are read once, in tiles whose logits
stay in a cache, with a running maximum and sum: the fastest of the ways that
were tried to write it in JAX for a CPU.
"""

import functools

import jax
import jax.numpy as jnp

import dsa
from dsa import mla
from dsa.cache_buffers import write_rows

_TILE_ROWS, _SMALLEST_TILE = 2048, 512


def dense_step(
  config: dsa.DSAConfig,
  params: dsa.DSAParams[jax.Array],
  x: jax.Array,
  cache: dsa.Cache,
) -> tuple[jax.Array, dsa.Cache]:
  """Appends a token to each row and attends to all that the row holds.

  Args:
    config: The sizes.
    params: Of the layer; the indexer is not used.
    x: Hidden states [B, 1, E].
    cache: Of plain arrays, with room for a token in each row.

  Returns:
    [B, 1, E] and the cache.
  """
  order = cache.length[:, None]
  latents = mla.kv_latents(params.mla, x, order, config)
  latent, k_rope = write_rows(
    (cache.kv_latent, cache.k_rope), latents, order, jnp.ones_like(order, bool)
  )
  q_latent = mla.query_latent(params.mla, x, config)
  q_nope, q_rope = mla.mla_queries(params.mla, q_latent, order, config)
  w_uk, w_uv = mla.split_wkv_b(params.mla, config)
  inputs = mla.MLAInputs(q_nope, q_rope, latent, k_rope, w_uk, w_uv)
  out = _attend(inputs, cache.length, scale=config.softmax_scale)
  out = mla.output_projection(params.mla, mla.expand_values(out, w_uv))
  return out, cache._replace(
    kv_latent=latent, k_rope=k_rope, length=cache.length + 1
  )


def _attend(
  inputs: mla.MLAInputs, last: jax.Array, *, scale: float
) -> jax.Array:
  """[B, 1, N, C]: the latents of the keys up to `last` [B], attended to."""
  q, q_rope = mla.absorb_queries(inputs)[:, 0], inputs.q_rope[:, 0]
  batch, heads, width = q.shape
  length = inputs.kv_latent.shape[1]
  tile = min(max(_TILE_ROWS // batch, _SMALLEST_TILE), length)
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def add(
    i: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    largest, total, out = sums
    start = jnp.minimum(i * tile, length - tile)
    latent, k_rope = (
      jax.lax.dynamic_slice_in_dim(table, start, tile, axis=1)
      for table in (inputs.kv_latent, inputs.k_rope)
    )
    logits = dot("bsc,bnc->bsn", latent, q) + dot(
      "bsr,bnr->bsn", k_rope, q_rope
    )
    keys = start + jnp.arange(tile)
    # A last tile that was moved back holds keys that were added before.
    new = (keys >= i * tile) & (keys <= last[:, None])  # [B, S]
    logits = jnp.where(new[..., None], scale * logits, -jnp.inf)
    highest = jnp.maximum(largest, jnp.max(logits, axis=1))
    weights = jnp.exp(logits - highest[:, None])
    shrink = jnp.exp(largest - highest)
    out = out * shrink[..., None] + dot("bsn,bsc->bnc", weights, latent)
    return highest, total * shrink + jnp.sum(weights, axis=1), out

  start = jnp.full((batch, heads), -1e30), jnp.zeros((batch, heads))
  _, total, out = jax.lax.fori_loop(
    0,
    (jnp.max(last) + tile) // tile,
    add,
    (*start, jnp.zeros((batch, heads, width))),
  )
  return (out / total[..., None]).astype(inputs.q_nope.dtype)[:, None]
