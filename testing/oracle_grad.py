"""Gradients of the oracle's steps, derived by hand, in NumPy float64.

Each `f_vjp` takes what `f` takes and the cotangent g of its output, and returns
the gradients of sum(f * g) by f's arguments. The selection is held fixed, as
it is in the library. With P the probabilities of one query and head over its
selected keys, z its logits before the scale and o its output:

  dP = g . v,  dz = scale P (dP - sum P dP),  dq = dz k,  dk = dz q,  dv = P g

A row whose cotangent is exactly zero contributes exactly zero, whatever the
row holds: padding may be NaN.
"""

import numpy as np

from testing import oracle
from testing.oracle import f64


def _live(x, cotangent):
  """Returns x with zeros in the rows [B, T] whose cotangent is all zero."""
  x, cotangent = f64(x), f64(cotangent)
  live = np.any(cotangent != 0, axis=tuple(range(2, cotangent.ndim)))
  x = x.copy()
  x[~live] = 0
  return x


def rms_norm_vjp(x, scale, cotangent, eps=oracle.NORM_EPS):
  """Returns the gradients by x [B, T, W] and scale [W]."""
  x, g = _live(x, cotangent), f64(cotangent)
  norm = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)
  d_scale = np.sum(g * x / norm, axis=(0, 1))
  g = g * f64(scale)
  d_x = g / norm - x * np.mean(g * x, axis=-1, keepdims=True) / norm**3
  return d_x, d_scale


def layer_norm_vjp(x, scale, cotangent, eps=oracle.NORM_EPS):
  """Returns the gradients by x [B, T, W], scale [W] and bias [W]."""
  x, g = _live(x, cotangent), f64(cotangent)
  x = x - np.mean(x, axis=-1, keepdims=True)
  norm = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)
  normal = x / norm
  d_scale, d_bias = np.sum(g * normal, axis=(0, 1)), np.sum(g, axis=(0, 1))
  g = g * f64(scale)
  along = np.mean(g * normal, axis=-1, keepdims=True)
  d_x = (g - np.mean(g, axis=-1, keepdims=True) - normal * along) / norm
  return d_x, d_scale, d_bias


def rope_concat_vjp(positions, frequencies, cotangent):
  """Returns the gradient by x: the cotangent turned backwards."""
  return oracle.rope_concat(cotangent, -f64(positions), frequencies)


def rope_interleaved_vjp(positions, frequencies, cotangent):
  """Returns the gradient by x: the cotangent turned backwards."""
  return oracle.rope_interleaved(cotangent, -f64(positions), frequencies)


def index_rope_vjp(positions, config, cotangent):
  """Returns the gradient by x: the cotangent turned backwards."""
  return oracle.index_rope(cotangent, -f64(positions), config)


def query_latent_vjp(params, x, cotangent):
  """Returns the gradients by x [B, T, E], wq_a [E, L] and q_norm [L]."""
  x = _live(x, cotangent)
  latent = np.einsum("bte,el->btl", x, f64(params.wq_a))
  d_latent, d_norm = rms_norm_vjp(latent, params.q_norm, cotangent)
  d_x = np.einsum("btl,el->bte", d_latent, f64(params.wq_a))
  return d_x, np.einsum("bte,btl->el", x, d_latent), d_norm


def mla_queries_vjp(params, q_latent, positions, config, d_nope, d_rope):
  """Returns the gradients by q_latent [B, T, L] and wq_b [L, N, P + R].

  Args:
    params: `MLAParams`.
    q_latent: [B, T, L].
    positions: [B, T].
    config: `Config`.
    d_nope: cotangent of q_nope [B, T, N, P].
    d_rope: cotangent of q_rope [B, T, N, R].
  """
  frequencies = oracle.rope_frequencies(config.rope, config.qk_rope_head_dim)
  d_rope = rope_interleaved_vjp(positions, frequencies, d_rope)
  d_q = np.concatenate([f64(d_nope), d_rope], axis=-1)  # [B, T, N, P + R]
  q_latent = _live(q_latent, d_q)
  d_latent = np.einsum("btnd,lnd->btl", d_q, f64(params.wq_b))
  return d_latent, np.einsum("btl,btnd->lnd", q_latent, d_q)


