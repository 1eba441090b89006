"""Each stage trains what it should, by the loss that it should."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from dsa.examples import decoder, training

_CONFIG = decoder.decoder_config(
  hidden_size=16, layers=2, heads=2, index_heads=2, topk=4
)
_STAGES = ("dense", "warm-up", "sparse")


@functools.cache
def _step(stage):
  return jax.jit(training.make_step(stage, _CONFIG, dsa.backends.dot_product()))


@functools.cache
def _model():
  return training.init_model(0, _CONFIG)


def _tokens():
  """[4, 17]: short cycles of bytes."""
  return jnp.asarray((np.arange(17) + np.arange(4)[:, None]) % 5 + 97)


@functools.cache
def _trained(stage, steps=60):
  """The model after so many steps on the same text, and each one's losses."""
  model, losses = _model(), []
  for _ in range(steps):
    model, loss = _step(stage)(model, _tokens(), jnp.float32(1e-2))
    losses.append(loss)
  return model, training.Losses(*np.array(losses).T)


def _moved(before, after):
  """Whether each array of a tree changed."""
  return [
    not np.array_equal(a, b)
    for a, b in zip(
      jax.tree.leaves(before), jax.tree.leaves(after), strict=True
    )
  ]


class StagesTest(parameterized.TestCase):
  @parameterized.parameters(*_STAGES)
  def test_what_a_stage_trains_moves_and_the_rest_stands_still(self, stage):
    after, _ = _trained(stage)
    decoder_moves = _moved(_model()[:2], after[:2])
    indexers_move = _moved(_model()[2:], after[2:])
    self.assertEqual(set(decoder_moves), {stage != "warm-up"})
    self.assertEqual(set(indexers_move), {stage != "dense"})

  @parameterized.parameters(*_STAGES)
  def test_the_losses_of_a_stage_fall_on_a_repetitive_text(self, stage):
    _, losses = _trained(stage)
    if stage == "warm-up":
      self.assertTrue(np.isnan(losses.language_model).all())
    else:
      self.assertLess(losses.language_model[-1], 0.2)
      self.assertGreater(losses.language_model[0], 4)
    if stage == "dense":
      self.assertTrue(np.isnan(losses.indexer).all())
    elif stage == "warm-up":
      self.assertLess(losses.indexer[-1], 0.5 * losses.indexer[0])

  def test_the_indexer_learns_the_same_beside_the_language_model(self):
    # Sparse, each group is trained by its own loss: freezing the decoder
    # changes nothing in the indexers' first step.
    rate = jnp.float32(1e-2)
    after, _ = _step("sparse")(_model(), _tokens(), rate)
    attention = dsa.make_attention(
      _CONFIG, backend=dsa.backends.dot_product(), indexer_loss=True
    )

    def attend(params, x):
      result = attention(params, x)
      return result.out, result.indexer_loss

    def loss(indexers):
      _, losses = decoder.apply_decoder(
        _model().decoder,
        indexers,
        _tokens()[:, :-1],
        attend=attend,
        eps=_CONFIG.rms_norm_eps,
      )
      return jnp.mean(losses)

    grads = jax.jit(jax.grad(loss))(_model().indexers)
    for g, mean in zip(grads, after.indexers_adam.mean, strict=True):
      np.testing.assert_allclose(mean, 0.1 * g, rtol=1e-4, atol=1e-8)

  def test_measuring_sees_what_training_did(self):
    measure = jax.jit(
      training.make_measure(_CONFIG, dsa.backends.dot_product())
    )
    before = measure(_model(), _tokens())
    after = measure(_trained("dense")[0], _tokens())
    self.assertLess(after.dense_loss, 0.5 * before.dense_loss)
    _, losses = _step("dense")(_model(), _tokens(), jnp.float32(0))
    np.testing.assert_allclose(
      before.dense_loss, losses.language_model, rtol=1e-5
    )
    _, losses = _step("sparse")(_model(), _tokens(), jnp.float32(0))
    np.testing.assert_allclose(
      before.sparse_loss, losses.language_model, rtol=1e-5
    )
    _, losses = _step("warm-up")(_model(), _tokens(), jnp.float32(0))
    np.testing.assert_allclose(before.indexer_loss, losses.indexer, rtol=1e-5)
    self.assertEqual(before.recall.selected.shape, (2,))


class DecoderTest(absltest.TestCase):
  def test_no_logit_hangs_on_a_later_byte(self):
    def logits(tokens):
      attention = dsa.make_attention(
        _CONFIG, backend=dsa.backends.dot_product()
      )
      return decoder.apply_decoder(
        _model().decoder,
        _model().indexers,
        tokens,
        attend=lambda params, x: (attention(params, x).out, None),
        eps=1e-6,
      )[0]

    tokens = _tokens()
    changed = np.any(
      np.asarray(logits(tokens.at[:, 9].set(0)) != logits(tokens)), axis=(0, 2)
    )
    self.assertFalse(changed[:9].any())
    self.assertTrue(changed[9:].all())

  def test_the_loss_of_even_logits_is_that_of_guessing(self):
    loss = decoder.next_byte_loss(
      jnp.zeros((2, 3, 256)), jnp.zeros((2, 3), int)
    )
    self.assertAlmostEqual(loss, np.log(256), places=5)

  def test_the_loss_reads_the_logit_of_the_byte_that_follows(self):
    logits = jnp.zeros((1, 2, 256)).at[0, :, 7].set(20.0)
    for targets, expected in (([7, 7], 0.0), ([7, 8], 10.0)):
      loss = decoder.next_byte_loss(logits, jnp.array([targets]))
      self.assertAlmostEqual(loss, expected, places=3)

  def test_widths_that_do_not_fit_raise(self):
    with self.assertRaisesRegex(ValueError, "multiple of 4 . heads = 12, got"):
      decoder.decoder_config(
        hidden_size=16, layers=1, heads=3, index_heads=1, topk=1
      )


class AdamTest(absltest.TestCase):
  def test_steps_follow_the_paper(self):
    rng = np.random.default_rng(0)
    params = rng.normal(size=3).astype(np.float32)
    state = training.init_adam({"w": jnp.asarray(params)})
    actual = {"w": jnp.asarray(params)}
    m, v, expected = np.zeros(3), np.zeros(3), params.astype(np.float64)
    for t in range(1, 6):
      grad = rng.normal(size=3).astype(np.float32)
      m = 0.9 * m + 0.1 * grad
      v = 0.99 * v + 0.01 * grad.astype(np.float64) ** 2
      m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.99**t)
      expected -= 0.01 * m_hat / (np.sqrt(v_hat) + 1e-8)
      actual, state = training.adam_step(
        actual, {"w": jnp.asarray(grad)}, state, rate=jnp.float32(0.01)
      )
    np.testing.assert_allclose(actual["w"], expected, rtol=1e-5)
    self.assertEqual(state.steps, 5)

  def test_the_rate_rises_to_its_peak_and_falls(self):
    rates = [training.learning_rate(0.5, i, 200) for i in range(200)]
    self.assertLess(rates[0], 0.05)
    self.assertBetween(max(rates), 0.48, 0.5)
    self.assertBetween(rates.index(max(rates)), 15, 25)
    self.assertBetween(rates[-1], 0.05, 0.06)
    self.assertGreater(training.learning_rate(0.5, 0, 1), 0)


if __name__ == "__main__":
  absltest.main()
