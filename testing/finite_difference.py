"""Gradients held against central differences, for tests in float64."""

import numpy as np

from testing import tolerances


def assert_gradient(f, x, gradient, *, seed=0, name="gradient"):
  """Fails unless the gradient matches f's slope along a random direction.

  Args:
    f: a function of one array to a number.
    x: float64 array.
    gradient: the claimed gradient of f at x, of x's shape.
    seed: of the direction.
    name: what to call the gradient in the message.
  """
  if gradient.shape != x.shape:
    raise AssertionError(f"{name}: {gradient.shape} is not {x.shape}")
  direction = np.random.default_rng(seed).normal(size=x.shape)
  step = tolerances.FINITE_STEP * direction
  slope = (f(x + step) - f(x - step)) / (2 * tolerances.FINITE_STEP)
  claimed = np.sum(gradient * direction)
  size = np.linalg.norm(gradient)
  if size == 0:
    raise AssertionError(f"{name}: all zero, which shows nothing")
  if not abs(slope - claimed) <= tolerances.FINITE_DIFFERENCE * size:
    raise AssertionError(
      f"{name}: {claimed:.9e} claimed, {slope:.9e} measured, norm {size:.3e}"
    )
