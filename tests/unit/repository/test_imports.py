"""Contents of the modules that an import loads. `lint-imports` (pyproject.toml) checks who may import whom."""

import importlib
import json
import subprocess
import sys

import pytest

from tests.helpers import ROOT


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


def packages_after(statements: str) -> set[str]:
    return {name.partition(".")[0] for name in modules_after(statements) - modules_after("")}


def test_help_is_instant_because_configurations_load_nothing_heavy():
    modules = ("training", "pretraining", "bert", "finetuning", "cli")
    loaded = packages_after("\n".join(f"import lm_experiments_tools.config.{module}" for module in modules))
    assert not loaded & {"numpy", "safetensors", "tensorboard", "tokenizers", "torch", "transformers"}
    assert loaded >= {"lm_experiments_tools", "yaml"}


@pytest.mark.slow  # `lint-imports` finds the imports of our own files
def test_importing_the_loop_and_the_data_loads_no_backend_and_no_tensorflow():
    backends = {"horovod", "accelerate", "launch", "deepspeed_config"}
    files = [
        path.relative_to(ROOT).with_suffix("")
        for path in (ROOT / "lm_experiments_tools").rglob("*.py")
        if not (path.parent.name == "backends" and path.stem in backends)
        and not (path.parent.name == "seqio" and path.stem in ("tasks", "worker"))
        and not path.stem.startswith("triton_")
    ]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in files]
    loaded = packages_after("\n".join(f"import {module}" for module in modules))
    # transformers imports accelerate and datasets by itself where they are installed
    assert not loaded & {"horovod", "deepspeed", "tensorflow", "t5", "seqio", "apex", "matplotlib"}


@pytest.mark.parametrize("package", ["", ".attention", ".data", ".trainer"])
def test_every_public_name_resolves(package):
    module = importlib.import_module(f"lm_experiments_tools{package}")
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)
