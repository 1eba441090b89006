"""Numbers as a person reads them."""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from dsa.examples import report


def _runs(step_s, **limits):
  """Returns the median and the number of runs by a clock that steps."""
  function = mock.Mock(return_value=jnp.zeros(()))
  clock = itertools.count(0, step_s)
  with mock.patch("time.perf_counter", lambda: next(clock)):
    median = report.median_seconds(function, **limits)
  return median, function.call_count


class ReportTest(parameterized.TestCase):
  @parameterized.parameters(
    (None, "unknown"),
    (0, "0 B"),
    (1023, "1023 B"),
    (1024, "1.00 KiB"),
    (39738368, "37.9 MiB"),
    (5 * 2**40, "5.00 TiB"),
    (2**60, "1,048,576 TiB"),
  )
  def test_bytes(self, count, expected):
    self.assertEqual(report.format_bytes(count), expected)

  @parameterized.parameters(
    (0.0, "0 us"),
    (3.2e-7, "0.32 us"),
    (0.4012, "401 ms"),
    (0.004012, "4.01 ms"),
    (12.345, "12.3 s"),
    (1234.5, "1,234 s"),
  )
  def test_seconds(self, seconds, expected):
    self.assertEqual(report.format_seconds(seconds), expected)

  def test_columns_stand_under_their_names(self):
    table = report.format_table(
      ("name", "size"), [("a", "1"), ("longer", "12345")]
    )
    self.assertEqual(table, "name     size\na           1\nlonger  12345")

  def test_slow_functions_still_run_a_few_times(self):
    median, runs = _runs(10.0, budget_s=1.0, min_runs=3)
    self.assertEqual((median, runs), (10.0, 3))

  def test_no_run_starts_behind_the_budget(self):
    # The clock is read twice a run.
    _, runs = _runs(1.0, budget_s=10.0, min_runs=1)
    self.assertEqual(runs, 5)

  def test_fast_functions_run_no_more_than_asked(self):
    _, runs = _runs(1e-6, budget_s=10.0, max_runs=7)
    self.assertEqual(runs, 7)

  def test_temporary_memory_holds_what_lies_between(self):
    @jax.jit
    def through_a_square(x):
      return jnp.sort(x[:, None] * x, axis=0).sum()

    compiled = through_a_square.lower(jnp.zeros(1000)).compile()
    self.assertGreaterEqual(report.temporary_bytes(compiled) or 0, 4 * 1000**2)

  def test_this_machine_has_memory(self):
    present = report.device_memory_bytes(jax.devices("cpu")[0])
    self.assertGreater(present or 0, 2**28)


if __name__ == "__main__":
  absltest.main()
