"""Who may import what, read from the source; and what importing the package really loads."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lm_experiments_tools
from tests.helpers import ROOT
from tests.helpers.sources import imports_of

ACCELERATE_FILES = ("lm_experiments_tools/backends/accelerate.py", "lm_experiments_tools/backends/launch.py")
SEQIO_FILES = ("lm_experiments_tools/data/seqio/tasks.py", "lm_experiments_tools/data/seqio/worker.py")

# package -> the only files that may import it
ONLY_IN = {
    "horovod": ("lm_experiments_tools/backends/horovod.py",),
    "accelerate": ACCELERATE_FILES,
    "deepspeed": (*ACCELERATE_FILES, "lm_experiments_tools/backends/deepspeed_config.py"),
    "tensorflow": SEQIO_FILES,
    "tensorflow_datasets": SEQIO_FILES,
    "t5": SEQIO_FILES,
    "seqio": SEQIO_FILES,
    # the seqio worker only loads it, before TensorFlow does: after it, triton aborts the process
    "triton": (
        "lm_experiments_tools/attention/kernels/triton_dropout.py",
        "lm_experiments_tools/attention/kernels/triton_kernels.py",
        "lm_experiments_tools/data/seqio/worker.py",
    ),
}
# What setup.py requires for every user, by import name; only these may be imported at the top of a module.
CORE = {
    "google",  # protobuf, which sentencepiece's model files are
    "huggingface_hub",
    "numpy",
    "packaging",
    "psutil",
    "safetensors",
    "sentencepiece",
    "tensorboard",
    "tokenizers",
    "torch",
    "tqdm",
    "transformers",
    "yaml",
}
# What an extra of setup.py brings, pyarrow as part of datasets; imported where it is used.
EXTRAS = {
    "apex", "bitsandbytes", "datasets", "datatrove", "lm_eval", "matplotlib", "megatron", "mteb", "nupunkt",
    "onnxruntime", "optuna", "peft", "pyarrow", "ray", "rouge_score", "sacrebleu", "sentence_transformers",
    "sentencex", "trackio", "wandb",
}  # fmt: skip
OURS = {"lm_experiments_tools", "modeling_t5", "modeling_bert", "megatron"}
# Rooms and files that modeling_t5 and modeling_bert may import.
UNDER_MODELS = {"attention", "errors", "files", "labels", "modules", "names"}
# The command line answers before anything heavy is loaded.
INSTANT = {
    "lm_experiments_tools/__init__.py": set(),
    "lm_experiments_tools/errors.py": set(),
    "lm_experiments_tools/config/training.py": set(),
    "lm_experiments_tools/config/pretraining.py": set(),
    "lm_experiments_tools/config/bert.py": set(),
    "lm_experiments_tools/config/cli.py": {"yaml"},
}


def sources() -> list[Path]:
    folders = ("lm_experiments_tools", "modeling_t5", "modeling_bert", "megatron")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(found) + sorted(ROOT.glob("run_*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def violations(path: str, source: str) -> list[str]:
    found = []
    for module, at_top in imports_of(source):
        package = module.partition(".")[0]
        if package.startswith("run_"):
            found.append(f"{path} imports the script {package}")
        elif package in ONLY_IN:
            if path not in ONLY_IN[package]:
                found.append(f"{path} imports {package}, which only {' and '.join(ONLY_IN[package])} may")
        elif package not in sys.stdlib_module_names and package not in OURS:
            if package not in CORE | EXTRAS:
                found.append(f"{path} imports {package}, which setup.py does not name")
            elif at_top and package not in CORE and not path.startswith("megatron/"):
                found.append(f"{path} imports {package} at its top: it is optional, so import it where it is used")
        words = module.split(".")
        if words[:2] == ["transformers", "models"] and any(word.startswith("modeling_") for word in words[2:]):
            found.append(f"{path} imports {module}, which is private to transformers")
        if path.startswith("modeling_") and package == "lm_experiments_tools" and words[1] not in UNDER_MODELS:
            found.append(f"{path} imports {module}: of ours, models take {', '.join(sorted(UNDER_MODELS))} alone")
        if path in INSTANT and package not in sys.stdlib_module_names | INSTANT[path] | {"lm_experiments_tools"}:
            found.append(f"{path} imports {package}: --help must be instant")
    return found


def test_there_is_something_to_check():
    names = [name_of(path) for path in sources()]
    assert {"lm_experiments_tools/training/trainer.py", "run_t5_pretraining.py", *INSTANT} <= set(names)


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_file_imports_only_what_it_may(path):
    assert violations(name_of(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("lm_experiments_tools/training/trainer.py", "import horovod.torch as hvd"),
        ("lm_experiments_tools/training/trainer.py", "def f():\n    from accelerate import Accelerator"),
        ("lm_experiments_tools/backends/horovod.py", "import deepspeed"),
        ("lm_experiments_tools/recipes/report.py", "import matplotlib.pyplot as plt"),
        ("lm_experiments_tools/recipes/report.py", "def f():\n    import leftpad"),
        ("lm_experiments_tools/data/loader.py", 'import importlib\nimportlib.import_module("tensorflow")'),
        ("lm_experiments_tools/training/trainer.py", "import run_t5_pretraining"),
        ("lm_experiments_tools/config/training.py", "import torch"),
        ("modeling_t5/modeling_t5.py", "from lm_experiments_tools import trainer"),
        ("modeling_t5/modeling_t5.py", "from transformers.models.t5.modeling_t5 import T5Attention"),
        ("modeling_t5/modeling_t5.py", "from transformers.models.t5 import modeling_t5"),
    ],
)
def test_each_rule_can_be_broken(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("lm_experiments_tools/backends/horovod.py", "import horovod.torch as hvd"),
        ("lm_experiments_tools/recipes/report.py", "def f():\n    import matplotlib"),
        ("modeling_t5/modeling_t5.py", "from lm_experiments_tools.attention import layouts"),
        (
            "lm_experiments_tools/config/training.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        ),
    ],
)
def test_rules_allow_what_they_should(path, source):
    assert violations(path, source) == []


def test_megatron_is_a_namespace_so_that_nvidias_can_stand_beside_it():
    assert not (ROOT / "megatron" / "__init__.py").exists()


def modules_after(statements: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after `statements`."""
    script = f"import sys, json\n{statements}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy_and_hardly_any_module():
    loaded = modules_after("import lm_experiments_tools") - modules_after("")
    assert {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) == {"lm_experiments_tools"}
    assert len(loaded) < 40, sorted(loaded)


def test_importing_the_loop_and_the_data_loads_no_backend_and_no_tensorflow():
    core = [name_of(path) for path in sources() if name_of(path).startswith("lm_experiments_tools/")]
    optional = {path for paths in ONLY_IN.values() for path in paths}
    modules = [
        path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in core if path not in optional
    ]
    loaded = {name.partition(".")[0] for name in modules_after("\n".join(f"import {module}" for module in modules))}
    # transformers imports accelerate and datasets by itself where they are installed
    assert not loaded & {"horovod", "deepspeed", "tensorflow", "t5", "seqio", "apex", "matplotlib"}


@pytest.mark.parametrize("package", ["", ".attention", ".data", ".trainer"])
def test_every_public_name_resolves(package):
    module = importlib.import_module(f"lm_experiments_tools{package}")
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Trianer"):
        _ = lm_experiments_tools.Trianer
    assert lm_experiments_tools.Trainer is importlib.import_module("lm_experiments_tools.trainer").Trainer