def mla_latents_vjp(params, x, positions, config, d_latent, d_rope):
  """Returns the gradients by x [B, S, E], wkv_a [E, C + R] and kv_norm [C].

  Args:
    params: `MLAParams`.
    x: [B, S, E].
    positions: [B, S].
    config: `Config`.
    d_latent: cotangent of kv_latent [B, S, C].
    d_rope: cotangent of k_rope [B, S, R].
  """
  x = _live(x, np.concatenate([f64(d_latent), f64(d_rope)], axis=-1))
  wkv_a = f64(params.wkv_a)
  latent = np.einsum("bse,ec->bsc", x, wkv_a[:, : config.kv_lora_rank])
  d_latent, d_norm = rms_norm_vjp(latent, params.kv_norm, d_latent)
  frequencies = oracle.rope_frequencies(config.rope, config.qk_rope_head_dim)
  d_rope = rope_interleaved_vjp(positions, frequencies, d_rope)
  d_kv = np.concatenate([d_latent, d_rope], axis=-1)  # [B, S, C + R]
  d_x = np.einsum("bsd,ed->bse", d_kv, wkv_a)
  return d_x, np.einsum("bse,bsd->ed", x, d_kv), d_norm


def expand_heads_vjp(kv_latent, w_uk, w_uv, d_k_nope, d_v):
  """Returns the gradients by kv_latent, w_uk and w_uv.

  Args:
    kv_latent: [B, S, C].
    w_uk: [C, N, P].
    w_uv: [C, N, V].
    d_k_nope: cotangent of k_nope [B, S, N, P].
    d_v: cotangent of v [B, S, N, V].
  """
  kv_latent = _live(kv_latent, np.concatenate([d_k_nope, d_v], axis=-1))
  d_latent = np.einsum("bsnp,cnp->bsc", d_k_nope, f64(w_uk))
  d_latent += np.einsum("bsnv,cnv->bsc", d_v, f64(w_uv))
  d_uk = np.einsum("bsc,bsnp->cnp", kv_latent, d_k_nope)
  d_uv = np.einsum("bsc,bsnv->cnv", kv_latent, d_v)
  return d_latent, d_uk, d_uv


def attend_vjp(inputs, mask, cotangent, *, scale):
  """Returns the gradients of a backend by its inputs, as `MLAInputs`.

  Args:
    inputs: `MLAInputs`.
    mask: bool [B, T, S].
    cotangent: [B, T, N, V].
    scale: the softmax scale.
  """
  inputs = oracle.MLAInputs(*map(f64, inputs))
  k_nope, v = oracle.expand_heads(inputs.kv_latent, inputs.w_uk, inputs.w_uv)
  probs = oracle.attention_probs(inputs, mask, scale=scale)  # [B, N, T, S]
  d_q_nope, d_q_rope = map(np.zeros_like, (inputs.q_nope, inputs.q_rope))
  d_k_nope, d_k_rope, d_v = map(np.zeros_like, (k_nope, inputs.k_rope, v))
  for b, t in np.argwhere(np.any(mask, axis=-1)):
    g = f64(cotangent[b, t])  # [N, V]
    if not np.any(g):
      continue
    keys = np.flatnonzero(mask[b, t])
    p = probs[b, :, t][:, keys]  # [N, K]
    d_p = np.einsum("nv,knv->nk", g, v[b, keys])
    d_z = scale * p * (d_p - np.sum(p * d_p, axis=-1, keepdims=True))
    d_q_nope[b, t] = np.einsum("nk,knp->np", d_z, k_nope[b, keys])
    d_q_rope[b, t] = np.einsum("nk,kr->nr", d_z, inputs.k_rope[b, keys])
    d_k_nope[b, keys] += np.einsum("nk,np->knp", d_z, inputs.q_nope[b, t])
    d_k_rope[b, keys] += np.einsum("nk,nr->kr", d_z, inputs.q_rope[b, t])
    d_v[b, keys] += np.einsum("nk,nv->knv", p, g)
  d_latent, d_uk, d_uv = expand_heads_vjp(
    inputs.kv_latent, inputs.w_uk, inputs.w_uv, d_k_nope, d_v
  )
  return oracle.MLAInputs(d_q_nope, d_q_rope, d_latent, d_k_rope, d_uk, d_uv)


