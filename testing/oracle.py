"""DeepSeek Sparse Attention in NumPy float64, written to be read.

The forward pass of one layer, step by step, without jax and without the
library, so that what it says is independent of what it judges:

  q_latent = RMSNorm(x wq_a)                                        [B, T, L]
  score_ts = sum_i w_ti relu(q_ti . k_s)      the indexer           [B, T, S]
  selected = the min(k, visible) best visible keys                  [B, T, S]
  out      = (softmax over the selected keys of q . k * scale) v wo [B, T, E]

Letters: B batch, T queries, S keys, N heads, E hidden, L query rank, C latent,
P nope, R rope, V value width, I index heads, D index width. In self attention
S = T. Parameters and config may be any objects with the attributes of
`MLAParams`, `IndexerParams` and `Config`; arrays may have any float dtype.
Gradients stand in `oracle_grad`, the indexer loss in `oracle_loss`.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from testing.oracle_rope import NORM_EPS as NORM_EPS
from testing.oracle_rope import Rope as Rope
from testing.oracle_rope import f64 as f64
from testing.oracle_rope import layer_norm as layer_norm
from testing.oracle_rope import rms_norm as rms_norm
from testing.oracle_rope import rope_concat as rope_concat
from testing.oracle_rope import rope_frequencies as rope_frequencies
from testing.oracle_rope import rope_interleaved as rope_interleaved
from testing.oracle_rope import yarn_ramp as yarn_ramp
from testing.oracle_selection import indices_to_mask as indices_to_mask
from testing.oracle_selection import mask_to_indices as mask_to_indices
from testing.oracle_selection import topk_indices as topk_indices
from testing.oracle_selection import topk_mask as topk_mask
from testing.oracle_selection import topk_row as topk_row
from testing.oracle_selection import visibility as visibility


class Config(NamedTuple):
  """What the oracle reads of a configuration, under Hugging Face's names."""

  hidden_size: int
  num_attention_heads: int
  q_lora_rank: int
  kv_lora_rank: int
  qk_nope_head_dim: int
  qk_rope_head_dim: int
  v_head_dim: int
  index_n_heads: int
  index_head_dim: int
  index_topk: int
  indexer_rope_interleave: bool
  rope: Rope


class MLAParams(NamedTuple):
  """Parameters of the attention, under DeepSeek's names."""

  wq_a: Any  # [E, L]
  q_norm: Any  # [L]
  wq_b: Any  # [L, N, P + R]
  wkv_a: Any  # [E, C + R]
  kv_norm: Any  # [C]
  wkv_b: Any  # [C, N, P + V]
  wo: Any  # [N, V, E]


class IndexerParams(NamedTuple):
  """Parameters of the indexer, under DeepSeek's names."""

  wq_b: Any  # [L, I, D]
  wk: Any  # [E, D]
  k_norm_scale: Any  # [D]
  k_norm_bias: Any  # [D]
  weights_proj: Any  # [E, I]


class MLAInputs(NamedTuple):
  """What a backend is given: the latent form, before any head is expanded."""

  q_nope: Any  # [B, T, N, P]
  q_rope: Any  # [B, T, N, R]
  kv_latent: Any  # [B, S, C]
  k_rope: Any  # [B, S, R]
  w_uk: Any  # [C, N, P]
  w_uv: Any  # [C, N, V]


class LayerOutput(NamedTuple):
  """What one layer answers."""

  out: np.ndarray  # [B, T, E]
  scores: np.ndarray | None  # [B, T, S], None where the mask was given
  mask: np.ndarray  # bool [B, T, S]


def index_rope(x, positions, config):
  """Turns the first R of the D index dims, in the layout the model uses."""
  x = f64(x)
  rope_dim = config.qk_rope_head_dim
  frequencies = rope_frequencies(config.rope, rope_dim)
  turn = rope_interleaved if config.indexer_rope_interleave else rope_concat
  turned = turn(x[..., :rope_dim], positions, frequencies)
  return np.concatenate([turned, x[..., rope_dim:]], axis=-1)


