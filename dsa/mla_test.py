"""The steps of MLA against the oracle, and its two forms against each other."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from dsa import mla
from testing import layers, oracle, oracle_grad, tolerances

PARTS = (
  "query_latent",
  "q_nope",
  "q_rope",
  "kv_latent",
  "k_rope",
  "w_uk",
  "w_uv",
)


def make(seed, **options):
  """A layer whose positions are past those of a short prompt."""
  layer = layers.layer(seed, **options)
  return layer._replace(positions=layer.positions + 500)


def latent_form(layer):
  """The library's query latent and `MLAInputs`."""
  params, x, config = layer.params.mla, layer.x, layer.config
  q_latent = dsa.query_latent(params, x, config)
  return q_latent, dsa.MLAInputs(
    *dsa.mla_queries(params, q_latent, layer.positions, config),
    *dsa.kv_latents(params, x, layer.positions, config),
    *mla.split_wkv_b(params, config),
  )


def random_mask(seed, shape, share=0.4):
  """A selection at random, its first query without any key."""
  mask = np.random.default_rng(seed).random(shape) < share
  mask[:, 0] = False
  return mask


def to_selection(mask):
  width = max(int(mask.sum(-1).max()), 1)
  indices = oracle.mask_to_indices(mask, width)
  return dsa.Selection(jnp.asarray(indices, jnp.int32))


def sparse(layer, mask, params=None, x=None):
  """`dsa.sparse_mla` with the readable backend."""
  return dsa.sparse_mla(
    layer.params.mla if params is None else params,
    layer.x if x is None else x,
    layer.positions,
    to_selection(mask),
    layer.config,
    backend=dsa.backends.dot_product(),
  )


