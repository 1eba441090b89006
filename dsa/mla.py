"""Multi-head Latent Attention over selected keys.

    q      = q_latent wq_b                          [nope P | rope R]
    latent = RMSNorm(first C dims of x wkv_a)       q_latent = RMSNorm(x wq_a)
    k_rope = the last R dims of x wkv_a             one for all heads
    k, v   = latent w_uk, latent w_uv               wkv_b = [w_uk | w_uv]
    logits = scale * (q_nope . k + rope(q_rope) . rope(k_rope))
    out    = (softmax over the selected keys of logits) v wo

Two forms give the same answer. MHA expands the latent to a key and a value for
each head. MQA absorbs w_uk into the query and w_uv into the output, so that all
heads share the latent: (q_nope w_uk) . latent.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dsa import norms, rope
from dsa.checks import check_shape
from dsa.config import DSAConfig
from dsa.params import MLAParams
from dsa.selection import Selection, check_selection
from dsa.softmax import masked_softmax


class MLAInputs(NamedTuple):
  """What attention works on, before any head is expanded.

  Attributes:
    q_nope: [B, T, N, P], queries without position.
    q_rope: [B, T, N, R], queries with RoPE applied.
    kv_latent: [B, S, C], after RMSNorm.
    k_rope: [B, S, R], the rope key that all heads share, RoPE applied.
    w_uk: [C, N, P], latent to keys.
    w_uv: [C, N, V], latent to values.
  """

  q_nope: jax.Array
  q_rope: jax.Array
  kv_latent: jax.Array
  k_rope: jax.Array
  w_uk: jax.Array
  w_uv: jax.Array


class Backend(Protocol):
  """An attention kernel: `attend(inputs, selection, *, scale) -> [B, T, N, V]`.

  `dsa.backends.contract` says what it must hold.
  """

  def __call__(
    self, inputs: MLAInputs, selection: Selection, *, scale: float
  ) -> jax.Array:
    """Attends to the selected keys alone."""
    ...


def query_latent(
  params: MLAParams[jax.Array], x: jax.Array, config: DSAConfig
) -> jax.Array:
  """The query latent, which the attention and the indexer share.

  Args:
    params: Weights of the attention.
    x: Hidden states [B, T, E].
    config: The sizes.

  Returns:
    [B, T, L], after its RMSNorm.

  Raises:
    ValueError: If a shape does not fit the configuration.
  """
  check_shape("x", x, "B T E", E=config.hidden_size)
  latent = jnp.einsum("bte,el->btl", x, params.wq_a)
  return norms.rms_norm(latent, params.q_norm, eps=config.latent_norm_eps)


def mla_queries(
  params: MLAParams[jax.Array],
  q_latent: jax.Array,
  positions: jax.Array,
  config: DSAConfig,
) -> tuple[jax.Array, jax.Array]:
  """Queries of the attention heads.

  Args:
    params: Weights of the attention.
    q_latent: [B, T, L].
    positions: Integers [B, T].
    config: The sizes.

  Returns:
    q_nope [B, T, N, P] and q_rope [B, T, N, R], RoPE applied.

  Raises:
    ValueError: If a shape does not fit the configuration.
    TypeError: If `positions` are not integers.
  """
  check_shape("q_latent", q_latent, "B T L", L=config.q_lora_rank)
  q = jnp.einsum("btl,lnq->btnq", q_latent, params.wq_b)
  q_nope, q_rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
  return q_nope, rope.yarn_rope_interleaved(q_rope, positions, config.rope)


def kv_latents(
  params: MLAParams[jax.Array],
  x: jax.Array,
  positions: jax.Array,
  config: DSAConfig,
) -> tuple[jax.Array, jax.Array]:
  """What is kept of each token for later queries: C + R numbers.

  Args:
    params: Weights of the attention.
    x: Hidden states [B, S, E].
    positions: Integers [B, S].
    config: The sizes.

  Returns:
    kv_latent [B, S, C] after RMSNorm, and k_rope [B, S, R], RoPE applied.

  Raises:
    ValueError: If a shape does not fit the configuration.
    TypeError: If `positions` are not integers.
  """
  check_shape("x", x, "B S E", E=config.hidden_size)
  down = jnp.einsum("bse,ec->bsc", x, params.wkv_a)
  latent, k_rope = jnp.split(down, [config.kv_lora_rank], axis=-1)
  latent = norms.rms_norm(latent, params.kv_norm, eps=config.latent_norm_eps)
  return latent, rope.yarn_rope_interleaved(k_rope, positions, config.rope)


def split_wkv_b(
  params: MLAParams[jax.Array], config: DSAConfig
) -> tuple[jax.Array, jax.Array]:
  """The two halves of wkv_b.

  Args:
    params: Weights of the attention.
    config: The sizes.

  Returns:
    w_uk [C, N, P] and w_uv [C, N, V].
  """
  w_uk, w_uv = jnp.split(params.wkv_b, [config.qk_nope_head_dim], axis=-1)
  return w_uk, w_uv


def expand_heads(inputs: MLAInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The MHA form: a query, a key and a value for each head.

  Args:
    inputs: The latent form.

  Returns:
    q [B, T, N, P + R], k [B, S, N, P + R] and v [B, S, N, V].
  """
  q = jnp.concatenate((inputs.q_nope, inputs.q_rope), axis=-1)
  k_nope = jnp.einsum("bsc,cnp->bsnp", inputs.kv_latent, inputs.w_uk)
  heads = k_nope.shape[2]
  k_rope = jnp.broadcast_to(
    inputs.k_rope[:, :, None],
    (*k_nope.shape[:2], heads, q.shape[-1] - k_nope.shape[-1]),
  )
  k = jnp.concatenate((k_nope, k_rope), axis=-1)
  v = jnp.einsum("bsc,cnv->bsnv", inputs.kv_latent, inputs.w_uv)
  return q, k, v