def query_latent(params, x):
  """Returns RMSNorm(x wq_a) [B, T, L], read by the MLA and by the indexer."""
  latent = np.einsum("bte,el->btl", f64(x), f64(params.wq_a))
  return rms_norm(latent, params.q_norm)


def index_queries(params, q_latent, positions, config):
  """Returns the index queries [B, T, I, D], rotated."""
  q = np.einsum("btl,lid->btid", f64(q_latent), f64(params.wq_b))
  return index_rope(q, positions, config)


def index_keys(params, x, positions, config):
  """Returns the one index key of each token [B, S, D], rotated."""
  k = np.einsum("bse,ed->bsd", f64(x), f64(params.wk))
  k = layer_norm(k, params.k_norm_scale, params.k_norm_bias)
  return index_rope(k, positions, config)


def index_head_weights(params, x, config):
  """Returns x weights_proj * I^-1/2 * D^-1/2 [B, T, I]."""
  w = np.einsum("bte,ei->bti", f64(x), f64(params.weights_proj))
  return w * config.index_n_heads**-0.5 * config.index_head_dim**-0.5


def index_scores(queries, keys, weights):
  """Returns sum_i w_i relu(q_i . k) [B, T, S], for every pair, unmasked.

  Args:
    queries: [B, T, I, D].
    keys: [B, S, D].
    weights: [B, T, I].
  """
  queries, keys, weights = f64(queries), f64(keys), f64(weights)
  scores = np.zeros(queries.shape[:2] + keys.shape[1:2])
  for t in range(queries.shape[1]):
    dots = np.einsum("bid,bsd->bis", queries[:, t], keys)
    scores[:, t] = np.einsum("bi,bis->bs", weights[:, t], np.maximum(dots, 0))
  return scores


def indexer_scores(params, x, q_latent, positions, config):
  """Returns the index scores [B, T, T] of a sequence, unmasked.

  Args:
    params: `IndexerParams`.
    x: [B, T, E].
    q_latent: [B, T, L], after its norm.
    positions: [B, T].
    config: `Config`.
  """
  return index_scores(
    index_queries(params, q_latent, positions, config),
    index_keys(params, x, positions, config),
    index_head_weights(params, x, config),
  )


def softmax_scale(config):
  """Returns (P + R)^-1/2, times m^2 under YaRN.

  m = 0.1 mscale_all_dim ln(factor) + 1.
  """
  width = config.qk_nope_head_dim + config.qk_rope_head_dim
  rope = config.rope
  if rope.rope_type == "default" or rope.factor <= 1:
    return width**-0.5
  m = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1
  return width**-0.5 * m**2


def mla_queries(params, q_latent, positions, config):
  """Returns q_nope [B, T, N, P] and q_rope [B, T, N, R], rotated."""
  q = np.einsum("btl,lnd->btnd", f64(q_latent), f64(params.wq_b))
  nope = config.qk_nope_head_dim
  frequencies = rope_frequencies(config.rope, config.qk_rope_head_dim)
  return q[..., :nope], rope_interleaved(q[..., nope:], positions, frequencies)


def mla_latents(params, x, positions, config):
  """Returns kv_latent [B, S, C], normed, and k_rope [B, S, R], rotated."""
  kv = np.einsum("bse,ed->bsd", f64(x), f64(params.wkv_a))
  rank = config.kv_lora_rank
  frequencies = rope_frequencies(config.rope, config.qk_rope_head_dim)
  kv_latent = rms_norm(kv[..., :rank], params.kv_norm)
  return kv_latent, rope_interleaved(kv[..., rank:], positions, frequencies)


def mla_inputs(params, x, positions, config):
  """Returns what a backend is given for x [B, T, E], as `MLAInputs`."""
  q_latent = query_latent(params, x)
  q_nope, q_rope = mla_queries(params, q_latent, positions, config)
  kv_latent, k_rope = mla_latents(params, x, positions, config)
  nope = config.qk_nope_head_dim
  wkv_b = f64(params.wkv_b)
  w_uk, w_uv = wkv_b[..., :nope], wkv_b[..., nope:]
  return MLAInputs(q_nope, q_rope, kv_latent, k_rope, w_uk, w_uv)


