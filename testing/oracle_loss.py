"""The indexer's loss and its gradient in NumPy float64: part of the oracle.

  loss = mean over valid queries t of sum_s p_ts (ln p_ts - ln softmax(I_t)_s)
  dloss/dI_ts = (softmax(I_t)_s - p_ts) / valid queries

p is the mean over heads of the attention distribution, detached. Both
distributions run over the mask: the visible keys in stage "dense_warmup", the
selected keys in stage "sparse". Keys off the mask count for nothing.
"""

import numpy as np

from testing import oracle, oracle_grad
from testing.oracle import f64


def masked_softmax(logits, mask):
  """Softmax over the true places of each row; zeros elsewhere.

  Args:
    logits: [..., S].
    mask: bool [..., S].
  """
  logits = f64(logits)
  probs = np.zeros(logits.shape)
  for row in np.ndindex(logits.shape[:-1]):
    keys = np.flatnonzero(mask[row])
    if keys.size:
      probs[row][keys] = oracle.softmax(logits[row][keys])
  return probs


def query_kl(scores, p, mask):
  """Returns KL(p || softmax(scores)) of each query [B, T]; 0 on empty rows.

  Args:
    scores: [B, T, S], the index scores.
    p: [B, T, S], sums to 1 over the mask; a p of 0 contributes 0.
    mask: bool [B, T, S].
  """
  scores, p = f64(scores), f64(p)
  kl = np.zeros(p.shape[:-1])
  for b, t in np.argwhere(np.any(mask, axis=-1)):
    row = (b, t)
    logits = scores[row][mask[row]]
    target = p[row][mask[row]]
    top = np.max(logits)
    log_q = logits - top - np.log(np.sum(np.exp(logits - top)))
    some = target > 0
    kl[row] = np.sum(target[some] * (np.log(target[some]) - log_q[some]))
  return kl


def indexer_kl_loss(scores, p, mask, valid=None):
  """Returns the mean of `query_kl` over the valid queries; 0 where none is.

  Args:
    scores, p, mask: as `query_kl`.
    valid: bool [B, T], or None for the queries with a key on the mask.
  """
  valid = np.any(mask, axis=-1) if valid is None else valid
  return np.sum(query_kl(scores, p, mask)[valid]) / max(np.sum(valid), 1)


def indexer_kl_loss_vjp(scores, p, mask, valid=None):
  """Returns the gradient of `indexer_kl_loss` by the scores [B, T, S].

  Args as `indexer_kl_loss`.
  """
  valid = np.any(mask, axis=-1) if valid is None else valid
  difference = masked_softmax(scores, mask) - np.where(mask, f64(p), 0)
  return np.where(valid[..., None], difference, 0) / max(np.sum(valid), 1)


def target_probs(mla, x, positions, mask, config):
  """Returns p [B, T, T]: the attention over the mask, averaged over heads.

  Args as `oracle.sparse_mla`.
  """
  inputs = oracle.mla_inputs(mla, x, positions, config)
  scale = oracle.softmax_scale(config)
  return np.mean(oracle.attention_probs(inputs, mask, scale=scale), axis=1)


def layer_loss(mla, indexer, x, positions, mask, config, valid=None):
  """Returns a layer's indexer loss and its gradients, `IndexerParams`.

  Args:
    mla: `MLAParams`.
    indexer: `IndexerParams`.
    x: [B, T, E].
    positions: [B, T].
    mask: bool [B, T, T]: what is visible in stage "dense_warmup", what is
      selected in stage "sparse".
    config: `Config`.
    valid: as `indexer_kl_loss`.
  """
  p = target_probs(mla, x, positions, mask, config)
  q_latent = oracle.query_latent(mla, x)
  scores = oracle.indexer_scores(indexer, x, q_latent, positions, config)
  loss = indexer_kl_loss(scores, p, mask, valid)
  d_scores = indexer_kl_loss_vjp(scores, p, mask, valid)
  grads = oracle_grad.indexer_scores_vjp(
    indexer, x, q_latent, positions, config, d_scores
  )
  return loss, grads
