"""What `auto` picks, and that picking changes no answer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from dsa.conformance_cases import random_case
from testing import tolerances

# Long enough to be gathered on a CPU, and too short.
_LONG, _SHORT = {"S": 512}, {"T": 64, "S": 64, "topk": 64}


def setUpModule():
  # Each program runs once or twice: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


def _answer(backend, inputs, selection, cotangent):
  attend = functools.partial(backend, scale=0.3)
  out, pullback = jax.vjp(lambda inputs: attend(inputs, selection), inputs)
  return out, pullback(cotangent)[0]


def _picked(device_kind, **sizes):
  """The program that `auto` lays down for a case of these sizes."""
  inputs, selection, _ = random_case(0, **sizes).arguments()
  backend = dsa.backends.auto(device_kind=device_kind)
  attend = functools.partial(backend, scale=0.3)
  return str(jax.make_jaxpr(attend)(inputs, selection))


class AutoTest(parameterized.TestCase):
  @parameterized.product(sizes=(_LONG, _SHORT), kind=(None, "cpu"))
  def test_answers_and_gradients_are_those_of_the_definition(self, sizes, kind):
    case = random_case(1, **sizes).arguments()
    actual = jax.jit(
      functools.partial(_answer, dsa.backends.auto(device_kind=kind))
    )(*case)
    wanted = jax.jit(functools.partial(_answer, dsa.backends.dot_product()))(
      *case
    )
    tolerances.assert_output_close(actual[0], wanted[0], "float32")
    for mine, theirs in zip(actual[1], wanted[1], strict=True):
      tolerances.assert_close_by_norm(
        mine, theirs, tolerances.GRADIENT["float32"]
      )

  @parameterized.parameters(None, "cpu")
  def test_probabilities_are_those_of_the_definition(self, kind):
    inputs, selection, _ = random_case(2, **_LONG).arguments()
    _, probs = dsa.backends.auto(device_kind=kind).with_probs(
      inputs, selection, scale=0.3
    )
    _, wanted = dsa.backends.dot_product().with_probs(
      inputs, selection, scale=0.3
    )
    np.testing.assert_allclose(probs, wanted, atol=1e-6)

  def test_long_sequences_are_gathered_in_blocks(self):
    self.assertIn("name=_gathered", _picked("cpu", **_LONG))
    self.assertNotIn("name=_gathered", _picked("cpu", **_SHORT))

  def test_each_platform_gets_its_own_choice(self):
    abstract = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    inputs = dsa.MLAInputs(
      q_nope=abstract((1, 4096, 128, 128)),
      q_rope=abstract((1, 4096, 128, 64)),
      kv_latent=abstract((1, 4096, 512)),
      k_rope=abstract((1, 4096, 64)),
      w_uk=abstract((512, 128, 128)),
      w_uv=abstract((512, 128, 128)),
    )
    selection = dsa.Selection(jax.ShapeDtypeStruct((1, 4096, 1024), jnp.int32))
    attend = jax.jit(functools.partial(dsa.backends.auto(), scale=0.3))
    traced = attend.trace(inputs, selection)
    for platform, is_splash in (("tpu", True), ("cpu", False)):
      program = traced.lower(lowering_platforms=(platform,)).as_text()
      self.assertEqual("tpu_custom_call" in program, is_splash, platform)

  def test_a_layer_asks_once_for_the_whole_sequence(self):
    asked = []

    def for_sizes(sizes, itemsize):
      asked.append((sizes["T"], sizes["S"], sizes["K"], itemsize))
      return dsa.backends.dot_product()

    backend = dsa.backends.KernelBackend(
      dsa.backends.gather(), for_sizes=for_sizes
    )
    config = dsa.deepseek_v32()
    attention = dsa.make_attention(config, backend=backend, query_chunk_size=16)
    params = dsa.abstract_params(config, jnp.bfloat16)
    x = jax.ShapeDtypeStruct((1, 64, config.hidden_size), jnp.bfloat16)
    jax.eval_shape(attention, params, x)
    self.assertEqual(asked, [(64, 64, 64, 2)])

  def test_an_unknown_device_is_refused(self):
    with self.assertRaisesRegex(ValueError, "device_kind"):
      dsa.backends.auto(device_kind="abacus")


if __name__ == "__main__":
  absltest.main()