def expand_heads(kv_latent, w_uk, w_uv):
  """Returns k_nope [B, S, N, P] and v [B, S, N, V] of the latents."""
  k_nope = np.einsum("bsc,cnp->bsnp", f64(kv_latent), f64(w_uk))
  v = np.einsum("bsc,cnv->bsnv", f64(kv_latent), f64(w_uv))
  return k_nope, v


def softmax(logits):
  """Softmax over the last axis, which holds at least one element."""
  weights = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
  return weights / np.sum(weights, axis=-1, keepdims=True)


def attention_probs(inputs, mask, *, scale):
  """Returns the attention distributions [B, N, T, S], zero off the mask.

  Only selected keys are read, so nothing outside the mask can leak in; a row
  of the mask that is empty gives zeros.

  Args:
    inputs: `MLAInputs`.
    mask: bool [B, T, S].
    scale: the softmax scale.
  """
  inputs = MLAInputs(*map(f64, inputs))
  k_nope, _ = expand_heads(inputs.kv_latent, inputs.w_uk, inputs.w_uv)
  batch, length, heads = inputs.q_nope.shape[:3]
  probs = np.zeros((batch, heads, length, k_nope.shape[1]))
  for b, t in np.argwhere(np.any(mask, axis=-1)):
    keys = np.flatnonzero(mask[b, t])
    logits = np.einsum("np,knp->nk", inputs.q_nope[b, t], k_nope[b, keys])
    k_rope = inputs.k_rope[b, keys]
    logits += np.einsum("nr,kr->nk", inputs.q_rope[b, t], k_rope)
    probs[b, :, t][:, keys] = softmax(logits * scale)
  return probs


def attend(inputs, mask, *, scale):
  """Returns the attention output [B, T, N, V]: the answer of every backend.

  Args as `attention_probs`.
  """
  inputs = MLAInputs(*map(f64, inputs))
  probs = attention_probs(inputs, mask, scale=scale)
  _, v = expand_heads(inputs.kv_latent, inputs.w_uk, inputs.w_uv)
  batch, heads, length, _ = probs.shape
  out = np.zeros((batch, length, heads, v.shape[-1]))
  for b, t in np.argwhere(np.any(mask, axis=-1)):
    keys = np.flatnonzero(mask[b, t])
    out[b, t] = np.einsum("nk,knv->nv", probs[b, :, t][:, keys], v[b, keys])
  return out


def sparse_mla(params, x, positions, mask, config):
  """Returns the layer's output [B, T, E] under a given selection.

  Args:
    params: `MLAParams`.
    x: [B, T, E].
    positions: [B, T].
    mask: bool [B, T, T].
    config: `Config`.
  """
  inputs = mla_inputs(params, x, positions, config)
  heads = attend(inputs, mask, scale=softmax_scale(config))
  return np.einsum("btnv,nve->bte", heads, f64(params.wo))


def dsa_layer(
  mla, indexer, x, config, *, positions=None, segment_ids=None, mask=None
):
  """Returns the whole layer's `LayerOutput`, stage "sparse".

  Args:
    mla: `MLAParams`.
    indexer: `IndexerParams`; None where the mask is given.
    x: [B, T, E].
    config: `Config`.
    positions: [B, T], or None for 0..T-1.
    segment_ids: [B, T], or None for one segment.
    mask: bool [B, T, T], the selection of an earlier layer to reuse, or None.
  """
  batch, length = np.shape(x)[:2]
  if positions is None:
    positions = np.broadcast_to(np.arange(length), (batch, length))
  if segment_ids is None:
    segment_ids = np.ones((batch, length), int)
  scores = None
  if mask is None:
    q_latent = query_latent(mla, x)
    scores = indexer_scores(indexer, x, q_latent, positions, config)
    mask = topk_mask(scores, config.index_topk, visibility(segment_ids))
  out = sparse_mla(mla, x, positions, mask, config)
  return LayerOutput(out, scores, mask)
