"""Where compiled blocks are kept."""

import os

from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from lm_experiments_tools.models.speed import compile_blocks


def test_torchs_own_folder_is_replaced_and_a_chosen_one_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for before, after in ((default_cache_dir(), f"{tmp_path}/lm_experiments_tools/inductor"), ("/mine", "/mine")):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        compile_blocks(nn.Linear(2, 2))
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == after