class StepsTest(parameterized.TestCase):
  @parameterized.product(part=PARTS, dtype=("float32", "bfloat16"))
  def test_agrees_with_the_oracle(self, part, dtype):
    layer = make(0, dtype=dtype)
    q_latent, inputs = latent_form(layer)
    params, _ = layers.oracle_params(layer.params)
    wanted_latent = oracle.query_latent(params, layer.x)
    wanted = oracle.mla_inputs(params, layer.x, layer.positions, layer.config)
    actual = inputs._asdict() | {"query_latent": q_latent}
    wanted = wanted._asdict() | {"query_latent": wanted_latent}
    self.assertEqual(actual[part].dtype, dtype)
    tolerances.assert_close_by_norm(
      actual[part], wanted[part], tolerances.GRADIENT[dtype], part
    )
    if dtype == "float32":
      tolerances.assert_output_close(actual[part], wanted[part], dtype)

  def test_only_the_last_dims_of_a_query_turn(self):
    layer = layers.layer(1)
    params, config = layer.params.mla, layer.config
    q_latent = dsa.query_latent(params, layer.x, config)
    at_0, at_9 = (
      jnp.concatenate(
        dsa.mla_queries(
          params, q_latent, jnp.full_like(layer.positions, p), config
        ),
        axis=-1,
      )
      for p in (0, 9)
    )
    plain = np.einsum("btl,lnq->btnq", q_latent, params.wq_b)
    nope = config.qk_nope_head_dim
    np.testing.assert_allclose(at_0, plain, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(at_0[..., :nope], at_9[..., :nope])
    self.assertGreater(np.abs(at_0 - at_9)[..., nope:].max(), 0.1)

  def test_the_norm_of_the_latent_does_not_see_the_rope_key(self):
    layer = make(2)
    params, config = layer.params.mla, layer.config
    louder = params._replace(
      wkv_a=params.wkv_a.at[:, config.kv_lora_rank :].multiply(100)
    )
    arguments = layer.x, layer.positions, config
    latent, k_rope = dsa.kv_latents(params, *arguments)
    same_latent, louder_rope = dsa.kv_latents(louder, *arguments)
    np.testing.assert_array_equal(latent, same_latent)
    np.testing.assert_allclose(louder_rope, 100 * k_rope, rtol=1e-4)

  @parameterized.parameters("q_latent", "kv_latent")
  def test_norms_take_the_epsilon_of_the_latents(self, name):
    layer = layers.layer(3)
    config = dataclasses.replace(
      layer.config, latent_norm_eps=3.0, rms_norm_eps=7.0
    )
    x = layer.x.at[:].set(1)
    if name == "q_latent":
      plain, gain = x @ layer.params.mla.wq_a, layer.params.mla.q_norm
      actual = dsa.query_latent(layer.params.mla, x, config)
    else:
      plain, gain = x @ layer.params.mla.wkv_a[:, :12], layer.params.mla.kv_norm
      actual, _ = dsa.kv_latents(layer.params.mla, x, layer.positions, config)
    mean_square = np.mean(np.square(plain), axis=-1, keepdims=True)
    wanted = plain / np.sqrt(mean_square + 3) * gain
    tolerances.assert_output_close(actual, wanted, "float32")


class FormsTest(parameterized.TestCase):
  def test_expanded_heads_agree_with_the_oracle(self):
    layer = make(4)
    _, inputs = latent_form(layer)
    q, k, v = mla.expand_heads(inputs)
    k_nope, wanted_v = oracle.expand_heads(
      inputs.kv_latent, inputs.w_uk, inputs.w_uv
    )
    k_rope = np.broadcast_to(inputs.k_rope[:, :, None], (2, 12, 3, 8))
    wanted_k = np.concatenate([k_nope, k_rope], axis=-1)
    wanted_q = np.concatenate([inputs.q_nope, inputs.q_rope], axis=-1)
    np.testing.assert_array_equal(q, wanted_q)
    tolerances.assert_output_close(k, wanted_k, "float32")
    tolerances.assert_output_close(v, wanted_v, "float32")

  def test_absorbed_and_expanded_forms_give_the_same_answer(self):
    layer = make(5)
    _, inputs = latent_form(layer)
    q, k, v = mla.expand_heads(inputs)
    expanded = np.einsum("btnq,bsnq->bnts", q, k)
    absorbed = np.einsum(
      "btnc,bsc->bnts", mla.absorb_queries(inputs), inputs.kv_latent
    ) + np.einsum("btnr,bsr->bnts", inputs.q_rope, inputs.k_rope)
    tolerances.assert_output_close(absorbed, expanded, "float32")
    probs = np.random.default_rng(5).dirichlet(np.ones(12), (2, 3, 12))
    probs = probs.astype(np.float32)
    out_latent = jnp.einsum("bnts,bsc->btnc", probs, inputs.kv_latent)
    tolerances.assert_output_close(
      mla.expand_values(out_latent, inputs.w_uv),
      np.einsum("bnts,bsnv->btnv", probs, v),
      "float32",
    )


class SparseMLATest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("narrow_values", {}),
    # The true widths of a head: 128 + 64 against 128.
    (
      "deepseek_widths",
      {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
      | {"index_head_dim": 128},
    ),
    ("wide_values", {"v_head_dim": 31}),
    ("one_head", {"num_attention_heads": 1}),
    ("plain_rope", {"rope": oracle.Rope(rope_theta=1e6)}),
  )
  def test_output(self, changes):
    layer = make(6, **changes)
    mask = random_mask(6, (2, 12, 12))
    wanted = oracle.sparse_mla(
      layers.oracle_params(layer.params)[0],
      layer.x,
      layer.positions,
      mask,
      layer.config,
    )
    tolerances.assert_output_close(sparse(layer, mask), wanted, "float32")

  @parameterized.parameters(*dsa.MLAParams._fields, "x")
  def test_gradient_of(self, name):
    layer = make(7)
    mask = random_mask(7, (2, 12, 12))
    cotangent = np.random.default_rng(7).normal(size=layer.x.shape)

    def loss(params, x):
      return jnp.sum(sparse(layer, mask, params, x) * cotangent)

    d_params, d_x = jax.grad(loss, (0, 1))(layer.params.mla, layer.x)
    wanted_params, wanted_x = oracle_grad.sparse_mla_vjp(
      layers.oracle_params(layer.params)[0],
      layer.x,
      layer.positions,
      mask,
      layer.config,
      cotangent,
    )
    actual = d_params._asdict() | {"x": d_x}
    wanted = wanted_params._asdict() | {"x": wanted_x}
    tolerances.assert_close_by_norm(
      actual[name], wanted[name], tolerances.GRADIENT["float32"], name
    )

  def test_bfloat16(self):
    layer = make(8, dtype=jnp.bfloat16)
    mask = random_mask(8, (2, 12, 12))
    actual = sparse(layer, mask)
    wanted = oracle.sparse_mla(
      layers.oracle_params(layer.params)[0],
      layer.x,
      layer.positions,
      mask,
      layer.config,
    )
    self.assertEqual(actual.dtype, jnp.bfloat16)
    tolerances.assert_close_by_norm(
      actual, wanted, tolerances.GRADIENT["bfloat16"], "output"
    )

  def test_a_query_without_keys_gets_exactly_zero(self):
    layer = make(9)
    out = sparse(layer, random_mask(9, (2, 12, 12)))
    np.testing.assert_array_equal(out[:, 0], np.zeros_like(out[:, 0]))

  def test_the_backend_is_given_the_softmax_scale(self):
    given = []

    def backend(inputs, selection, *, scale):
      given.append(scale)
      return jnp.zeros((*inputs.q_nope.shape[:3], inputs.w_uv.shape[-1]))

    config = dsa.deepseek_v32()
    jax.eval_shape(
      lambda *arguments: dsa.sparse_mla(*arguments, config, backend=backend),
      dsa.abstract_params(config).mla,
      jax.ShapeDtypeStruct((1, 3, config.hidden_size), jnp.float32),
      jax.ShapeDtypeStruct((1, 3), jnp.int32),
      dsa.Selection(jax.ShapeDtypeStruct((1, 3, 2), jnp.int32)),
    )
    m = 0.1 * math.log(40) + 1
    np.testing.assert_allclose(given, [192**-0.5 * m**2], rtol=1e-12)


class ErrorTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("x_too_wide", {"x": jnp.ones((2, 4, 25))}, "x"),
    ("x_of_two_axes", {"x": jnp.ones((4, 24))}, "x"),
    ("positions_of_another_length", {"positions": jnp.ones((2, 3))}, "posi"),
    (
      "selection_of_another_length",
      {"selection": dsa.Selection(jnp.zeros((2, 3, 1), jnp.int32))},
      "selection.indices",
    ),
    (
      "selection_of_two_axes",
      {"selection": dsa.Selection(jnp.zeros((2, 4), jnp.int32))},
      "selection.indices",
    ),
  )
  def test_a_wrong_shape_is_named(self, changes, name):
    with self.assertRaisesRegex(ValueError, f"^{name}.* must have shape"):
      self._call(**changes)

  @parameterized.named_parameters(
    ("positions", {"positions": jnp.zeros((2, 4))}, "positions"),
    (
      "selection",
      {"selection": dsa.Selection(jnp.zeros((2, 4, 1)))},
      "selection.indices",
    ),
  )
  def test_a_wrong_dtype_is_named(self, changes, name):
    with self.assertRaisesRegex(TypeError, f"^{name} must be of dtype int"):
      self._call(**changes)

  def _call(self, **changes):
    layer = layers.layer(11)
    arguments = {
      "x": jnp.ones((2, 4, 24)),
      "positions": jnp.zeros((2, 4), jnp.int32),
      "selection": dsa.Selection(jnp.zeros((2, 4, 1), jnp.int32)),
    }
    dsa.sparse_mla(
      layer.params.mla,
      **arguments | changes,
      config=layer.config,
      backend=self._unreachable,
    )

  def _unreachable(self, inputs, selection, *, scale):
    self.fail("the backend was called with arguments that do not fit")


if __name__ == "__main__":
  absltest.main()
