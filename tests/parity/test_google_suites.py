"""Google's own test methods of t5 and seqio pass with our functions in place of those they were written for.

Which methods cannot be pointed at ours, and why, is in benchmarks/seqio.md.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

# The wheels of t5 and seqio bring their tests.
MODULES = ("tensorflow", "t5", "seqio", "t5.data.preprocessors_test", "seqio.feature_converters_test")


def absent():
    for name in MODULES:
        package = name.split(".")[0]
        spec = importlib.util.find_spec(package)
        if spec is None:
            return package
        if (
            "." in name
            and not Path(*spec.submodule_search_locations, *name.split(".")[1:]).with_suffix(".py").exists()
        ):
            return name
    return None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(absent() is not None, reason=f"{absent()} is not installed"),
]
METHODS = [
    "test_random_spans_helper", "test_random_spans_noise_mask", "test_noise_span_to_unique_sentinel", "test_denoise",
    "test_span_corruption", "test_span_corruption_passthrough", "test_random_prefix_noise_mask", "test_prefix_lm",
    "test_split_tokens", "test_split_padding_tokens", "test_encoder_decoder_unpacked",
    "test_encoder_decoder_targets_max_length",
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    file = tmp_path_factory.mktemp("google") / "results.json"
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("google_cases.py")), str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize("method", METHODS)
def test_googles_test_passes_with_our_function(results, method):
    assert sorted(results) == sorted(METHODS)
    assert results[method]["error"] is None, results[method]["error"]
    assert results[method]["calls"] > 0  # it did ask ours
