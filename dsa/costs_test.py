"""The cost model's counts and choices."""

from absl.testing import absltest, parameterized

from dsa import costs
from dsa.config import deepseek_v32

_SMALL = {"B": 1, "N": 16, "P": 128, "R": 64, "C": 512, "V": 128}


def _best(length, topk, kind="cpu"):
  """The choice for a sequence, of the size that figures are quoted at."""
  sizes = {**_SMALL, "T": length, "S": length, "K": min(topk, length)}
  itemsize = 4 if kind == "cpu" else 2
  found = costs.estimates(
    sizes, itemsize=itemsize, causal=True, device_kind=kind
  )
  return found[0].backend


class EstimatesTest(parameterized.TestCase):
  @parameterized.parameters(
    # What was measured to be the fastest, or at most 1.25 times slower.
    (1024, 512, "dot_product"),
    (1024, 2048, "dot_product"),
    (2048, 256, "gather"),
    (2048, 2048, "dot_product"),
    (4096, 256, "gather"),
    (4096, 512, "gather"),
    (4096, 2048, "dot_product"),
    (8192, 256, "gather"),
    (8192, 512, "gather"),
    (8192, 2048, "dot_product"),
    (65536, 2048, "gather"),
  )
  def test_choices_on_a_cpu(self, length, topk, backend):
    self.assertEqual(_best(length, topk), backend)

  @parameterized.parameters("TPU v5p", "TPU v6 lite", "NVIDIA H200")
  def test_accelerators_gather_long_sequences_alone(self, kind):
    self.assertEqual(_best(4096, 2048, kind), "tokamax_flash")
    self.assertEqual(_best(1 << 18, 2048, kind), "gather")

  def test_a_decode_step_gathers(self):
    sizes = {**_SMALL, "T": 1, "S": 32768, "K": 512}
    found = costs.estimates(sizes, itemsize=4, causal=False, device_kind="cpu")
    self.assertEqual(found[0].backend, "gather")

  def test_counts_of_a_gather(self):
    sizes = {**_SMALL, "T": 10, "S": 100, "K": 7}
    (gather,) = (
      estimate
      for estimate in costs.estimates(
        sizes, itemsize=4, causal=False, device_kind="cpu"
      )
      if estimate.backend == "gather"
    )
    self.assertEqual(gather.operations, 10 * 7 * 16 * 2 * (2 * 512 + 64))
    self.assertEqual(gather.bytes, 10 * 7 * (512 + 64) * 4)
    self.assertEqual(gather.exponentials, 10 * 7 * 16)

  def test_counts_of_the_dense_form(self):
    sizes = {**_SMALL, "T": 10, "S": 100, "K": 7}
    (dense,) = (
      estimate
      for estimate in costs.estimates(
        sizes, itemsize=4, causal=False, device_kind="cpu"
      )
      if estimate.backend == "dot_product"
    )
    pairs = 10 * 100 * 16 * 2 * (128 + 64 + 128)
    expanding = 100 * 16 * 2 * 512 * (128 + 128)
    self.assertEqual(dense.operations, pairs + expanding)
    self.assertEqual(dense.bytes, 0)


class ChunkTest(parameterized.TestCase):
  def test_more_heads_take_smaller_chunks(self):
    sizes = {**_SMALL, "S": 8192}
    few, many = (
      costs.query_chunk_size(
        {**sizes, "N": heads}, itemsize=4, reads_all_keys=False
      )
      for heads in (16, 128)
    )
    self.assertEqual((few, many), (512, 64))

  def test_logits_of_all_keys_take_smaller_chunks_down_to_a_block(self):
    chunks = [
      costs.query_chunk_size(
        {**_SMALL, "S": keys}, itemsize=4, reads_all_keys=True
      )
      for keys in (2048, 4096, 1 << 20)
    ]
    self.assertEqual(chunks, [512, 256, 128])


class KindTest(parameterized.TestCase):
  @parameterized.parameters(
    ("cpu", "cpu"),
    ("tpu", "TPU v5"),
    ("TPU v5 lite", "TPU v5 lite"),
    ("TPU v5p", "TPU v5"),
    ("TPU v4", "TPU v5"),
    ("NVIDIA H200 NVL", "NVIDIA H200"),
    ("NVIDIA A100-SXM4-40GB", "NVIDIA H100"),
    ("cuda", "NVIDIA H100"),
  )
  def test_known_kinds(self, kind, entry):
    self.assertEqual(costs.known_kind(kind), entry)

  def test_an_unknown_kind_is_refused(self):
    with self.assertRaisesRegex(ValueError, "device_kind must begin with"):
      costs.known_kind("abacus")

  def test_sizes_of_a_layer(self):
    sizes = costs.layer_sizes(deepseek_v32(), batch=2, queries=3, keys=1000)
    wanted = dict(B=2, T=3, S=1000, K=1000, N=128, P=128, R=64, C=512, V=128)
    self.assertEqual(sizes, wanted)


if __name__ == "__main__":
  absltest.main()
