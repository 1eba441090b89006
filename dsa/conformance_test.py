"""The conformance tests find the faults they are there for, and name them."""

import functools
import unittest

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from dsa import backends, conformance, mla
from dsa.backends import contract
from dsa.selection import Selection
from dsa.softmax import masked_softmax

dot_product = backends.dot_product()


def setUpModule():
  # Each program runs once or twice: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


def masked(
  inputs, selection, *, scale, change_mask=None, change_logits=None, probs=None
):
  """A backend in a few lines; each fault below changes one thing in it."""
  sizes = contract.check_inputs(inputs, selection)
  mask = selection.mask(sizes["S"])
  if change_mask is not None:
    mask = change_mask(mask, selection.indices)
  q, k, v = mla.expand_heads(inputs)
  logits = jnp.einsum(
    "btnq,bsnq->bnts", q, k, preferred_element_type=jnp.float32
  )
  if change_logits is not None:
    logits = change_logits(logits)
  softmax = masked_softmax if probs is None else probs
  weights = softmax(scale * logits, mask[:, None])
  return jnp.einsum("bnts,bsnv->btnv", weights, v).astype(q.dtype)


def with_selection(change):
  """A right backend that is given another selection."""

  def attend(inputs, selection, *, scale):
    return dot_product(
      inputs, Selection(change(selection.indices)), scale=scale
    )

  return attend


def with_inputs(change):
  """A right backend that is given other inputs."""

  def attend(inputs, selection, *, scale):
    return dot_product(change(inputs), selection, scale=scale)

  return attend


def all_keys(mask, indices):
  del indices
  return jnp.ones_like(mask)


def causal_keys(mask, indices):
  del indices
  return mask & jnp.tri(*mask.shape[1:], dtype=bool)


def wrapped_keys(mask, indices):
  wraps = (indices < 0).any(axis=-1)
  return mask.at[..., -1].set(mask[..., -1] | wraps)


def keys_in_whole_blocks(mask, indices):
  del indices
  size = mask.shape[-1]
  return mask & (jnp.arange(size) < max(size // 128 * 128, min(size, 128)))


def rounded(logits):
  return logits.astype(jnp.bfloat16).astype(jnp.float32)


def added_mask(logits, mask):
  return jax.nn.softmax(logits + jnp.where(mask, 0, -1e4), axis=-1)


def mean_of_empty_rows(logits, mask):
  return jax.nn.softmax(jnp.where(mask, logits, -1e30), axis=-1)


def keeping_ties(logits, mask):
  least = jnp.min(jnp.where(mask, logits, jnp.inf), axis=-1, keepdims=True)
  return masked_softmax(logits, logits >= least)


def without_peak(logits, mask):
  weights = jnp.where(mask, jnp.exp(logits), 0)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  return weights / jnp.where(total == 0, 1, total)


def without_checks(inputs, selection, *, scale):
  q, k, v = mla.expand_heads(inputs)
  mask = selection.mask(k.shape[1])
  probs = mla.expanded_probs(q, k, mask, scale=scale)
  return jnp.einsum("bnts,bsnv->btnv", probs, v)


def without_scale(inputs, selection, *, scale):
  del scale
  return dot_product(inputs, selection, scale=0.4)


def in_float32(inputs, selection, *, scale):
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
  return dot_product(wide, selection, scale=scale)


def swapped(inputs):
  if inputs.q_nope.shape != inputs.q_rope.shape:
    return inputs
  return inputs._replace(q_nope=inputs.q_rope, q_rope=inputs.q_nope)


def half_detached(inputs):
  latent = jax.lax.stop_gradient(inputs.kv_latent) / 2 + inputs.kv_latent / 2
  return inputs._replace(kv_latent=latent)


def query_by_query(inputs, selection, *, scale):
  """Adds the gradients of the queries up in their own dtype."""

  def attend_one(query):
    q_nope, q_rope, indices = query
    one = inputs._replace(q_nope=q_nope[:, None], q_rope=q_rope[:, None])
    return dot_product(one, Selection(indices[:, None]), scale=scale)[:, 0]

  queries = inputs.q_nope, inputs.q_rope, selection.indices
  queries = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), queries)
  return jnp.moveaxis(jax.lax.map(attend_one, queries), 0, 1)


def remembering():
  """Keeps the first selection that it sees outside jit."""
  seen = []

  def attend(inputs, selection, *, scale):
    if isinstance(selection.indices, jax.core.Tracer):
      return dot_product(inputs, selection, scale=scale)
    seen.append(selection)
    return dot_product(inputs, seen[0], scale=scale)

  return attend


def passing_probabilities():
  """Lets the loss's gradient reach the attention through probabilities."""

  def with_probs(inputs, selection, *, scale):
    q, k, _ = mla.expand_heads(inputs)
    mask = selection.mask(k.shape[1])
    probs = jnp.mean(mla.expanded_probs(q, k, mask, scale=scale), axis=1)
    places = jnp.maximum(selection.indices, 0)
    probs = jnp.take_along_axis(probs, places, axis=-1)
    out = dot_product(inputs, selection, scale=scale)
    return out, jnp.where(selection.indices < 0, 0, probs)

  return contract.KernelBackend(dot_product, with_probs=with_probs)


