"""How close is close enough, by dtype, in one place.

Outputs are held elementwise, |actual - wanted| <= atol + rtol |wanted|;
gradients by norm, ||actual - wanted|| <= tolerance ||wanted||, so that a wanted
gradient of zero wants exactly zero. Selections are exact and have none.
"""

from typing import NamedTuple

import numpy as np


class Tolerance(NamedTuple):
  """Elementwise bounds, as numpy.testing.assert_allclose takes them."""

  rtol: float
  atol: float


OUTPUT = {
  "float64": Tolerance(rtol=1e-12, atol=1e-12),
  "float32": Tolerance(rtol=1e-5, atol=1e-5),
  "bfloat16": Tolerance(rtol=2e-2, atol=2e-2),
}

# Relative to the norm of the wanted gradient.
GRADIENT = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 3e-2}

LOSS = {"float64": 1e-12, "float32": 1e-6}
LOSS_GRADIENT = {"float64": 1e-12, "float32": 1e-5}

# Central differences in float64 with steps of FINITE_STEP.
FINITE_STEP = 1e-5
FINITE_DIFFERENCE = 1e-7


def assert_output_close(actual, wanted, dtype):
  """Fails unless every element is within `OUTPUT[dtype]`.

  Args:
    actual: an array.
    wanted: an array of the same shape.
    dtype: a dtype or the name of one.
  """
  # NumPy knows the name bfloat16 only where ml_dtypes has been imported.
  name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
  np.testing.assert_allclose(
    np.asarray(actual, np.float64),
    np.asarray(wanted, np.float64),
    **OUTPUT[name]._asdict(),
    equal_nan=False,
    strict=True,
  )


def assert_close_by_norm(actual, wanted, tolerance, name="gradient"):
  """Fails unless ||actual - wanted|| <= tolerance ||wanted||.

  Args:
    actual: an array.
    wanted: an array of the same shape.
    tolerance: for example GRADIENT["float32"].
    name: what to call it in the message.
  """
  actual = np.asarray(actual, np.float64)
  wanted = np.asarray(wanted, np.float64)
  if actual.shape != wanted.shape:
    raise AssertionError(f"{name}: {actual.shape} is not {wanted.shape}")
  error, size = np.linalg.norm(actual - wanted), np.linalg.norm(wanted)
  if not error <= tolerance * size:
    raise AssertionError(
      f"{name}: off by {error:.3e}, norm {size:.3e}, allowed {tolerance:.0e}"
      " of it"
    )
