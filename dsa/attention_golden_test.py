"""Whole layers against what the public transformers package answered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from dsa.backends.tokamax_flash import SplashConfig
from testing import goldens, oracle, tolerances

LAYERS = (
  "deepseek_v32_yarn_100",
  "deepseek_v32_padded_100",
  "deepseek_v32_plain_rope_100",
  "deepseek_v32_short_100",
)
SPLASH = SplashConfig(
  block_q=128, block_kv=128, block_q_dkv=128, block_kv_dkv=128, interpret=True
)
BACKENDS = {
  "dot_product": dsa.backends.dot_product(),
  "gather": dsa.backends.gather(),
  "tokamax_flash": dsa.backends.tokamax_flash(),
  "splash": dsa.backends.tokamax_flash(splash_config=SPLASH),
}
NAMES = tuple(BACKENDS)
OVER_LAYERS_AND_BACKENDS = parameterized.product(name=LAYERS, backend=NAMES)


def setUpModule():
  # Each program runs once or twice: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


@functools.cache
def load(name):
  """A golden, its configuration and parameters as the library reads them."""
  golden = goldens.load(name)
  config = dsa.DSAConfig.from_hf(golden.hf_config)
  params = dsa.checkpoint.params_from_hf(
    golden.tensors, config, prefix="self_attn."
  )
  return golden, config, params


@functools.cache
def answer(name, backend):
  """The library's result, and its gradients by the parameters and by x."""
  golden, config, params = load(name)
  attention = dsa.make_attention(config, backend=BACKENDS[backend])
  arrays = golden.arrays

  @jax.jit
  def run(params, x):
    result, pullback = jax.vjp(
      lambda params, x: attention(
        params,
        x,
        positions=jnp.asarray(arrays["positions"], jnp.int32),
        segment_ids=jnp.asarray(arrays["token_valid"], jnp.int32),
      ),
      params,
      x,
    )
    zeros = jax.tree.map(_zero_cotangent, result)
    return result, pullback(zeros._replace(out=arrays["cotangent"]))

  return run(params, jnp.asarray(arrays["x"]))


def _zero_cotangent(array):
  if jnp.issubdtype(array.dtype, jnp.floating):
    return jnp.zeros_like(array)
  return np.zeros(array.shape, jax.dtypes.float0)


class DeepSeekTest(parameterized.TestCase):
  @OVER_LAYERS_AND_BACKENDS
  def test_output(self, name, backend):
    golden, _, _ = load(name)
    result, _ = answer(name, backend)
    valid = golden.arrays["token_valid"]
    tolerances.assert_output_close(
      result.out[valid], golden.arrays["attention_out"][valid], "float32"
    )

  @OVER_LAYERS_AND_BACKENDS
  def test_padding_is_exactly_zero(self, name, backend):
    result, (_, grad_x) = answer(name, backend)
    padding = ~load(name)[0].arrays["token_valid"]
    self.assertFalse(np.any(np.asarray(result.out)[padding]))
    self.assertFalse(np.any(np.asarray(grad_x)[padding]))

  @OVER_LAYERS_AND_BACKENDS
  def test_selection(self, name, backend):
    golden, config, _ = load(name)
    scores = golden.arrays["index_scores"]
    visible = np.isfinite(scores)
    wanted = oracle.topk_indices(scores, config.index_topk, visible)
    result, _ = answer(name, backend)
    np.testing.assert_array_equal(result.selection.indices, wanted)

  @parameterized.product(
    name=LAYERS, backend=NAMES, field=(*dsa.MLAParams._fields, "x")
  )
  def test_gradient(self, name, backend, field):
    golden, _, _ = load(name)
    _, (grads, grad_x) = answer(name, backend)
    actual = grads.mla._asdict() | {"x": grad_x}
    wanted = goldens.mla_params(golden.grads, goldens.config(golden))._asdict()
    wanted["x"] = golden.arrays["grad_x"]
    tolerances.assert_close_by_norm(
      actual[field], wanted[field], tolerances.GRADIENT["float32"], field
    )

  @OVER_LAYERS_AND_BACKENDS
  def test_the_indexer_gets_no_gradient(self, name, backend):
    _, (grads, _) = answer(name, backend)
    for gradient in grads.indexer:
      np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


@functools.cache
def glm_results(backend):
  """The four layers, each given what the golden's layer before it answered."""
  golden = goldens.load("glm_moe_dsa_shared_100")
  config = dsa.DSAConfig.from_hf(golden.hf_config)
  attention = jax.jit(dsa.make_attention(config, backend=BACKENDS[backend]))
  positions = jnp.asarray(golden.arrays["positions"], jnp.int32)
  x, selection, results = golden.arrays["x"], None, []
  for layer, kind in enumerate(golden.hf_config["indexer_types"]):
    params = dsa.checkpoint.params_from_hf(
      golden.tensors,
      config,
      prefix=f"model.layers.{layer}.self_attn.",
      has_indexer=kind == "full",
    )
    shared = selection if kind == "shared" else None
    result = attention(
      params, jnp.asarray(x), positions=positions, selection=shared
    )
    x, selection = x + golden.arrays[f"layer{layer}_out"], result.selection
    results.append(result)
  return golden, results


class GLMTest(parameterized.TestCase):
  @parameterized.product(backend=NAMES, layer=(0, 1, 2, 3))
  def test_output(self, backend, layer):
    golden, results = glm_results(backend)
    wanted = golden.arrays[f"layer{layer}_out"]
    tolerances.assert_output_close(results[layer].out, wanted, "float32")

  @parameterized.product(backend=NAMES, layer=(0, 1, 2, 3))
  def test_selection(self, backend, layer):
    golden, results = glm_results(backend)
    wanted = golden.arrays[f"layer{layer}_topk_mask"]
    actual = results[layer].selection.mask(wanted.shape[-1])
    np.testing.assert_array_equal(actual, wanted)


if __name__ == "__main__":
  absltest.main()
