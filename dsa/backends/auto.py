"""Picks a backend from shapes and platform, by the cost model of `dsa.costs`.

    auto(...)(inputs, selection) = the backend that is estimated fastest

Long sequences of which a query selects little are gathered; where T or S is a
few times K at most, all pairs take less. Nothing is measured and nothing global
is read: without `device_kind` the choice of every platform is laid down, and
the one that the program is compiled for is kept.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from dsa import costs, mla
from dsa.backends import contract
from dsa.backends.dot_product import dot_product
from dsa.backends.gather import gather
from dsa.backends.tokamax_flash import tokamax_flash
from dsa.selection import Selection

_FACTORIES: Mapping[str, contract.BackendFactory] = {
  "dot_product": dot_product,
  "gather": gather,
  "tokamax_flash": tokamax_flash,
}

# By the names that `jax.lax.platform_dependent` gives them.
_PLATFORMS = ("cpu", "tpu", "cuda")


def auto(*, device_kind: str | None = None) -> mla.Backend:
  """Makes the backend that picks another.

  Args:
    device_kind: What the program will run on, as `jax.Device.device_kind` says
      it or by platform ("cpu", "tpu", "cuda"); by default whatever it is
      compiled for, of its platform the kind that `dsa.costs` names.

  Returns:
    A backend. `make_attention` asks it once, with the sizes of the whole
    sequence; called directly it goes by what it is given.

  Raises:
    ValueError: If the device kind is unknown.
  """
  if device_kind is not None:
    costs.known_kind(device_kind)

  def choose(
    sizes: costs.Sizes, itemsize: int, *, causal: bool
  ) -> contract.KernelBackend:
    kinds = _PLATFORMS if device_kind is None else (device_kind,)
    names = {
      kind: costs.estimates(
        sizes, itemsize=itemsize, causal=causal, device_kind=kind
      )[0].backend
      for kind in kinds
    }
    return _by_platform(
      {kind: _FACTORIES[name]() for kind, name in names.items()}
      if len({*names.values()}) > 1
      else {"default": _FACTORIES[names[kinds[0]]]()}
    )

  def choose_for(
    inputs: mla.MLAInputs, selection: Selection
  ) -> contract.KernelBackend:
    sizes = contract.check_inputs(inputs, selection)
    return choose(sizes, inputs.kv_latent.dtype.itemsize, causal=False)

  def attend(
    inputs: mla.MLAInputs, selection: Selection, *, scale: float
  ) -> jax.Array:
    return choose_for(inputs, selection)(inputs, selection, scale=scale)

  def with_probs(
    inputs: mla.MLAInputs, selection: Selection, *, scale: float
  ) -> tuple[jax.Array, jax.Array]:
    backend = choose_for(inputs, selection)
    return mla.attend_with_probs(backend, inputs, selection, scale=scale)

  return contract.KernelBackend(
    attend,
    with_probs=with_probs,
    for_sizes=functools.partial(choose, causal=True),
  )


def _by_platform(
  backends: Mapping[str, mla.Backend],
) -> contract.KernelBackend:
  """One backend out of those of each platform, or of the only one there is."""

  def run(function: Callable[..., Any]) -> Callable[..., Any]:
    def on_platform(
      inputs: mla.MLAInputs, selection: Selection, *, scale: float
    ) -> Any:
      branches = {
        platform: functools.partial(function, backend, scale=scale)
        for platform, backend in backends.items()
      }
      if len(branches) == 1:
        return branches["default"](inputs, selection)
      # What is no accelerator of ours gets the definition.
      branches["default"] = functools.partial(
        function, dot_product(), scale=scale
      )
      return jax.lax.platform_dependent(inputs, selection, **branches)

    return on_platform

  def attend(
    backend: mla.Backend,
    inputs: mla.MLAInputs,
    selection: Selection,
    *,
    scale: float,
  ) -> jax.Array:
    return backend(inputs, selection, scale=scale)

  return contract.KernelBackend(
    run(attend),
    with_probs=run(mla.attend_with_probs),
    reads_all_keys=any(
      getattr(backend, "reads_all_keys", True) for backend in backends.values()
    ),
  )
