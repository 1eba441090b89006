"""GLM-5 layers that share a selection: from a folder, trained and served.

The model is the golden's four layers, full, shared, full, shared, of which each
reads the sum of x and what those before it answered.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from testing import checkpoint_folders, goldens, tolerances

_BACKENDS = {
  "dot_product": dsa.backends.dot_product(),
  "gather": dsa.backends.gather(),
}
_LAYERS = range(4)
_FULL = (True, False, True, False)


def setUpModule():
  # Each program runs once or twice: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


@functools.cache
def _golden():
  return goldens.load("glm_moe_dsa_shared_100")


@functools.cache
def _model():
  """The configuration and the four layers, as they come from a folder."""
  folder = absltest.get_default_test_tmpdir() + "/glm"
  checkpoint_folders.write_folder(
    folder, _golden().tensors, _golden().hf_config, shards=3
  )
  config_json = dsa.checkpoint.open_hf(folder).config_json()
  config = dsa.DSAConfig.from_hf(config_json)
  return config, dsa.checkpoint.load_hf(folder, config, _LAYERS)


def _x():
  return jnp.asarray(_golden().arrays["x"])


def _assert_outputs_and_masks(outs, masks):
  arrays = _golden().arrays
  for layer in _LAYERS:
    np.testing.assert_array_equal(
      masks[layer], arrays[f"layer{layer}_topk_mask"], err_msg=str(layer)
    )
    tolerances.assert_output_close(
      outs[layer], arrays[f"layer{layer}_out"], "float32"
    )


@functools.cache
def _trained(backend):
  """Outputs, masks, index losses, and gradients of a loss of the output."""
  config, params = _model()
  attention = dsa.make_attention(
    config, backend=_BACKENDS[backend], indexer_loss=True
  )

  def forward(params, x):
    selection, outs, masks, losses = None, [], [], []
    for layer in _LAYERS:
      shared = None if config.has_indexer(layer) else selection
      result = attention(params[layer], x, selection=shared)
      x, selection = x + result.out, result.selection
      outs.append(result.out)
      masks.append(selection.mask(x.shape[1]))
      losses.append(result.indexer_loss)
    return jnp.sum(jnp.sin(x)), (outs, masks, losses)

  return jax.jit(jax.value_and_grad(forward, has_aux=True))(params, _x())


class TrainingTest(parameterized.TestCase):
  def test_which_layers_hold_an_indexer(self):
    config, params = _model()
    self.assertEqual(tuple(map(config.has_indexer, _LAYERS)), _FULL)
    self.assertEqual(
      tuple(layer.indexer is not None for layer in params), _FULL
    )

  @parameterized.parameters(*_BACKENDS)
  def test_every_layer_answers_what_the_peer_answers(self, backend):
    (_, (outs, masks, _)), _ = _trained(backend)
    _assert_outputs_and_masks(outs, masks)

  def test_a_loss_of_the_output_trains_shared_layers_and_no_indexer(self):
    (_, grads), (_, others) = _trained("gather"), _trained("dot_product")
    for layer, other in zip(grads, others, strict=True):
      for name, grad in layer.mla._asdict().items():
        self.assertGreater(np.abs(grad).max(), 0, name)
        tolerances.assert_close_by_norm(
          grad, getattr(other.mla, name), tolerances.GRADIENT["float32"], name
        )
      for grad in jax.tree.leaves(layer.indexer):
        np.testing.assert_array_equal(grad, np.zeros_like(grad))

  def test_layers_without_an_indexer_have_no_loss_of_it(self):
    (_, (_, _, losses)), _ = _trained("gather")
    self.assertEqual(tuple(float(loss) > 0 for loss in losses), _FULL)
    self.assertEqual((losses[1], losses[3]), (0, 0))


@functools.cache
def _step():
  """Appends tokens to the caches of all four layers."""
  config, params = _model()
  serve = dsa.make_cached_attention(config, backend=dsa.backends.gather())

  def step(x, caches):
    selection, outs, masks, after = None, [], [], []
    for layer in _LAYERS:
      shared = None if config.has_indexer(layer) else selection
      result = serve(params[layer], x, caches[layer], selection=shared)
      x, selection = x + result.out, result.selection
      outs.append(result.out)
      masks.append(selection.mask(_x().shape[1]))
      after.append(result.cache)
    return outs, masks, after

  return jax.jit(step)


class ServingTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("prefill", [40]),
    ("chunked_prefill_and_decode", [16, 16] + [1] * 8),
  )
  def test_every_layer_answers_what_the_peer_answers(self, chunks):
    config, _ = _model()
    x = _x()
    caches = [
      dsa.init_cache(config, *x.shape[:2], index_keys=config.has_indexer(layer))
      for layer in _LAYERS
    ]
    answers = []
    for new in np.split(x, np.cumsum(chunks)[:-1], axis=1):
      outs, masks, caches = _step()(jnp.asarray(new), caches)
      answers.append((outs, masks))
    outs, masks = jax.tree.map(lambda *a: np.concatenate(a, axis=1), *answers)
    _assert_outputs_and_masks(outs, masks)
    self.assertIsNone(caches[1].index_keys)


if __name__ == "__main__":
  absltest.main()