def change(**options):
  return functools.partial(masked, **options)


# Fault, backend, test that finds it, what the failure says.
FAULTS = (
  (
    "attends_to_all_keys",
    change(change_mask=all_keys),
    "test_output_k_below_s",
    "does not attend to the selected keys alone",
  ),
  (
    "adds_a_causal_order",
    change(change_mask=causal_keys),
    "test_output_k_below_s",
    "does not attend to the selected keys alone",
  ),
  (
    "reads_the_last_row",
    change(change_mask=wrapped_keys),
    "test_minus_one_never_reads_the_last_row",
    "reads the last row at an index of -1",
  ),
  (
    "stops_at_minus_one",
    with_selection(lambda i: jnp.where(jnp.cumsum(i < 0, axis=-1) > 0, -1, i)),
    "test_minus_one_before_the_keys",
    "takes -1 for a key, or for the end",
  ),
  (
    "drops_the_last_partial_block",
    change(change_mask=keys_in_whole_blocks),
    "test_output_s_129",
    "wrong on S = 129",
  ),
  (
    "takes_one_row_for_all",
    with_selection(lambda i: jnp.broadcast_to(i[:1], i.shape)),
    "test_rows_of_the_batch_are_on_their_own",
    "mixes up a dense and a sparse row",
  ),
  ("forgets_the_scale", without_scale, "test_scale", "forgets the scale"),
  (
    "keeps_ties",
    change(probs=keeping_ties),
    "test_equal_logits",
    "widens or narrows a selection of equal logits",
  ),
  (
    "adds_a_mask",
    change(probs=added_mask),
    "test_extreme_logits0",
    "wrong for logits of -100000.0",
  ),
  (
    "overflows",
    change(probs=without_peak),
    "test_extreme_logits1",
    "wrong for logits of 100000.0",
  ),
  (
    "answers_empty_rows",
    change(probs=mean_of_empty_rows),
    "test_nothing_selected_one_query",
    "answers where nothing is selected",
  ),
  (
    "lets_nan_through",
    change(),
    "test_key_that_nobody_selected0",
    "lets nan in kv_latent of a key that nobody selected through",
  ),
  (
    "rounds_logits",
    change(change_logits=rounded),
    "test_bfloat16_logits_are_float32",
    "rounds logits of 256 and 257",
  ),
  (
    "answers_in_float32",
    in_float32,
    "test_bfloat16",
    "wrong in bfloat16: dtype of the output",
  ),
  (
    "sums_gradients_in_bfloat16",
    query_by_query,
    "test_bfloat16_gradients_are_summed_in_float32",
    "sums gradients of 600 queries in bfloat16: gradient of kv_latent",
  ),
  (
    "swaps_nope_and_rope",
    with_inputs(swapped),
    "test_output_equal_widths",
    "mixes up nope and rope",
  ),
  (
    "halves_the_gradient_of_the_latent",
    with_inputs(half_detached),
    "test_gradients_k_below_s",
    "gradient of kv_latent",
  ),
  (
    "checks_nothing",
    without_checks,
    "test_wrong_shape3",
    "accepts k_rope of a wrong shape, or does not name it",
  ),
  (
    "remembers_a_call",
    remembering(),
    "test_without_jit",
    "keeps something of a call without jit",
  ),
  (
    "passes_gradients_through_probabilities",
    passing_probabilities(),
    "test_probabilities",
    "lets the probabilities pass gradients",
  ),
)


def run(backend, test):
  """Runs one test of the kit."""

  class BackendTest(conformance.BackendConformanceTest):
    def make_backend(self):
      return backend

  result = unittest.TestResult()
  names = unittest.defaultTestLoader.getTestCaseNames(BackendTest)
  # absl adds the parameters to the names of tests in a list.
  name = next(n for n in names if n == test or n.startswith(test + " "))
  BackendTest(name).run(result)
  return result


class PlantedFaultTest(parameterized.TestCase):
  @parameterized.named_parameters(*FAULTS)
  def test_is_found_and_named(self, backend, test, message):
    result = run(backend, test)
    self.assertLen(result.failures, 1)
    self.assertIn(message, result.failures[0][1])


class KitTest(absltest.TestCase):
  def test_what_a_backend_refuses_is_skipped_with_its_reason(self):
    def attend(inputs, selection, *, scale):
      raise NotImplementedError("needs a larger machine")

    result = run(attend, "test_output_k_below_s")
    self.assertTrue(result.wasSuccessful())
    self.assertIn("needs a larger machine", result.skipped[0][1])

  def test_the_class_itself_does_not_run_where_it_is_imported(self):
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(
      conformance.BackendConformanceTest
    )
    result = unittest.TestResult()
    suite.run(result)
    self.assertTrue(result.wasSuccessful())
    self.assertEqual(result.testsRun, 0)


if __name__ == "__main__":
  absltest.main()