def sparse_mla_vjp(params, x, positions, mask, config, cotangent):
  """Returns the gradients by the parameters, `MLAParams`, and x [B, T, E].

  Args:
    params: `MLAParams`.
    x: [B, T, E].
    positions: [B, T].
    mask: bool [B, T, T].
    config: `Config`.
    cotangent: [B, T, E].
  """
  g = f64(cotangent)
  scale = oracle.softmax_scale(config)
  q_latent = oracle.query_latent(params, x)
  inputs = oracle.mla_inputs(params, x, positions, config)
  heads = oracle.attend(inputs, mask, scale=scale)  # [B, T, N, V]
  d_wo = np.einsum("btnv,bte->nve", heads, g)
  d_heads = np.einsum("bte,nve->btnv", g, f64(params.wo))
  d = attend_vjp(inputs, mask, d_heads, scale=scale)
  d_q_latent, d_wq_b = mla_queries_vjp(
    params, q_latent, positions, config, d.q_nope, d.q_rope
  )
  d_x_by_q, d_wq_a, d_q_norm = query_latent_vjp(params, x, d_q_latent)
  d_x_by_kv, d_wkv_a, d_kv_norm = mla_latents_vjp(
    params, x, positions, config, d.kv_latent, d.k_rope
  )
  d_wkv_b = np.concatenate([d.w_uk, d.w_uv], axis=-1)  # [C, N, P + V]
  grads = oracle.MLAParams(
    d_wq_a, d_q_norm, d_wq_b, d_wkv_a, d_kv_norm, d_wkv_b, d_wo
  )
  return grads, d_x_by_q + d_x_by_kv


def index_scores_vjp(queries, keys, weights, cotangent):
  """Returns the gradients by queries, keys and weights.

  ReLU passes nothing at exactly zero.

  Args:
    queries: [B, T, I, D].
    keys: [B, S, D].
    weights: [B, T, I].
    cotangent: [B, T, S].
  """
  queries, keys, weights = f64(queries), f64(keys), f64(weights)
  cotangent = f64(cotangent)
  d_queries, d_keys, d_weights = map(np.zeros_like, (queries, keys, weights))
  for b, t in np.argwhere(np.any(cotangent != 0, axis=-1)):
    live = np.flatnonzero(cotangent[b, t])
    g, k = cotangent[b, t, live], keys[b, live]
    dots = np.einsum("id,sd->is", queries[b, t], k)
    d_weights[b, t] = np.einsum("s,is->i", g, np.maximum(dots, 0))
    d_dots = np.einsum("s,i->is", g, weights[b, t]) * (dots > 0)
    d_queries[b, t] = np.einsum("is,sd->id", d_dots, k)
    d_keys[b, live] += np.einsum("is,id->sd", d_dots, queries[b, t])
  return d_queries, d_keys, d_weights


def indexer_scores_vjp(params, x, q_latent, positions, config, cotangent):
  """Returns the gradients by the indexer's parameters, `IndexerParams`.

  x and q_latent are detached: nothing flows back to them.

  Args:
    params: `IndexerParams`.
    x: [B, T, E].
    q_latent: [B, T, L].
    positions: [B, T].
    config: `Config`.
    cotangent: [B, T, T].
  """
  d_q, d_k, d_w = index_scores_vjp(
    oracle.index_queries(params, q_latent, positions, config),
    oracle.index_keys(params, x, positions, config),
    oracle.index_head_weights(params, x, config),
    cotangent,
  )
  d_q = index_rope_vjp(positions, config, d_q)
  d_k = index_rope_vjp(positions, config, d_k)
  plain_k = np.einsum("bse,ed->bsd", f64(x), f64(params.wk))
  d_k, d_scale, d_bias = layer_norm_vjp(plain_k, params.k_norm_scale, d_k)
  d_w = d_w * config.index_n_heads**-0.5 * config.index_head_dim**-0.5
  return oracle.IndexerParams(
    wq_b=np.einsum("btl,btid->lid", _live(q_latent, d_q), d_q),
    wk=np.einsum("bse,bsd->ed", _live(x, d_k), d_k),
    k_norm_scale=d_scale,
    k_norm_bias=d_bias,
    weights_proj=np.einsum("bte,bti->ei", _live(x, d_w), d_w),
  )
