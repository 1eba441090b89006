"""What the table says is what the backends did."""

import jax
import jax.numpy as jnp
from absl.testing import absltest

import dsa
from dsa.examples import attend_text, comparison


def _definition_plus_a_quarter():
  definition = dsa.backends.dot_product()

  def attend(inputs, selection, *, scale):
    return definition(inputs, selection, scale=scale) + 0.25

  return attend


class ComparisonTest(absltest.TestCase):
  def test_a_wrong_backend_shows_its_difference(self):
    config = attend_text.layer_config(topk=4)
    params = dsa.init_params(jax.random.key(0), config, jnp.float32)
    x = jax.random.normal(jax.random.key(1), (1, 12, config.hidden_size))
    measurements, reference = comparison.compare(
      {"wrong": _definition_plus_a_quarter},
      config,
      params,
      x,
      skip_refusals=False,
    )
    off = 0.25 * jnp.abs(params.mla.wo.sum(axis=(0, 1))).max()
    _, row = comparison.write_table(measurements, reference).splitlines()
    self.assertStartsWith(row, "wrong ")
    self.assertAlmostEqual(float(row.split()[-2]), off, delta=off * 0.06)

  def test_the_share_attended_counts_selected_by_visible_pairs(self):
    indices = jnp.array([[[0, -1], [0, 1], [0, 2], [1, 3]]])
    share = comparison.attended_share(dsa.Selection(indices))
    self.assertEqual(share, 7 / 10)


if __name__ == "__main__":
  absltest.main()
