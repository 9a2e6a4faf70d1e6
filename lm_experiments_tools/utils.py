"""The module of t5-experiments' helpers.

Old programs write `from lm_experiments_tools.utils import get_cls_by_name`.
"""

from lm_experiments_tools.ancestor.notice import notice
from lm_experiments_tools.ancestor.utilities import (
    collect_run_configuration,
    get_cls_by_name,
    get_distributed_rank,
    get_fn_param_names,
    get_git_diff,
    get_git_hash_commit,
    let_cpus_train,
    prepare_run,
    rank_0,
    wait_for_everyone,
)
from lm_experiments_tools.optimizers import get_optimizer

__all__ = [
    "collect_run_configuration",
    "get_cls_by_name",
    "get_distributed_rank",
    "get_fn_param_names",
    "get_git_diff",
    "get_git_hash_commit",
    "get_optimizer",
    "prepare_run",
    "rank_0",
    "wait_for_everyone",
]

notice("lm_experiments_tools.utils", "get_cls_by_name and get_optimizer of lm_experiments_tools itself")
let_cpus_train()
