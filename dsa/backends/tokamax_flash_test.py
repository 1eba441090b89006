"""Flash attention gives the contract's answers, whatever its blocks are.

Splash attention runs here in Pallas' interpreters. One is fast; the other
simulates a TPU: what nobody wrote is NaN there, and a read that races with a
write is an error.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import tokamax
from absl.testing import absltest, parameterized
from jax.experimental.pallas import tpu as pltpu

from dsa import backends, conformance
from dsa.backends.tokamax_flash import (
  QKVLayout,
  SplashConfig,
  default_splash_config,
)
from dsa.conformance_cases import Case, random_case, reference
from dsa.mla import MLAInputs
from dsa.selection import Selection
from testing import tolerances

_SCALE = 0.4
_BLOCKS_OF_128 = SplashConfig(
  block_q=128, block_kv=128, block_q_dkv=128, block_kv_dkv=128, interpret=True
)
_UNEQUAL_BLOCKS = SplashConfig(
  block_q=128, block_kv=256, block_q_dkv=256, block_kv_dkv=128, interpret=True
)
_SIMULATED_TPU = pltpu.InterpretParams(
  uninitialized_memory="nan", detect_races=True
)


def _splash(config=_BLOCKS_OF_128, **changes):
  config = dataclasses.replace(config, **changes)
  return backends.tokamax_flash(splash_config=config)


@functools.partial(jax.jit, static_argnums=0)
def _answer(backend, inputs, selection, cotangent):
  """The output, and the gradients of sum(output * cotangent)."""

  def attend(inputs):
    return backend(inputs, selection, scale=_SCALE)

  out, pullback = jax.vjp(attend, inputs)
  return out, pullback(cotangent.astype(out.dtype))[0]


def _assert_close(actual, wanted):
  """Holds outputs and gradients in float32 to others."""
  tolerances.assert_output_close(actual[0], wanted[0], "float32")
  for name in MLAInputs._fields:
    tolerances.assert_close_by_norm(
      getattr(actual[1], name),
      getattr(wanted[1], name),
      tolerances.GRADIENT["float32"],
      name,
    )


def _assert_conforms(backend, case: Case):
  wanted = reference(case, _SCALE)
  _assert_close(_answer(backend, *case.arguments()), (wanted.out, wanted.grads))


def _long_case(seed, **options):
  """A case of one row and two heads, for long sequences."""
  return random_case(seed, **{"B": 1, "N": 2, **options})


def _equations(program):
  """All equations of a jaxpr, those of its sub-programs included."""
  for equation in getattr(program, "jaxpr", program).eqns:
    yield equation
    for value in jax.tree.leaves(
      equation.params, is_leaf=lambda value: hasattr(value, "eqns")
    ):
      if hasattr(value, "eqns"):
        yield from _equations(value)


class SplashAttentionTest(conformance.BackendConformanceTest):
  def make_backend(self):
    return _splash()


class DotProductAttentionTest(conformance.BackendConformanceTest):
  def make_backend(self):
    return backends.tokamax_flash()


_BACKENDS = {
  "dot_product": backends.dot_product(),
  "elsewhere": backends.tokamax_flash(),
  "splash": _splash(),
}


class AgainstDotProductTest(parameterized.TestCase):
  @parameterized.product(
    name=("splash", "elsewhere"), length=(128, 512), topk=(4, 32, 512)
  )
  def test_agrees_with_dot_product(self, name, length, topk):
    case = _long_case(0, T=length, S=length, topk=topk)
    inputs, selection, cotangent = case.arguments()
    # One width, so that one program serves every topk.
    missing = length - selection.indices.shape[-1]
    indices = jnp.pad(
      selection.indices, ((0, 0), (0, 0), (0, missing)), constant_values=-1
    )
    actual, wanted = (
      _answer(_BACKENDS[key], inputs, Selection(indices), cotangent)
      for key in (name, "dot_product")
    )
    _assert_close(actual, wanted)


class BlocksTest(parameterized.TestCase):
  @parameterized.parameters(128, 256, 384)
  def test_few_key_blocks_on_a_simulated_tpu(self, length):
    case = _long_case(1, T=length, S=length, topk=32)
    _assert_conforms(_splash(interpret=_SIMULATED_TPU), case)

  def test_a_block_without_selection_on_a_simulated_tpu(self):
    case = _long_case(2, T=512, S=512)
    case = case.select(False, at=(0, slice(128, 256)))
    case = case.select(False, at=(0, slice(None), slice(256, 512)))
    _assert_conforms(_splash(_UNEQUAL_BLOCKS, interpret=_SIMULATED_TPU), case)

  @parameterized.parameters((3, 5), (130, 300), (300, 130))
  def test_lengths_that_no_block_divides(self, queries, keys):
    case = random_case(3, T=queries, S=keys)
    _assert_conforms(_splash(_UNEQUAL_BLOCKS), case)

  def test_widths_of_deepseek(self):
    case = _long_case(4, T=256, S=256, P=128, R=64, V=128, C=64, topk=32)
    _assert_conforms(_splash(), case)

  @parameterized.parameters(
    {"use_base2_exp": False},
    {"fuse_reciprocal": False},
    {"dkv_reuse_scaled_q": True},
    {"block_kv_compute": 128, "block_kv": 256},
    {"block_kv_dkv_compute": 128, "block_kv_dkv": 256},
    {"q_layout": QKVLayout.SEQ_MINOR},
    {"k_layout": QKVLayout.SEQ_MINOR, "v_layout": QKVLayout.SEQ_MINOR},
  )
  def test_tuning_does_not_change_the_answer(self, **changes):
    case = _long_case(5, T=256, S=256)
    _assert_conforms(_splash(**changes), case)

  def test_the_default_blocks(self):
    config = default_splash_config(600, 1100, dtype=jnp.bfloat16)
    case = _long_case(6, T=600, S=1100)
    _assert_conforms(_splash(config, interpret=True), case)

  def test_a_batch_compiles_one_kernel(self):
    case = random_case(7, B=3).arguments()
    program = jax.make_jaxpr(_answer, static_argnums=0)(_splash(), *case)
    names = [equation.primitive.name for equation in _equations(program)]
    self.assertEqual(names.count("pallas_call"), 2)  # Forward and backward.

  def test_vmap_of_gradients(self):
    cases = [random_case(seed).arguments() for seed in (8, 9)]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *cases)
    backend = _splash()
    outs = jax.vmap(lambda *case: _answer(backend, *case))(*stacked)
    for lane, case in enumerate(cases):
      _assert_close(
        jax.tree.map(lambda array, lane=lane: array[lane], outs),
        _answer(backend, *case),
      )


def _with_queries_of(inputs, dtype):
  return inputs._replace(
    q_nope=inputs.q_nope.astype(dtype), q_rope=inputs.q_rope.astype(dtype)
  )


class PrecisionTest(parameterized.TestCase):
  @parameterized.parameters(
    ("float32", "float32", "HIGHEST"),
    ("bfloat16", "float32", "HIGHEST"),
    ("bfloat16", "bfloat16", "DEFAULT"),
  )
  def test_kernels_multiply_in_the_precision_of_their_inputs(
    self, queries, keys, wanted
  ):
    inputs, *others = random_case(0, dtype=keys).arguments()
    case = _with_queries_of(inputs, queries), *others
    program = jax.make_jaxpr(_answer, static_argnums=0)
    for setting in ("bfloat16", "highest"):
      with jax.default_matmul_precision(setting):
        equations = _equations(program(_splash(), *case))
      kernels = [e for e in equations if e.primitive.name == "pallas_call"]
      self.assertLen(kernels, 2)
      for kernel in kernels:
        precisions = {
          equation.params["precision"]
          for equation in _equations(kernel.params["jaxpr"])
          if equation.primitive.name == "dot_general"
        }
        self.assertEqual(precisions, {(jax.lax.Precision[wanted],) * 2})

  @parameterized.parameters("splash", "elsewhere")
  def test_queries_of_a_narrower_dtype_give_it_to_the_output(self, name):
    inputs, selection, _ = random_case(1).arguments()
    narrow = _with_queries_of(inputs, jnp.bfloat16)
    out = _BACKENDS[name](narrow, selection, scale=_SCALE)
    self.assertEqual(out.dtype, jnp.bfloat16)
    wanted = _BACKENDS["dot_product"](inputs, selection, scale=_SCALE)
    tolerances.assert_output_close(out, wanted, "bfloat16")

  def test_float32_is_not_cut_elsewhere(self):
    inputs, selection, _ = random_case(2).arguments()
    with mock.patch.object(
      tokamax, "dot_product_attention", wraps=tokamax.dot_product_attention
    ) as kernel:
      backends.tokamax_flash()(inputs, selection, scale=_SCALE)
    self.assertEqual(
      kernel.call_args.kwargs["precision"], jax.lax.Precision.HIGHEST
    )


def _lowered(platform, transform, backend, case):
  def loss(inputs, selection, cotangent):
    return jnp.vdot(backend(inputs, selection, scale=_SCALE), cotangent)

  traced = jax.jit(_TRANSFORMS[transform](loss)).trace(*case)
  return traced.lower(lowering_platforms=(platform,)).as_text()


_TRANSFORMS = {
  "jit": lambda function: function,
  "grad": jax.grad,
  "vmap of grad": lambda function: jax.vmap(jax.grad(function)),
}


class PlatformTest(parameterized.TestCase):
  @parameterized.product(
    transform=tuple(_TRANSFORMS), dtype=("float32", "bfloat16")
  )
  def test_a_host_without_tpu_lowers_splash_for_a_tpu(self, transform, dtype):
    case = random_case(0, dtype=dtype).arguments()
    if transform == "vmap of grad":
      case = jax.tree.map(lambda array: jnp.stack((array, array)), case)
    for_tpu, for_cpu = (
      _lowered(platform, transform, backends.tokamax_flash(), case)
      for platform in ("tpu", "cpu")
    )
    self.assertIn("splash_mha_fwd", for_tpu)
    self.assertNotIn("splash_mha", for_cpu)

  def test_float16_is_left_to_dot_product_attention(self):
    case = random_case(0, dtype="float16").arguments()
    for_tpu = _lowered("tpu", "jit", backends.tokamax_flash(), case)
    self.assertNotIn("splash_mha", for_tpu)


class OptionsTest(parameterized.TestCase):
  @parameterized.parameters(
    {"attn_logits_soft_cap": 10.0},
    {"max_logit_const": 1.0},
    {"dropout_rate": 0.5, "dropout_block_q": 128, "dropout_block_kv": 128},
    {"qk_diag_skip": True},
    {"sv_diag_skip": True},
  )
  def test_a_field_that_changes_the_answer_is_refused(self, **changes):
    with self.assertRaisesRegex(ValueError, next(iter(changes))):
      _splash(**changes)

  def test_splash_config_of_another_type_is_refused(self):
    with self.assertRaisesRegex(TypeError, "SplashConfig, got dict"):
      backends.tokamax_flash(splash_config={"block_q": 128})

  def test_implementation_beside_splash_config_is_refused(self):
    with self.assertRaisesRegex(ValueError, "implementation must be None"):
      backends.tokamax_flash(splash_config=_BLOCKS_OF_128, implementation="xla")

  def test_splash_refuses_float16(self):
    inputs, selection, _ = random_case(0, dtype="float16").arguments()
    with self.assertRaisesRegex(NotImplementedError, "float16"):
      _splash()(inputs, selection, scale=_SCALE)

  def test_implementation_reaches_tokamax(self):
    backend = backends.tokamax_flash(implementation="xla_chunked")
    _assert_conforms(backend, random_case(1))
    inputs, selection, _ = random_case(1).arguments()
    with self.assertRaisesRegex(ValueError, "no_such_kernel"):
      backends.tokamax_flash(implementation="no_such_kernel")(
        inputs, selection, scale=_SCALE
      )

  @parameterized.product(
    length=(1, 129, 512, 513, 4096, 70001),
    dtype=("float32", "bfloat16"),
  )
  def test_default_blocks_pad_little(self, length, dtype):
    config = default_splash_config(length, 1, dtype=dtype)
    self.assertTrue(config.has_backward_blocks)
    self.assertEqual(config.block_q % 128, 0)
    self.assertLessEqual(config.block_q, 512)
    blocks = -(-length // config.block_q)
    self.assertLess(blocks * config.block_q - length, 128 * blocks)


if __name__ == "__main__":
  absltest.main()
