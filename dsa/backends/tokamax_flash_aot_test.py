"""Splash attention compiles for each TPU, forward and backward, without one.

The libtpu compiler runs on any machine. Sizes are DeepSeek-V3.2's for 16 of
its heads, so that what must fit the scratch memory of a chip does fit.
"""

import os

import jax
import jax.numpy as jnp
from absl import logging
from absl.testing import absltest, parameterized
from jax.experimental import topologies

from dsa import backends
from dsa.mla import MLAInputs
from dsa.selection import Selection

_SIZES = {
  "B": 1, "T": 4096, "S": 4096, "N": 16, "P": 128, "R": 64, "V": 128, "C": 512,
  "K": 2048,
}  # fmt: skip
_SCALE = 0.1352338
# A score for each head, query and key would take this much on its own.
_LOGITS_BYTES = 16 * 4096 * 4096 * 4


def setUpModule():
  # A TPU library is there, but no TPU to be found by looking for one.
  jax.config.update("jax_platforms", "cpu")
  # For machines without a TPU: ask no metadata server for its topology, and
  # let the shards of this test load the library at the same time.
  os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5p-8",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
  )


def _abstract_arguments(topology, dtype):
  """Inputs and selection on the first chip of a topology."""
  chips = topologies.get_topology_desc(
    platform="tpu", topology_name=topology
  ).devices
  sharding = jax.sharding.SingleDeviceSharding(chips[0])

  def abstract(letters, dtype=dtype):
    shape = [_SIZES[letter] for letter in letters]
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  inputs = MLAInputs(
    q_nope=abstract("BTNP"),
    q_rope=abstract("BTNR"),
    kv_latent=abstract("BSC"),
    k_rope=abstract("BSR"),
    w_uk=abstract("CNP"),
    w_uv=abstract("CNV"),
  )
  return inputs, Selection(abstract("BTK", jnp.int32))


def _forward(inputs, selection):
  return backends.tokamax_flash()(inputs, selection, scale=_SCALE)


def _loss(inputs, selection):
  return jnp.sum(_forward(inputs, selection).astype(jnp.float32))


class TokamaxFlashAotTest(parameterized.TestCase):
  @parameterized.parameters(
    ("v5e:2x2", "bfloat16"),
    ("v5e:2x2", "float32"),
    ("v5p:2x2x1", "bfloat16"),
    ("v6e:2x2", "bfloat16"),
    ("tpu7x:2x2x1", "bfloat16"),
  )
  def test_forward_and_backward_compile(self, topology, dtype):
    arguments = _abstract_arguments(topology, dtype)
    lowered = jax.jit(jax.value_and_grad(_loss)).lower(*arguments)
    compiled = lowered.compile()
    program = compiled.as_text()
    self.assertRegex(program, r"splash_mha_fwd_residuals.*tpu_custom_call")
    self.assertRegex(program, r"splash_mha_dkv.*tpu_custom_call")
    memory = compiled.memory_analysis().temp_size_in_bytes
    logging.info("%s, %s: %d bytes", topology, dtype, memory)
    self.assertLess(memory, _LOGITS_BYTES / 2)

  def test_forward_alone_compiles(self):
    arguments = _abstract_arguments("v5e:2x2", "bfloat16")
    program = jax.jit(_forward).lower(*arguments).compile().as_text()
    self.assertRegex(program, r"splash_mha_fwd_no_residuals.*tpu_custom_call")


if __name__ == "__main__":
  absltest.main()
