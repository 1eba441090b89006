"""The contract that every attention backend satisfies.

A backend is a function

    attend(inputs, selection, *, scale) -> [B, T, N, V]

made by a factory whose options are keyword-only. Its meaning, with
logits[t, s] = scale * (q_nope[t] . (latent[s] w_uk) + q_rope[t] . k_rope[s]):

    out[t] = sum over selected s of softmax(logits[t])[s] * (latent[s] w_uv)

- It attends to `selection` alone. Visibility is the selection's business: there
  is no causal order and no segment in a backend.
- A query with nothing selected gets exactly zero, and gives zero gradient.
- What a query has not selected cannot reach its output or a gradient, NaN and
  infinity included. An index of -1 is no key: it reads and writes nothing.
- Dot products accumulate in float32 and the softmax is float32, whatever the
  inputs' dtype; the output has that dtype.
- It is differentiable in every array of `inputs`, and pure: it reads no global,
  no environment variable and no device count.
- What it cannot do it refuses with NotImplementedError and the reason; it never
  returns a wrong answer. Wrong arguments raise ValueError or TypeError.

It chooses its own form: expanded heads (MHA) or absorbed weights (MQA).

A plain function is a backend. `KernelBackend` adds what a backend may say of
itself:

- `with_probs(inputs, selection, *, scale) -> (out, probs)`: beside the output,
  the mean over heads of the attention probabilities at the selected keys,
  float32 [B, T, K] in the order of `selection.indices`, zero at -1, detached.
  The indexer's loss needs them; without it they are computed a second time.
- `reads_all_keys`: whether cost or memory grows with S. Attention then gives
  each chunk of queries only the keys up to its last query.
- `for_sizes(sizes, itemsize) -> backend`: the backend to run in its place.
  Attention asks once, with B, T, N, P, R, S, C, V and K of the whole sequence
  and the bytes of a number, before it cuts the queries into chunks.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from dsa.checks import check_dtype, check_shape
from dsa.mla import Backend, MLAInputs
from dsa.selection import Selection, check_selection

BackendFactory = Callable[[], Backend]

_AXES: Mapping[str, str] = {
  "q_nope": "B T N P",
  "q_rope": "B T N R",
  "kv_latent": "B S C",
  "k_rope": "B S R",
  "w_uk": "C N P",
  "w_uv": "C N V",
}


@dataclasses.dataclass(frozen=True)
class KernelBackend:
  """A backend that says more of itself than a plain function.

  Attributes:
    attend: The function of the contract.
    with_probs: The same with probabilities beside the output, or None.
    reads_all_keys: Whether cost or memory grows with S.
    for_sizes: What picks another backend from sizes, or None.
  """

  attend: Backend
  with_probs: Callable[..., tuple[jax.Array, jax.Array]] | None = None
  reads_all_keys: bool = True
  for_sizes: Callable[[Mapping[str, int], int], Backend] | None = None

  def __call__(
    self, inputs: MLAInputs, selection: Selection, *, scale: float
  ) -> jax.Array:
    """Attends to the selected keys alone; [B, T, N, V]."""
    return self.attend(inputs, selection, scale=scale)


def check_inputs(inputs: MLAInputs, selection: Selection) -> Mapping[str, int]:
  """Checks what a backend was given, before any compute.

  Args:
    inputs: The latent form.
    selection: The selected keys.

  Returns:
    The sizes by letter: B, T, N, P, R, S, C, V and K.

  Raises:
    ValueError: If a shape does not fit the others.
    TypeError: If a dtype is not of its kind.
  """
  sizes: dict[str, int] = {}
  for name, letters in _AXES.items():
    array = getattr(inputs, name)
    sizes = check_shape(name, array, letters, **sizes)
    check_dtype(name, array, jnp.floating)
  return check_selection(selection, **sizes)
