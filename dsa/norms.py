"""The two normalisations of a DSA layer, computed in float32.

    rms_norm(x)   = scale * x / sqrt(mean(x^2) + eps)             (the latents)
    layer_norm(x) = scale * (x - mean) / sqrt(var + eps) + bias   (index keys)

Sources: RMSNorm, arXiv 1910.07467; LayerNorm, arXiv 1607.06450.
"""

import jax
import jax.numpy as jnp

from dsa.checks import check_shape


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
  """Divides by the root mean square over the last axis and applies a gain.

  Args:
    x: [..., C], any float dtype.
    scale: [C].
    eps: Added to the mean square.

  Returns:
    [..., C] in x's dtype.

  Raises:
    ValueError: If `scale` is not as wide as x's last axis.
  """
  check_shape("scale", scale, "C", C=x.shape[-1])
  x32 = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
  normed = x32 * jax.lax.rsqrt(mean_square + eps)
  return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def layer_norm(
  x: jax.Array, scale: jax.Array, bias: jax.Array, *, eps: float
) -> jax.Array:
  """Removes the mean, divides by the standard deviation, applies gain and bias.

  Args:
    x: [..., D], any float dtype.
    scale: [D].
    bias: [D].
    eps: Added to the variance.

  Returns:
    [..., D] in x's dtype.

  Raises:
    ValueError: If `scale` or `bias` is not as wide as x's last axis.
  """
  check_shape("scale", scale, "D", D=x.shape[-1])
  check_shape("bias", bias, "D", D=x.shape[-1])
  x32 = x.astype(jnp.float32)
  centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
  variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
  normed = centred * jax.lax.rsqrt(variance + eps)
  scaled = normed * scale.astype(jnp.float32) + bias.astype(jnp.float32)
  return scaled.astype(x.dtype)