def expanded_probs(
  q: jax.Array, k: jax.Array, mask: jax.Array, *, scale: float
) -> jax.Array:
  """The MHA form's attention probabilities.

  Args:
    q: [B, T, N, P + R].
    k: [B, S, N, P + R].
    mask: bool [B, T, S], the keys that each query attends to.
    scale: Multiplies the logits.

  Returns:
    float32 [B, N, T, S]: zero outside the mask, rows with a mark sum to 1.
  """
  logits = jnp.einsum(
    "btnq,bsnq->bnts", q, k, preferred_element_type=jnp.float32
  )
  return masked_softmax(scale * logits, mask[:, None])


def mean_probs_at(probs: jax.Array, selection: Selection) -> jax.Array:
  """The heads' mean probability of each selected key.

  Args:
    probs: float32 [B, N, T, S].
    selection: The selected keys.

  Returns:
    float32 [B, T, K], zero where the index is -1; detached.
  """
  mean = jax.lax.stop_gradient(jnp.mean(probs, axis=1))  # [B, T, S]
  selected = jnp.take_along_axis(
    mean, jnp.maximum(selection.indices, 0), axis=-1
  )
  return jnp.where(selection.indices < 0, 0.0, selected)


def attend_with_probs(
  backend: Backend | Callable[..., jax.Array],
  inputs: MLAInputs,
  selection: Selection,
  *,
  scale: float,
) -> tuple[jax.Array, jax.Array]:
  """Attends, and tells how much each selected key counted.

  Args:
    backend: The attention kernel. Where it does not offer `with_probs`, logits
      are computed a second time.
    inputs: The latent form.
    selection: The selected keys.
    scale: Multiplies the logits.

  Returns:
    [B, T, N, V], and the heads' mean probabilities, float32 [B, T, K],
    detached.
  """
  with_probs = getattr(backend, "with_probs", None)
  if with_probs is not None:
    out, mean = with_probs(inputs, selection, scale=scale)
    return out, mean
  q, k, _ = expand_heads(jax.lax.stop_gradient(inputs))
  mask = selection.mask(k.shape[1])
  probs = expanded_probs(q, k, mask, scale=scale)
  out = backend(inputs, selection, scale=scale)
  return out, mean_probs_at(probs, selection)


def absorb_queries(inputs: MLAInputs) -> jax.Array:
  """The MQA form's queries against the latent: q_nope w_uk.

  Args:
    inputs: The latent form.

  Returns:
    [B, T, N, C].
  """
  return jnp.einsum("btnp,cnp->btnc", inputs.q_nope, inputs.w_uk)


def expand_values(out_latent: jax.Array, w_uv: jax.Array) -> jax.Array:
  """The MQA form's output in the heads' own width.

  Args:
    out_latent: [B, T, N, C], the attended latents.
    w_uv: [C, N, V].

  Returns:
    [B, T, N, V].
  """
  # Weights first: the products come out faster, of one token above all.
  return jnp.einsum("cnv,btnc->btnv", w_uv, out_latent)


def output_projection(
  params: MLAParams[jax.Array], heads_out: jax.Array
) -> jax.Array:
  """Merges the heads into the residual stream.

  Args:
    params: Weights of the attention.
    heads_out: [B, T, N, V].

  Returns:
    [B, T, E].
  """
  return jnp.einsum("btnv,nve->bte", heads_out, params.wo)


def sparse_mla(
  params: MLAParams[jax.Array],
  x: jax.Array,
  positions: jax.Array,
  selection: Selection,
  config: DSAConfig,
  *,
  backend: Backend | Callable[..., jax.Array],
) -> jax.Array:
  """Attends from each token of a sequence to its selected keys alone.

  Args:
    params: Weights of the attention.
    x: Hidden states [B, T, E].
    positions: Integers [B, T], for RoPE alone.
    selection: Which of the S = T tokens each query attends to.
    config: The sizes, RoPE and the softmax scale.
    backend: The attention kernel.

  Returns:
    [B, T, E]; exactly zero where nothing is selected.

  Raises:
    ValueError: If a shape does not fit the configuration.
    TypeError: If a dtype is not of its kind.
  """
  sizes = check_shape("x", x, "B T E", E=config.hidden_size)
  batch, queries = sizes["B"], sizes["T"]
  check_shape("positions", positions, "B T", B=batch, T=queries)
  check_selection(selection, B=batch, T=queries)
  q_latent = query_latent(params, x, config)
  q_nope, q_rope = mla_queries(params, q_latent, positions, config)
  kv_latent, k_rope = kv_latents(params, x, positions, config)
  w_uk, w_uv = split_wkv_b(params, config)
  inputs = MLAInputs(q_nope, q_rope, kv_latent, k_rope, w_uk, w_uv)
  heads_out = backend(inputs, selection, scale=config.softmax_scale)
  return output_projection(params, heads_out)
