"""Plans: choices on both sides of each crossover, and what they say."""

from absl.testing import absltest, parameterized

import dsa


def _plan(tokens, kind="TPU v5p", **shapes):
  return dsa.plan(
    dsa.deepseek_v32(), dsa.PlanShapes(batch=1, tokens=tokens, **shapes), kind
  )


class PlanTest(parameterized.TestCase):
  @parameterized.parameters((4096, "MHA"), (131072, "MQA"))
  def test_long_sequences_are_absorbed(self, tokens, form):
    plan = _plan(tokens)
    self.assertEqual(plan.form, form)
    self.assertLess(plan.estimates[0].seconds, plan.estimates[1].seconds)

  def test_decoding_gathers(self):
    self.assertEqual(_plan(1, keys=65536).backend, "gather")

  def test_backends_come_ready_made(self):
    backend = _plan(131072).make_backend()
    self.assertFalse(backend.reads_all_keys)

  @parameterized.parameters((1, "none"), (8, "all_gather"))
  def test_schedule(self, devices, schedule):
    plan = _plan(131072, context_devices=devices)
    self.assertEqual(plan.schedule, schedule)

  def test_it_explains_itself(self):
    text = str(_plan(131072, context_devices=8))
    for part in ("gather (MQA)", "TPU v5", "0.172 GiB of 95 GiB", "ms: "):
      self.assertIn(part, text)
    self.assertLen(text.splitlines(), 5)

  def test_heads_and_queries_of_one_device(self):
    whole, shared = _plan(131072), _plan(131072, tensor_devices=4)
    self.assertEqual(shared.query_chunk_size, 4 * whole.query_chunk_size)

  def test_what_does_not_divide_is_refused(self):
    with self.assertRaisesRegex(ValueError, "tokens must divide over 8"):
      _plan(1001, context_devices=8)

  def test_sizes_below_one_are_refused(self):
    with self.assertRaisesRegex(ValueError, "tokens must be at least 1"):
      _plan(0)

  def test_an_unknown_device_is_refused(self):
    with self.assertRaisesRegex(ValueError, "device_kind"):
      _plan(128, "abacus")


if __name__ == "__main__":
  absltest.main()
