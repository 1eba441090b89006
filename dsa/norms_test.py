"""RMSNorm and LayerNorm against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from dsa import norms
from testing import oracle, oracle_grad, tolerances

_DTYPES = ("float32", "bfloat16")


def _inputs(dtype, seed=0):
  """x [2, 3, 16] of mean 1, gain and bias [16], and a cotangent like x."""
  rng = np.random.default_rng(seed)
  x, cotangent = rng.normal(size=(2, 2, 3, 16))
  scale, bias = rng.uniform(0.5, 1.5, size=16), rng.normal(size=16)
  return [jnp.asarray(a, dtype) for a in (x + 1, scale, bias, cotangent)]


class RmsNormTest(parameterized.TestCase):
  @parameterized.product(dtype=_DTYPES, eps=(1e-6, 1e-1))
  def test_matches_the_oracle(self, dtype, eps):
    x, scale, *_ = _inputs(dtype)
    out = norms.rms_norm(x, scale, eps=eps)
    self.assertEqual(out.dtype, dtype)
    tolerances.assert_output_close(out, oracle.rms_norm(x, scale, eps), dtype)

  def test_gradients_match_the_oracle(self):
    x, scale, _, cotangent = _inputs("float32")
    norm = functools.partial(norms.rms_norm, eps=1e-6)
    actual = jax.vjp(norm, x, scale)[1](cotangent)
    wanted = oracle_grad.rms_norm_vjp(x, scale, cotangent)
    for a, w in zip(actual, wanted, strict=True):
      tolerances.assert_close_by_norm(a, w, tolerances.GRADIENT["float32"])

  def test_zeros_stay_zero(self):
    out = norms.rms_norm(jnp.zeros((2, 4)), jnp.ones(4), eps=1e-6)
    np.testing.assert_array_equal(out, 0)

  def test_bfloat16_is_rounded_once(self):
    x, scale, *_ = _inputs("bfloat16")
    wide = [a.astype(jnp.float32) for a in (x, scale)]
    np.testing.assert_array_equal(
      norms.rms_norm(x, scale, eps=1e-6),
      norms.rms_norm(*wide, eps=1e-6).astype(jnp.bfloat16),
    )

  def test_the_gain_of_bfloat16_x_may_be_float32(self):
    x, scale, *_ = _inputs("bfloat16")
    out = norms.rms_norm(x, scale.astype(jnp.float32), eps=1e-6)
    self.assertEqual(out.dtype, jnp.bfloat16)

  def test_narrow_gain_is_named(self):
    with self.assertRaisesRegex(
      ValueError, r"^scale must have shape \[C=4\], got \(1,\)$"
    ):
      norms.rms_norm(jnp.zeros((2, 4)), jnp.ones(1), eps=1e-6)


class LayerNormTest(parameterized.TestCase):
  @parameterized.parameters(
    ([1, 2, 3, 4], [-1.3416, -0.4472, 0.4472, 1.3416]),
    ([1e-3, -1e-3], [0.7071, -0.7071]),
  )
  def test_known_rows(self, x, wanted):
    out = norms.layer_norm(
      jnp.array(x, jnp.float32), jnp.ones(len(x)), jnp.zeros(len(x)), eps=1e-6
    )
    np.testing.assert_allclose(out, wanted, atol=5e-5)

  @parameterized.product(dtype=_DTYPES, eps=(1e-6, 1e-1))
  def test_matches_the_oracle(self, dtype, eps):
    x, scale, bias, _ = _inputs(dtype)
    out = norms.layer_norm(x, scale, bias, eps=eps)
    self.assertEqual(out.dtype, dtype)
    wanted = oracle.layer_norm(x, scale, bias, eps)
    tolerances.assert_output_close(out, wanted, dtype)

  def test_gradients_match_the_oracle(self):
    x, scale, bias, cotangent = _inputs("float32")
    norm = functools.partial(norms.layer_norm, eps=1e-6)
    actual = jax.vjp(norm, x, scale, bias)[1](cotangent)
    wanted = oracle_grad.layer_norm_vjp(x, scale, cotangent)
    for a, w in zip(actual, wanted, strict=True):
      tolerances.assert_close_by_norm(a, w, tolerances.GRADIENT["float32"])

  def test_an_offset_changes_nothing(self):
    x, scale, bias, _ = _inputs("float32")
    np.testing.assert_allclose(
      norms.layer_norm(x + 100, scale, bias, eps=1e-6),
      norms.layer_norm(x, scale, bias, eps=1e-6),
      atol=1e-4,
    )

  def test_a_constant_row_is_the_bias(self):
    bias = jnp.arange(4.0)
    out = norms.layer_norm(jnp.full((2, 4), 3.0), jnp.ones(4), bias, eps=1e-6)
    np.testing.assert_array_equal(out, jnp.broadcast_to(bias, (2, 4)))

  def test_bfloat16_is_rounded_once(self):
    x, scale, bias, _ = _inputs("bfloat16")
    wide = [a.astype(jnp.float32) for a in (x, scale, bias)]
    np.testing.assert_array_equal(
      norms.layer_norm(x, scale, bias, eps=1e-6),
      norms.layer_norm(*wide, eps=1e-6).astype(jnp.bfloat16),
    )

  @parameterized.parameters(("scale", 1, 4), ("bias", 4, 5))
  def test_other_widths_are_named(self, name, scale, bias):
    with self.assertRaisesRegex(
      ValueError, rf"^{name} must have shape \[D=4\], got"
    ):
      norms.layer_norm(
        jnp.zeros((2, 4)), jnp.ones(scale), jnp.ones(bias), eps=1e-6
      )


if __name__ == "__main__":
  absltest.main()
