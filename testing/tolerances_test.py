"""The assertions that other tests lean on fail where they should."""

import numpy as np
from absl.testing import absltest, parameterized

from testing import finite_difference, tolerances


class OutputTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("nan", [np.nan], [np.nan]),
    ("another_shape", [1.0, 1.0], 1.0),
    ("beyond_the_tolerance", [1.0], [1.0 + 3e-5]),
  )
  def test_fails(self, actual, wanted):
    with self.assertRaises(AssertionError):
      tolerances.assert_output_close(actual, wanted, "float32")

  def test_passes_within_the_tolerance(self):
    tolerances.assert_output_close([1.0, 0], [1.0 + 1e-5, 1e-6], np.float32)


class NormTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("nan", [np.nan], [np.nan]),
    ("another_shape", [1.0, 1.0], [1.0]),
    ("anything_where_zero_is_wanted", [1e-30], [0.0]),
    ("beyond_the_tolerance", [1.0, 0.02], [1.0, 0.0]),
  )
  def test_fails(self, actual, wanted):
    with self.assertRaises(AssertionError):
      tolerances.assert_close_by_norm(actual, wanted, 0.01)

  def test_passes_within_the_tolerance(self):
    tolerances.assert_close_by_norm([100.0, 0.5], [100.0, 0.0], 0.01)


class FiniteDifferenceTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("half_of_it", [1.0, 2.0]),
    ("nan", [np.nan, 2.0]),
    ("one_that_broadcasts", [2.0]),
  )
  def test_fails_on_a_wrong_gradient(self, gradient):
    with self.assertRaises(AssertionError):
      finite_difference.assert_gradient(
        lambda x: np.sum(x**2), np.ones(2), np.array(gradient)
      )

  def test_fails_where_a_gradient_of_zero_would_show_nothing(self):
    with self.assertRaises(AssertionError):
      finite_difference.assert_gradient(lambda x: 1.0, np.ones(2), np.zeros(2))

  def test_passes_on_the_right_gradient(self):
    finite_difference.assert_gradient(
      lambda x: np.sum(x**2), np.ones(2), np.full(2, 2.0)
    )


if __name__ == "__main__":
  absltest.main()
