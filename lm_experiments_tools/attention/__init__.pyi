"""The public names: lazy_names reads them here, and type checkers and editors do too."""

from lm_experiments_tools.attention.huggingface import enable as enable
from lm_experiments_tools.attention.huggingface import register as register
from lm_experiments_tools.attention.kernels.bias import AlibiBias as AlibiBias
from lm_experiments_tools.attention.kernels.bias import T5Bias as T5Bias
from lm_experiments_tools.attention.kernels.bias import alibi_slopes as alibi_slopes
from lm_experiments_tools.attention.kernels.call import AttentionSpec as AttentionSpec
from lm_experiments_tools.attention.kernels.call import attend as attend
from lm_experiments_tools.attention.kernels.call import block_sparse_attention as block_sparse_attention
from lm_experiments_tools.attention.kernels.layout_cache import Layout as Layout
from lm_experiments_tools.attention.layouts import BigBirdSparsityConfig as BigBirdSparsityConfig
from lm_experiments_tools.attention.layouts import BSLongformerSparsityConfig as BSLongformerSparsityConfig
from lm_experiments_tools.attention.layouts import DenseSparsityConfig as DenseSparsityConfig
from lm_experiments_tools.attention.layouts import FixedSparsityConfig as FixedSparsityConfig
from lm_experiments_tools.attention.layouts import LocalSlidingWindowSparsityConfig as LocalSlidingWindowSparsityConfig
from lm_experiments_tools.attention.layouts import SparsityConfig as SparsityConfig
from lm_experiments_tools.attention.layouts import VariableSparsityConfig as VariableSparsityConfig
from lm_experiments_tools.attention.layouts import get_sparsity_config as get_sparsity_config
