"""RoPE and YaRN against the float64 oracle, in both layouts."""

import dataclasses
import functools
import math
import types
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from dsa import rope as rope_lib
from dsa.config import DSAConfig, RopeConfig, deepseek_v32
from dsa.indexer import index_queries
from dsa.mla import mla_queries
from testing import oracle, tolerances

_DEEPSEEK = deepseek_v32().rope
_PLAIN = RopeConfig()
_SMALL = RopeConfig(
  rope_type="yarn", factor=40.0, original_max_position_embeddings=64
)
# So small a base that the ramp ends behind the last dim.
_STEEP = dataclasses.replace(
  _SMALL, rope_theta=10.0, original_max_position_embeddings=400
)
_LAYOUTS = {
  "concat": (rope_lib.yarn_rope_concat, oracle.rope_concat),
  "interleaved": (rope_lib.yarn_rope_interleaved, oracle.rope_interleaved),
}
_NAMES = tuple(_LAYOUTS)
_BOTH = parameterized.parameters(*_NAMES)


def _ours(layout):
  return _LAYOUTS[layout][0]


def _inputs(seed, shape=(2, 12, 3, 8), *, dtype="float32"):
  """x of the shape, and positions [B, T] that repeat and do not ascend."""
  rng = np.random.default_rng(seed)
  x = jnp.asarray(rng.normal(size=shape), dtype)
  return x, jnp.asarray(rng.integers(0, 64, size=shape[:2]))


class FrequenciesTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("plain", _PLAIN, 64),
    ("deepseek_v32", _DEEPSEEK, 64),
    ("small", _SMALL, 8),
    ("two_dims", _SMALL, 2),
    ("twelve_dims", _SMALL, 12),
    ("a_ramp_past_all_dims", _STEEP, 8),
    ("theta_of_glm", RopeConfig(rope_theta=1e6), 64),
    (
      "equal_betas",
      RopeConfig(rope_type="yarn", factor=32.0, beta_fast=1.0, beta_slow=1.0),
      64,
    ),
    (
      "all_above_the_ramp",
      dataclasses.replace(_SMALL, original_max_position_embeddings=6),
      8,
    ),
    (
      "all_below_the_ramp",
      dataclasses.replace(_SMALL, original_max_position_embeddings=10**9),
      8,
    ),
  )
  def test_match_the_oracle(self, rope, dim):
    frequencies = rope_lib.yarn_frequencies(rope, dim)
    self.assertEqual(frequencies.dtype, np.float32)
    np.testing.assert_allclose(
      frequencies, oracle.rope_frequencies(rope, dim), rtol=1e-7
    )

  def test_a_ramp_ends_with_the_dims(self):
    self.assertEqual(rope_lib.yarn_ramp(_STEEP, 8), (1, 7))

  @parameterized.parameters(
    (4096, 64, (10, 23)), (163840, 64, (23, 36)), (64, 8, (0, 2))
  )
  def test_ramp(self, original, dim, wanted):
    rope = dataclasses.replace(
      _DEEPSEEK, original_max_position_embeddings=original
    )
    self.assertEqual(rope_lib.yarn_ramp(rope, dim), wanted)

  def test_fast_pairs_are_kept_and_slow_ones_divided(self):
    plain = rope_lib.yarn_frequencies(_PLAIN, 64)
    frequencies = rope_lib.yarn_frequencies(_DEEPSEEK, 64)
    np.testing.assert_array_equal(frequencies[:11], plain[:11])
    np.testing.assert_allclose(frequencies[23:], plain[23:] / 40, rtol=2e-7)
    between = frequencies[11:23] / plain[11:23]
    self.assertTrue((np.diff(between) < 0).all())

  def test_a_ramp_of_no_width_is_a_step(self):
    rope = dataclasses.replace(_SMALL, original_max_position_embeddings=6)
    self.assertEqual(rope_lib.yarn_ramp(rope, 8), (0, 0))
    plain = rope_lib.yarn_frequencies(_PLAIN, 8)
    np.testing.assert_allclose(
      rope_lib.yarn_frequencies(rope, 8), plain / [1, 40, 40, 40], rtol=2e-7
    )

  @parameterized.parameters(0, -2, 7)
  def test_odd_dim_is_named(self, dim):
    with self.assertRaisesRegex(
      ValueError, f"^dim must be even and at least 2, .* got {dim}$"
    ):
      rope_lib.yarn_frequencies(_PLAIN, dim)


