"""The picture of a benchmark's figures."""

import tempfile
from pathlib import Path

from absl.testing import absltest

from testing.benchmarks import chart


def _row(backend, seq_len, seconds):
  return {
    "backend": backend,
    "seq_len": seq_len,
    "topk": 64,
    "what": "forward",
    "seconds": seconds,
    "temporary_bytes": seq_len << 10,
  }


class ChartTest(absltest.TestCase):
  def test_it_draws_rows_with_and_without_a_time(self):
    rows = [_row("gather", 256, 0.1), _row("gather", 128, None)]
    with tempfile.TemporaryDirectory() as folder:
      path = Path(folder) / "figures.png"
      chart.draw([*rows, _row("dot_product", 128, 0.2)], path)
      self.assertEqual(path.read_bytes()[:4], b"\x89PNG")


if __name__ == "__main__":
  absltest.main()
