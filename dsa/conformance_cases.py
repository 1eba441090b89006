"""Inputs for the tests of a backend, and the answers that they want.

`reference` is NumPy float64 from the formulas of `dsa.backends.contract`. With
p the probabilities of a query and a head over the selected keys and g the
cotangent of the output:

    dp = g v,  dz = scale p (dp - sum p dp),  dq = dz k,  dk = dz q,  dv = p g
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsa.mla import MLAInputs
from dsa.selection import Selection

# Holds NumPy arrays here.
_Inputs: Any = MLAInputs

_SIZES = {"B": 2, "T": 7, "S": 11, "N": 3, "C": 12, "P": 8, "R": 4, "V": 10}

# Name, fault of a backend that fails, options of `random_case`.
SHAPES = (
  ("k_below_s", "does not attend to the selected keys alone", {}),
  ("s_below_k", "wrong where every key is selected", {"topk": 99}),
  ("one_key", "wrong where one key is selected", {"topk": 1}),
  ("t_below_s", "takes T for S", {"T": 2, "S": 17}),
  ("t_above_s", "takes T for S", {"T": 13, "S": 5}),
  ("one_head", "wrong for one head", {"N": 1}),
  ("narrow_values", "takes V for P + R", {"P": 24, "R": 8, "V": 16}),
  ("wide_values", "takes V for P + R", {"P": 8, "R": 8, "V": 40}),
  ("equal_widths", "mixes up nope and rope", {"P": 8, "R": 8, "V": 8, "C": 8}),
) + tuple(
  (f"s_{size}", f"wrong on S = {size}", {"B": 1, "N": 2, "T": size, "S": size})
  for size in (128, 129, 384)
)

# Which quarters of 256 queries by 256 keys are selected, and nothing outside.
QUARTERS = (
  ("lower_triangle", ((1, 0), (1, 1))),
  ("first_quarter", ((1, 0), (0, 0))),
  ("last_quarter", ((0, 0), (0, 1))),
)


class Case(NamedTuple):
  """What a backend is given and the cotangent of its output, in NumPy.

  Attributes:
    inputs: The latent form.
    mask: bool [B, T, S], the keys that each query selected.
    cotangent: [B, T, N, V].
  """

  inputs: MLAInputs
  mask: np.ndarray
  cotangent: np.ndarray

  def arguments(self) -> tuple[MLAInputs, Selection, jax.Array]:
    """Inputs, selection and cotangent as JAX arrays."""
    return jax.tree.map(
      jnp.asarray, (self.inputs, self.selection(), self.cotangent)
    )

  def selection(self) -> Selection:
    """The mask as indices, as wide as its fullest row."""
    width = max(int(self.mask.sum(-1).max()), 1)
    indices = np.full((*self.mask.shape[:2], width), -1, np.int32)
    for b, t in np.argwhere(self.mask.any(-1)):
      keys = np.flatnonzero(self.mask[b, t])
      indices[b, t, : len(keys)] = keys
    return Selection(jnp.asarray(indices))

  def fill(self, value: Any, *names: str, at: Any = ...) -> "Case":
    """Writes a value into the named inputs, everywhere or at some places."""
    filled = {name: getattr(self.inputs, name).copy() for name in names}
    for array in filled.values():
      array[at] = value
    return self._replace(inputs=self.inputs._replace(**filled))

  def select(self, marked: bool, *, at: Any) -> "Case":
    """Marks or unmarks some places of the mask."""
    mask = self.mask.copy()
    mask[at] = marked
    return self._replace(mask=mask)


def random_case(
  seed: int, *, dtype: Any = jnp.float32, topk: Any = 4, **sizes: int
) -> Case:
  """A case in which each query selects keys at random, in no order of time.

  Args:
    seed: Of the numbers and of the selection.
    dtype: Of the inputs.
    topk: How many keys a query selects: a number, or one for each [B, T].
    **sizes: B, T, S, N, C, P, R or V, where the usual ones will not do.

  Returns:
    The case; logits are of the order of one.
  """
  rng = np.random.default_rng(seed)
  sizes = {**_SIZES, **sizes}

  def normal(letters: str, fan_in: int = 1) -> np.ndarray:
    shape = [sizes[letter] for letter in letters]
    return (rng.normal(size=shape) / np.sqrt(fan_in)).astype(dtype)

  inputs = _Inputs(
    q_nope=normal("BTNP"),
    q_rope=normal("BTNR"),
    kv_latent=normal("BSC"),
    k_rope=normal("BSR"),
    w_uk=normal("CNP", sizes["C"]),
    w_uv=normal("CNV", sizes["C"]),
  )
  places = rng.random((sizes["B"], sizes["T"], sizes["S"])).argsort(axis=-1)
  mask = places.argsort(axis=-1) < np.asarray(topk)[..., None]
  return Case(inputs, mask, normal("BTNV"))


def random_counts(seed: int, most: int) -> np.ndarray:
  """A number of keys from 1 to `most` for each query of a usual case."""
  shape = _SIZES["B"], _SIZES["T"]
  return np.random.default_rng(seed).integers(1, most + 1, size=shape)


class Answer(NamedTuple):
  """What the contract wants, float64.

  Attributes:
    out: [B, T, N, V].
    grads: Of sum(out * cotangent), by each array of the inputs.
    probs: [B, T, S], the mean over heads, zero at keys that are not selected.
  """

  out: np.ndarray
  grads: MLAInputs
  probs: np.ndarray


def reference(case: Case, scale: float) -> Answer:
  """The contract's answer, from its formulas.

  Args:
    case: Finite inputs.
    scale: The softmax scale.

  Returns:
    Output, gradients and probabilities.
  """
  x = _Inputs(*(np.asarray(array, np.float64) for array in case.inputs))
  g = np.asarray(case.cotangent, np.float64)
  k_nope = np.einsum("bsc,cnp->bsnp", x.kv_latent, x.w_uk)
  v = np.einsum("bsc,cnv->bsnv", x.kv_latent, x.w_uv)
  logits = np.einsum("btnp,bsnp->bnts", x.q_nope, k_nope)
  logits = scale * (logits + np.einsum("btnr,bsr->bnts", x.q_rope, x.k_rope))
  logits = np.where(case.mask[:, None], logits, -np.inf)
  peak = np.max(logits, axis=-1, keepdims=True)
  weights = np.exp(logits - np.where(np.isneginf(peak), 0, peak))
  total = np.sum(weights, axis=-1, keepdims=True)
  p = weights / np.where(total == 0, 1, total)  # [B, N, T, S]
  out = np.einsum("bnts,bsnv->btnv", p, v)

  dp = np.einsum("btnv,bsnv->bnts", g, v)
  dz = scale * p * (dp - np.sum(p * dp, axis=-1, keepdims=True))
  dk_nope = np.einsum("bnts,btnp->bsnp", dz, x.q_nope)
  dv = np.einsum("bnts,btnv->bsnv", p, g)
  latent_by_key = np.einsum("bsnp,cnp->bsc", dk_nope, x.w_uk)
  latent_by_value = np.einsum("bsnv,cnv->bsc", dv, x.w_uv)
  grads = MLAInputs(
    q_nope=np.einsum("bnts,bsnp->btnp", dz, k_nope),
    q_rope=np.einsum("bnts,bsr->btnr", dz, x.k_rope),
    kv_latent=latent_by_key + latent_by_value,
    k_rope=np.einsum("bnts,btnr->bsr", dz, x.q_rope),
    w_uk=np.einsum("bsc,bsnp->cnp", x.kv_latent, dk_nope),
    w_uv=np.einsum("bsc,bsnv->cnv", x.kv_latent, dv),
  )
  return Answer(out, grads, p.mean(axis=1))