class LayoutTest(parameterized.TestCase):
  @parameterized.parameters(
    ("concat", [0.5403, 0, 0.8415, 0]), ("interleaved", [0.5403, 0.8415, 0, 0])
  )
  def test_where_the_first_dim_turns_to(self, layout, wanted):
    np.testing.assert_array_equal(
      rope_lib.yarn_frequencies(_PLAIN, 4), np.array([1, 0.01], np.float32)
    )
    x = jnp.array([[[1.0, 0, 0, 0]]])
    out = _ours(layout)(x, jnp.array([[1]]), _PLAIN)
    np.testing.assert_allclose(out[0, 0], wanted, atol=5e-5)

  @parameterized.product(
    layout=_NAMES,
    rope=(_PLAIN, _SMALL),
    shape=((2, 12, 8), (2, 12, 3, 8)),
    dtype=("float32", "bfloat16"),
  )
  def test_matches_the_oracle(self, layout, rope, shape, dtype):
    x, positions = _inputs(0, shape, dtype=dtype)
    ours, theirs = _LAYOUTS[layout]
    out = ours(x, positions, rope)
    self.assertEqual(out.dtype, dtype)
    wanted = theirs(x, positions, oracle.rope_frequencies(rope, 8))
    tolerances.assert_output_close(out, wanted, dtype)

  @_BOTH
  def test_position_zero_changes_no_bit(self, layout):
    x, positions = _inputs(1)
    out = _ours(layout)(x, jnp.zeros_like(positions), _SMALL)
    np.testing.assert_array_equal(out, x)

  def test_layouts_differ_by_the_order_of_dims_alone(self):
    x, positions = _inputs(2)
    halves = einops.rearrange(
      x, "b t n (half pair) -> b t n (pair half)", pair=2
    )
    out = rope_lib.yarn_rope_concat(halves, positions, _SMALL)
    np.testing.assert_array_equal(
      einops.rearrange(out, "b t n (pair half) -> b t n (half pair)", pair=2),
      rope_lib.yarn_rope_interleaved(x, positions, _SMALL),
    )

  @_BOTH
  def test_equal_positions_turn_alike(self, layout):
    x = jnp.broadcast_to(jnp.arange(8.0), (1, 4, 8))
    out = _ours(layout)(x, jnp.array([[5, 3, 5, 3]]), _SMALL)
    np.testing.assert_array_equal(out[:, :2], out[:, 2:])
    self.assertFalse((out[:, 0] == out[:, 1]).all())

  @_BOTH
  def test_all_heads_turn_alike(self, layout):
    x, positions = _inputs(3)
    out = _ours(layout)(x, positions, _SMALL)
    for head in range(x.shape[2]):
      np.testing.assert_array_equal(
        out[:, :, head], _ours(layout)(x[:, :, head], positions, _SMALL)
      )


class WhereTest(parameterized.TestCase):
  """Which dims of a head turn: of the six in 1..6, two have a position."""

  config = DSAConfig(
    hidden_size=1,
    num_hidden_layers=1,
    num_attention_heads=1,
    q_lora_rank=6,
    kv_lora_rank=6,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=1,
    index_n_heads=1,
    index_head_dim=6,
    index_topk=1,
    rope=_PLAIN,
  )
  q_latent = jnp.arange(1.0, 7.0).reshape(1, 1, 6)
  wq_b = jnp.eye(6).reshape(6, 1, 6)
  positions = jnp.array([[1]])

  def _turned(self, a, b):
    return [
      a * math.cos(1) - b * math.sin(1),
      b * math.cos(1) + a * math.sin(1),
    ]

  def test_an_index_query_begins_with_them(self):
    params: Any = types.SimpleNamespace(wq_b=self.wq_b)
    q = index_queries(params, self.q_latent, self.positions, self.config)
    np.testing.assert_array_equal(q[0, 0, 0, 2:], [3, 4, 5, 6])
    np.testing.assert_allclose(q[0, 0, 0, :2], self._turned(1, 2), atol=1e-6)

  def test_a_query_of_the_attention_ends_with_them(self):
    params: Any = types.SimpleNamespace(wq_b=self.wq_b)
    q_nope, q_rope = mla_queries(
      params, self.q_latent, self.positions, self.config
    )
    np.testing.assert_array_equal(q_nope[0, 0, 0], [1, 2, 3, 4])
    np.testing.assert_allclose(q_rope[0, 0, 0], self._turned(5, 6), atol=1e-6)


