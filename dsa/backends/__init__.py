"""Attention backends, and the contract they satisfy (`contract`).

`dot_product()` is the readable definition, `gather()` attends to the selected
latents alone, and `tokamax_flash()` runs tokamax's flash attention under the
selection as a dynamic mask. `auto()` picks among them from shapes and platform.
"""

from dsa.backends.auto import auto
from dsa.backends.contract import KernelBackend, check_inputs
from dsa.backends.dot_product import dot_product
from dsa.backends.gather import gather
from dsa.backends.tokamax_flash import tokamax_flash

__all__ = [
  "KernelBackend",
  "auto",
  "check_inputs",
  "dot_product",
  "gather",
  "tokamax_flash",
]
