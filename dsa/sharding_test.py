"""Rules, what they spread, and the order of tokens that balances work."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

import dsa
from dsa import sharding
from testing import layers, tolerances


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 8)
  # Each program runs once or twice: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


def config_of(**changes):
  return layers.layer(
    0, num_attention_heads=4, index_n_heads=4, **changes
  ).config


class SpecsTest(parameterized.TestCase):
  def test_heads_and_embedding_are_spread(self):
    specs = sharding.param_specs(config_of())
    self.assertEqual(specs.mla.wq_a, P("fsdp", None))
    self.assertEqual(specs.mla.wq_b, P(None, "tensor", None))
    self.assertEqual(specs.mla.wkv_b, P(None, "tensor", None))
    self.assertEqual(specs.mla.wo, P("tensor", None, "fsdp"))
    self.assertEqual(specs.mla.q_norm, P(None))
    self.assertEqual(specs.indexer.wq_b, P(None, "tensor", None))
    self.assertEqual(specs.indexer.weights_proj, P("fsdp", "tensor"))

  def test_every_leaf_has_a_spec_of_its_rank(self):
    config = config_of()
    shapes = dsa.abstract_params(config)
    jax.tree.map(
      lambda x, spec: self.assertLen(spec, len(x.shape)),
      shapes,
      sharding.param_specs(config),
    )

  @parameterized.parameters("none", "fp8_ue8m0")
  def test_the_cache_is_spread_over_rows_and_places(self, how):
    config = dataclasses.replace(config_of(), kv_quantization=how)
    rules = {"batch": "data", "cached_tokens": ("context", "tensor")}
    specs = sharding.cache_specs(config, rules)
    rows = P("data", ("context", "tensor"), None)
    self.assertEqual(set(jax.tree.leaves(specs[:3])), {rows})
    self.assertEqual(specs.length, P("data"))
    cache = dsa.init_cache(config, 2, 8)
    self.assertEqual(jax.tree.structure(specs), jax.tree.structure(cache))

  def test_axes_that_a_mesh_lacks_do_not_count(self):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    self.assertEqual(sharding.rules_for(mesh), {"batch": ("data",)})

  def test_wrong_rules_are_refused(self):
    config = config_of()
    with self.assertRaisesRegex(ValueError, r"logical axes, .* got \['head'\]"):
      sharding.param_specs(config, {"head": "tensor"})
    with self.assertRaisesRegex(ValueError, "a mesh axis twice"):
      sharding.param_specs(config, {"heads": "a", "embed": ("b", "a")})


class InitTest(absltest.TestCase):
  def test_parameters_are_those_of_one_device_each_part_in_its_place(self):
    config = config_of()
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"))
    key = jax.random.key(3)
    params = sharding.init_sharded(key, config, mesh, dtype=jnp.bfloat16)
    wanted = dsa.init_params(key, config, jnp.bfloat16)
    for actual, expected in zip(
      jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True
    ):
      tolerances.assert_close_by_norm(actual, expected, 1e-3)
    self.assertEqual(params.mla.wo.sharding.spec, P("tensor", None, "fsdp"))
    heads, value, embed = params.mla.wo.shape
    self.assertEqual(
      params.mla.wo.addressable_shards[0].data.shape,
      (heads // 4, value, embed // 2),
    )

  def test_an_axis_that_does_not_divide_is_refused(self):
    mesh = jax.make_mesh((8,), ("tensor",))
    with self.assertRaisesRegex(ValueError, "mla.wq_b .* an axis of 4, which"):
      sharding.init_sharded(jax.random.key(0), config_of(), mesh)


class CacheTest(parameterized.TestCase):
  @parameterized.parameters("none", "fp8_ue8m0")
  def test_rows_are_served_where_they_lie(self, how):
    layer = layers.layer(0, batch=4, length=8, index_head_dim=16)
    config = dataclasses.replace(
      layer.config, index_quantization=how, kv_quantization=how
    )
    serve = dsa.make_cached_attention(config, backend=dsa.backends.gather())
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    rules = sharding.rules_for(mesh)
    x_spec, selection_spec = (
      sharding.partition_spec(sharding.ACTIVATIONS[name], rules)
      for name in ("x", "selection")
    )
    cache_specs = sharding.cache_specs(config, rules)
    spread = jax.shard_map(
      serve,
      mesh=mesh,
      in_specs=(P(), x_spec, cache_specs),
      out_specs=dsa.CachedResult(
        x_spec, cache_specs, dsa.Selection(selection_spec)
      ),
    )

    def place(tree, specs):
      return jax.device_put(
        tree, jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
      )

    wanted_cache = dsa.init_cache(config, 4, 12)
    cache = place(wanted_cache, cache_specs)
    params = jax.device_put(layer.params, jax.NamedSharding(mesh, P()))
    for tokens in (slice(0, 7), slice(7, 8)):
      x = layer.x[:, tokens]
      wanted = jax.jit(serve)(layer.params, x, wanted_cache)
      actual = jax.jit(spread)(params, place(x, x_spec), cache)
      cache, wanted_cache = actual.cache, wanted.cache
      np.testing.assert_array_equal(
        actual.selection.indices, wanted.selection.indices
      )
      tolerances.assert_output_close(actual.out, wanted.out, "float32")


class ZigzagTest(parameterized.TestCase):
  def test_each_device_gets_a_slice_from_each_end(self):
    x = jnp.arange(12)[None]
    self.assertEqual(
      sharding.to_zigzag(x, 3)[0].tolist(),
      [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7],
    )

  @parameterized.parameters(1, 2, 3, 6)
  def test_back_again(self, parts):
    x = jnp.arange(48).reshape(2, 2, 12)
    there = sharding.to_zigzag(x, parts, axis=2)
    back = sharding.from_zigzag(there, parts, axis=2)
    np.testing.assert_array_equal(back, x)

  def test_a_length_that_does_not_divide_is_refused(self):
    for reorder in (sharding.to_zigzag, sharding.from_zigzag):
      with self.assertRaisesRegex(ValueError, "a multiple of 4 tokens on axis"):
        reorder(jnp.zeros((1, 6)), 2)


if __name__ == "__main__":
  absltest.main()