class PrecisionTest(parameterized.TestCase):
  @_BOTH
  def test_positions_past_256_are_not_bfloat16(self, layout):
    x = jnp.array([[[1, 0]]], jnp.bfloat16)
    out = _ours(layout)(x, jnp.array([[257]]), _PLAIN)
    self.assertAlmostEqual(math.cos(257), 0.8193, places=4)
    self.assertEqual(out[0, 0, 0], jnp.bfloat16(math.cos(257)))

  @_BOTH
  def test_products_of_bfloat16_are_float32(self, layout):
    x, positions = _inputs(4, dtype="bfloat16")
    out = _ours(layout)(x, positions, _SMALL)
    wanted = _ours(layout)(x.astype(jnp.float32), positions, _SMALL)
    np.testing.assert_array_equal(out, wanted.astype(jnp.bfloat16))

  @_BOTH
  def test_far_positions_turn_by_float32_angles(self, layout):
    positions = np.array([[4095, 4096, 65535, 163839, 10**6]])
    x = np.broadcast_to(np.array([1.0, 0.0], np.float32), (1, 5, 64 // 2, 2))
    x = x.swapaxes(-1, -2) if layout == "concat" else x
    out = _ours(layout)(
      jnp.asarray(x.reshape(1, 5, 64)), jnp.asarray(positions), _DEEPSEEK
    )
    angles = positions[..., None].astype(np.float32)
    angles = (angles * rope_lib.yarn_frequencies(_DEEPSEEK, 64)).astype(float)
    cosines = out[..., :32] if layout == "concat" else out[..., ::2]
    np.testing.assert_allclose(cosines, np.cos(angles), atol=1e-5)

  @_BOTH
  def test_float64_stays_float64(self, layout):
    with jax.enable_x64(True):
      x = jnp.ones((1, 2, 8), jnp.float64)
      out = _ours(layout)(x, jnp.array([[0, 9]]), _SMALL)
    self.assertEqual(out.dtype, jnp.float64)


class TransformTest(parameterized.TestCase):
  @_BOTH
  def test_jit(self, layout):
    x, positions = _inputs(5)
    turn = jax.jit(_ours(layout), static_argnums=2)
    np.testing.assert_allclose(
      turn(x, positions, _SMALL),
      _ours(layout)(x, positions, _SMALL),
      rtol=1e-6,
      atol=1e-6,
    )

  @_BOTH
  def test_vmap_over_the_batch(self, layout):
    x, positions = _inputs(6)
    turn = functools.partial(_ours(layout), rope=_SMALL)
    np.testing.assert_array_equal(
      jax.vmap(turn)(x, positions), turn(x, positions)
    )

  @_BOTH
  def test_the_gradient_turns_back(self, layout):
    x, positions = _inputs(7)
    turn = functools.partial(_ours(layout), positions=positions, rope=_SMALL)
    out, pullback = jax.vjp(turn, x)
    tolerances.assert_close_by_norm(
      pullback(out)[0], x, tolerances.GRADIENT["float32"]
    )


class ErrorTest(parameterized.TestCase):
  @parameterized.product(layout=_NAMES, dtype=("float32", "bool"))
  def test_positions_that_are_no_integers_are_named(self, layout, dtype):
    x, positions = _inputs(8)
    with self.assertRaisesRegex(
      TypeError, f"^positions must be of dtype integer, got {dtype}$"
    ):
      _ours(layout)(x, positions.astype(dtype), _SMALL)

  @_BOTH
  def test_a_list_of_positions_is_named(self, layout):
    with self.assertRaisesRegex(
      TypeError, "^positions must be of dtype integer, got list$"
    ):
      _ours(layout)(jnp.ones((1, 2, 4)), [[0, 1]], _SMALL)

  @_BOTH
  def test_integer_x_is_named(self, layout):
    with self.assertRaisesRegex(
      TypeError, "^x must be of dtype floating, got int32$"
    ):
      _ours(layout)(
        jnp.ones((1, 2, 4), jnp.int32), jnp.ones((1, 2), int), _SMALL
      )

  @parameterized.product(layout=_NAMES, shape=((1, 3, 4), (2,), (1, 2)))
  def test_other_positions_than_tokens_are_named(self, layout, shape):
    with self.assertRaisesRegex(
      ValueError, r"^positions must have the leading shape of x.*got"
    ) as raised:
      _ours(layout)(jnp.ones(shape), jnp.ones((1, 2), int), _SMALL)
    self.assertEndsWith(
      str(raised.exception), f"got positions (1, 2) and x {shape}"
    )

  @parameterized.product(layout=_NAMES, width=(0, 3))
  def test_a_dim_without_its_pair_is_named(self, layout, width):
    with self.assertRaisesRegex(
      ValueError, rf"^x must have an even last axis.*got \(1, 2, {width}\)$"
    ):
      _ours(layout)(jnp.ones((1, 2, width)), jnp.ones((1, 2), int), _SMALL)


if __name__ == "__main__":
  absltest.main()
