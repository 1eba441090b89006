"""DeepSeek Sparse Attention (DSA) for JAX: functional, exact, any backend.

A lightning indexer scores every key for each query, an exact top-k keeps the
best, and Multi-head Latent Attention (MLA) attends to those alone. Stateless
functions over explicit parameter pytrees; the attention kernel is injected.

    config = dsa.deepseek_v32()
    params = dsa.init_params(jax.random.key(0), config, jnp.bfloat16)
    attention = dsa.make_attention(config, backend=dsa.backends.gather())
    result = attention(params, x)            # .out, .selection, .indexer_loss

Letters in docstrings: B batch, T query tokens, S key tokens, N attention heads,
E hidden_size, L q_lora_rank, C kv_lora_rank, P qk_nope_head_dim,
R qk_rope_head_dim, V v_head_dim, I index_n_heads, D index_head_dim,
K = min(index_topk, S).
"""

from dsa import backends, checkpoint, quantization, sharding
from dsa.attention import Attention, AttentionResult, make_attention
from dsa.cache import CachedAttention, CachedResult, make_cached_attention
from dsa.cache_buffers import Cache, init_cache
from dsa.composition import Stage
from dsa.config import DSAConfig, RopeConfig, deepseek_v32, glm_5
from dsa.indexer import (
  index_head_weights,
  index_keys,
  index_queries,
  indexer_scores,
  selected_scores,
  weighted_relu_scores,
)
from dsa.losses import indexer_kl, indexer_kl_loss
from dsa.mla import (
  Backend,
  MLAInputs,
  kv_latents,
  mla_queries,
  query_latent,
  sparse_mla,
)
from dsa.params import (
  DSAParams,
  IndexerParams,
  MLAParams,
  abstract_params,
  init_params,
)
from dsa.planner import Plan, PlanShapes, plan
from dsa.rope import (
  yarn_frequencies,
  yarn_rope_concat,
  yarn_rope_interleaved,
)
from dsa.selection import Selection, topk_indices, topk_mask, visible_mask
from dsa.sharded_attention import make_sharded_attention

__version__ = "0.1.0"

__all__ = [
  "Attention",
  "AttentionResult",
  "Backend",
  "Cache",
  "CachedAttention",
  "CachedResult",
  "DSAConfig",
  "DSAParams",
  "IndexerParams",
  "MLAInputs",
  "MLAParams",
  "Plan",
  "PlanShapes",
  "RopeConfig",
  "Selection",
  "Stage",
  "abstract_params",
  "backends",
  "checkpoint",
  "deepseek_v32",
  "glm_5",
  "index_head_weights",
  "index_keys",
  "index_queries",
  "indexer_kl",
  "indexer_kl_loss",
  "indexer_scores",
  "init_cache",
  "init_params",
  "kv_latents",
  "make_attention",
  "make_cached_attention",
  "make_sharded_attention",
  "mla_queries",
  "quantization",
  "plan",
  "query_latent",
  "selected_scores",
  "sharding",
  "sparse_mla",
  "topk_indices",
  "topk_mask",
  "visible_mask",
  "weighted_relu_scores",
  "yarn_frequencies",
  "yarn_rope_concat",
  "yarn_rope_interleaved",
]
