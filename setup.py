"""Packaging. `make test` uses the pins of requirements*.txt, `make oldest` tests models and training with the
lowest versions here.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
CORE = [
    "huggingface_hub>=1",
    "numpy>=2.1,<3",
    "protobuf>=7.36.1",  # sentencepiece 0.2.3 refuses an older one
    "psutil>=6.0",
    "pyyaml>=6.0",
    "rouge-score>=0.1.2",  # the metric of lmtools finetune unless another is named
    "safetensors>=0.5",
    "sentencepiece>=0.2.3",
    "tensorboard>=2.18",
    "tokenizers>=0.22",
    "torch>=2.12",
    "tqdm>=4.66",
    "transformers>=5.20,<6",
]
EXTRAS = {
    # Horovod 0.28.1 as published does not compile against a torch that needs C++20: run scripts/build_horovod.py.
    # These are what that script and the built wheel need.
    "horovod": ["cffi>=1.4", "cloudpickle", "cmake>=3.21,<4", "packaging", "setuptools>=77,<81", "wheel"],
    "accelerate": ["accelerate>=1.15"],
    "deepspeed": ["accelerate>=1.15", "deepspeed>=0.19", "ninja"],
    # On Python 3.10 they need an older protobuf than sentencepiece.
    "seqio": [
        f'{name}; python_version >= "3.11"'
        for name in ("seqio==0.0.20", "t5==0.9.4", "tensorflow>=2.20", "tensorflow-text>=2.20")
    ],
    # sentence splitters of megatron/preprocess_data.py
    "bert": ['nupunkt>=0.8; python_version >= "3.11"', "sentencex>=1.0.32"],
    "peft": ["peft>=0.21.2"],
    "quantize": ["bitsandbytes>=0.50", "peft>=0.21.2"],
    "onnx": ["onnx>=1.17", "onnxruntime>=1.20", "onnxscript>=0.5"],
    "metrics": ["sacrebleu>=2.5"],
    # suites of lmtools evaluate
    "suites": ["lm_eval>=0.4.13"],
    "ray": ["ray[train]>=2.50"],  # examples/clusters/ray_train.py
    # --log_to
    "trackio": ["trackio>=0.43"],
    "wandb": ["wandb>=0.31"],
    "plots": ["matplotlib>=3.9"],
    "docs": ["mkdocstrings-python>=2.0", 'zensical>=0.0.70; python_version >= "3.11"'],
    "dev": [
        "datasets>=5.0",
        "hypothesis>=6.100",
        'import-linter>=2.17; python_version >= "3.11"',
        "ipykernel>=6.29",
        "megatron-core>=0.16",
        "nbclient>=0.10",
        "nbformat>=5.10",
        "pre-commit>=4.0",
        "pyrefly>=1.4,<2",
        "pytest>=8.3",
        "pytest-cov>=7.0",
        "pytest-timeout>=2.3",
        "ruff>=0.17,<0.18",
    ],
}
EXTRAS["all"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})

readme = ROOT / "README.md"
setup(
    name="lm_experiments_tools",
    version="1.0.0",
    description="Pre-train and fine-tune T5 and BERT, and your own variants of them, on Horovod and Accelerate",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    url="https://github.com/OWNER/lm_experiments_tools",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_namespace_packages(
        include=[
            "lm_experiments_tools*",
            "modeling_t5*",
            "modeling_bert*",
            # without an __init__.py of its own, so that NVIDIA's megatron.core can be installed beside it
            "megatron*",
            "models_configs*",
            "accelerate_configs*",
        ]
    )
    + ["lm_experiments_tools.scripts"],
    package_dir={"lm_experiments_tools.scripts": "scripts"},
    py_modules=["run_bert_pretraining", "run_finetuning", "run_t5_pretraining"],
    package_data={"": ["*.json", "*.yaml", "*.pyi", "py.typed"]},
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["lmtools = lm_experiments_tools.tools.main:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *[f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)],
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
