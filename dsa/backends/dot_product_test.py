"""The readable backend satisfies the contract."""

from absl.testing import absltest

from dsa import backends, conformance


class DotProductTest(conformance.BackendConformanceTest):
  def make_backend(self):
    return backends.dot_product()


if __name__ == "__main__":
  absltest.main()
