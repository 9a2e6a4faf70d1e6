"""Run a script with FSDP2 or DeepSpeed ZeRO through Accelerate on CPUs, which Accelerate itself refuses. Tests only.

    torchrun --nproc_per_node 2 cpu_shim.py MODE SCRIPT [ARGS...]
    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 cpu_shim.py launched SCRIPT ...

MODE is fsdp, zero1, zero2, zero3, zero3_offload, or launched: what the launcher's configuration file says. Accelerate
shards only where it found GPUs, so a process group of CPUs is made first and then, for FSDP, called one of GPUs in
Accelerate's own state; from there on its code and torch's run unchanged on gloo.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

ZERO_STAGES = {"zero1": "1", "zero2": "2", "zero3": "3", "zero3_offload": "3"}


def set_environment(mode: str) -> None:
    """The environment that `accelerate launch` would set for this mode."""
    if mode == "fsdp":
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        os.environ.update(FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP")
    elif mode in ZERO_STAGES:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = ZERO_STAGES[mode]
        if mode == "zero3_offload":
            os.environ["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] = "cpu"
            os.environ["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] = "cpu"
    elif mode != "launched":
        raise SystemExit(f"cpu_shim.py: no mode {mode}")


def claim_cpus() -> None:
    """Form the group on gloo and let Accelerate believe what it needs to go on."""
    from accelerate.state import DistributedType, PartialState

    os.environ["DS_ACCELERATOR"] = "cpu"
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes to compile; gloo does the same
    PartialState(cpu=True)
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def main() -> None:
    mode, script, *arguments = sys.argv[1:]
    set_environment(mode)
    claim_cpus()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
