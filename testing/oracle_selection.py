"""Which keys a query sees and which it selects, in plain Python loops.

visible   not later in token order, same segment, segment not 0
selected  the min(k, visible) visible keys of the highest score; equal scores
          by lower index, NaN after every number
"""

import numpy as np


def visibility(segment_ids):
  """Returns bool [B, T, T]: not later, same segment, and no padding.

  Args:
    segment_ids: int [B, T]; 0 is padding.
  """
  segment_ids = np.asarray(segment_ids)
  batch, length = segment_ids.shape
  visible = np.zeros((batch, length, length), bool)
  for b, t in np.ndindex(batch, length):
    if segment_ids[b, t] != 0:
      same_segment = segment_ids[b] == segment_ids[b, t]
      visible[b, t, : t + 1] = same_segment[: t + 1]
  return visible


def topk_row(scores, k, allowed):
  """Returns the indices of the keys that one query selects, ascending.

  The order of preference: higher score first, equal scores by lower index
  (-0.0 equals 0.0; -inf is a number like any other), NaN after every number.

  Args:
    scores: [S].
    k: how many to select; all that are allowed where they are fewer.
    allowed: bool [S].
  """
  is_nan = np.isnan(scores)
  numbers = np.flatnonzero(allowed & ~is_nan)
  nans = np.flatnonzero(allowed & is_nan)
  by_score = numbers[np.argsort(-scores[numbers], kind="stable")]
  return np.sort(np.concatenate([by_score, nans])[:k])


def topk_mask(scores, k, allowed):
  """Returns the selected keys as bool [..., T, S].

  Args:
    scores: [..., T, S].
    k: how many to select at most.
    allowed: bool [..., T, S].
  """
  scores = np.asarray(scores, np.float64)
  allowed = np.broadcast_to(np.asarray(allowed, bool), scores.shape)
  mask = np.zeros(scores.shape, bool)
  for row in np.ndindex(scores.shape[:-1]):
    mask[row][topk_row(scores[row], k, allowed[row])] = True
  return mask


def mask_to_indices(mask, width):
  """Returns the true places of a mask, ascending, int32 [..., T, width].

  Args:
    mask: bool [..., T, S].
    width: how many indices a row holds; -1 follows the last.
  """
  mask = np.asarray(mask, bool)
  indices = np.full(mask.shape[:-1] + (width,), -1, np.int32)
  for row in np.ndindex(mask.shape[:-1]):
    keys = np.flatnonzero(mask[row])
    indices[row][: len(keys)] = keys
  return indices


def topk_indices(scores, k, allowed):
  """Returns the selected keys as int32 [..., T, min(k, S)], -1 after the last.

  Args as `topk_mask`.
  """
  width = min(k, np.shape(scores)[-1])
  return mask_to_indices(topk_mask(scores, k, allowed), width)


def indices_to_mask(indices, length):
  """Returns bool [..., T, S], true at the indices; -1 is no index.

  Args:
    indices: int [..., T, K].
    length: S.
  """
  indices = np.asarray(indices)
  mask = np.zeros(indices.shape[:-1] + (length,), bool)
  for row in np.ndindex(indices.shape[:-1]):
    mask[row][indices[row][indices[row] >= 0]] = True
  return mask
