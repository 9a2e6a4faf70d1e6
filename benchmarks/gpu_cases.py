"""Cases of benchmarks/gpu.py. Each runs in a process of its own and reports rows through `emit`."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_attention import attention, cudnn_bias, kernels, tile_compile, tile_search
from gpu_trace import by_kind, idle_share, kernels_of, last_line, read_trace, waits_of
from peaks import measured_peak
from step import Shape, Worker, flops_of

from lm_experiments_tools.modules.devices import has_bf16
from lm_experiments_tools.training.flops import data_sheet_peak

ROOT = Path(__file__).resolve().parents[1]
Emit = Callable[[dict[str, Any]], None]
MIB = 2**20


class Case(NamedTuple):
    """One process of the benchmark.

    Attributes:
        seconds: estimated on an H100 with an empty compile cache.
        alone: False for a case that measures no time, and so runs next to others.
    """

    part: str
    name: str
    run: Callable[[dict[str, Any], Emit], None]
    settings: dict[str, Any]
    seconds: int
    alone: bool = True


def environment(settings: dict[str, Any], emit: Emit) -> None:
    """Versions, the device, and matrix products in bf16, TF32 and float32."""
    device = torch.device(settings["device"])
    found = {name: metadata.version(name) for name in ("torch", "triton", "transformers")}
    found["device"] = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {platform.machine()}"
    kinds = {"bf16": (torch.bfloat16, "high"), "TF32": (torch.float32, "high"), "fp32": (torch.float32, "highest")}
    if device.type == "cuda":
        query = "clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        emit({"name": "clocks", "device": subprocess.run(command, capture_output=True, text=True).stdout.strip()})
    for name, (dtype, precision) in kinds.items():
        torch.set_float32_matmul_precision(precision)
        rate = measured_peak(device, dtype)
        emit({"name": name, "python": platform.python_version(), **found, "product_tflops": rate / 1e12})


# ---- training steps -------------------------------------------------------------------------------------------------
# MiB of one row of t5-v1_1-base, 512/114, about: loops run at the same time only if they fit together.
_ROW_MIB = {"ours": 200, "ours, before": 200, "ours, CUDA graphs": 250, "nanoT5": 800, "nanoT5, compiled": 450,
            "transformers, bare loop, compiled": 440}  # fmt: skip
_OTHER_MIB, _CONTEXT_MIB = 620, 4800
ROUNDS, STEPS, FEWEST_STEPS, TURN_SECONDS, WARM_UP, TRACED = 3, 30, 8, 4.0, 3, 3


def groups_of(loops: list[str], shape: Shape, memory_mib: float) -> list[list[str]]:
    """Loops that fit into memory together; each group begins with the first loop, which others are compared with."""

    def size(loop: str) -> float:
        return _ROW_MIB.get(loop, _OTHER_MIB) * shape.rows + _CONTEXT_MIB

    first, groups = loops[0], []
    for loop in loops[1:]:
        if not groups or sum(map(size, groups[-1])) + size(loop) > memory_mib:
            groups.append([first])
        groups[-1].append(loop)
    return groups or [[first]]


def step(settings: dict[str, Any], emit: Emit) -> None:
    """Interleaved turns of loops that train on one shape; a loop without memory beside others is measured alone."""
    shape, loops = Shape(**settings["shape"]), settings["loops"]
    short_of_memory = _interleaved(settings, shape, loops, emit)
    for loop in short_of_memory:
        if len(loops) == 1 or _interleaved(settings, shape, [loop], emit):
            emit({"name": loop, "error": "out of memory"})


def _interleaved(settings: dict[str, Any], shape: Shape, loops: list[str], emit: Emit) -> list[str]:
    """Measure these loops; returns those that ran out of memory."""
    logs, checkout = Path(settings["output"], "logs"), settings["nanot5"] and Path(settings["nanot5"])
    trees = {loop: Path(settings["before"]) if loop.endswith(BEFORE) else None for loop in loops}
    workers = {
        loop: Worker(loop.removesuffix(BEFORE), shape, settings["precision"], logs, checkout, tree)
        for loop, tree in trees.items()
    }
    for worker in workers.values():  # at the same time: compiling takes minutes, one after the other
        worker.begin(WARM_UP)
    for worker in workers.values():
        worker.finish()
    running = {loop: worker for loop, worker in workers.items() if not worker.failed}
    for worker in running.values():  # compiled and warm: the length of a turn depends on this one
        worker.begin(WARM_UP)
        worker.finish()
    for _, (loop, worker) in itertools.product(range(settings["rounds"]), running.items()):
        seconds = worker.turns[-1]["wall"] / worker.turns[-1]["steps"]
        worker.begin(min(max(int(TURN_SECONDS / seconds), FEWEST_STEPS), settings["steps"]))
        worker.finish()
        if not worker.failed:
            emit({"name": loop, **_summary(worker.turns[2:], shape, loop), "interleaved": len(loops) > 1})
    for loop, worker in running.items():
        if not worker.failed:
            worker.begin(-TRACED)
            worker.finish()
        if not worker.failed:
            emit({"name": loop, "kernels": worker.turns[-1]["kernels"], "idle": worker.turns[-1]["idle"]})
    found = []
    for loop, worker in workers.items():
        worker.close()
        log = worker.path.read_text(errors="replace")
        if worker.failed and "OutOfMemoryError" in log:
            found.append(loop)
        elif worker.failed:
            emit({"name": loop, "error": last_line(log)})
    return found


def _summary(turns: list[dict[str, float]], shape: Shape, loop: str) -> dict[str, Any]:
    """Of the turns so far."""
    seconds, peak = (
        [turn["wall"] / turn["steps"] for turn in turns],
        data_sheet_peak(torch.device("cuda"), torch.bfloat16) if torch.cuda.is_available() else None,
    )
    median, last = statistics.median(seconds), turns[-1]
    return {
        "seconds": median,
        "host": statistics.median(turn["host"] / turn["steps"] for turn in turns),
        "spread": (max(seconds) - min(seconds)) / median,
        "steps": sum(turn["steps"] for turn in turns),
        "tokens_per_second": last["tokens"] / last["steps"] / median,
        "share_of_peak": flops_of(shape, loop) / median / peak if peak else None,
        "allocated": last["memory"],
        "reserved": last.get("reserved"),
    }


# ---- memory ---------------------------------------------------------------------------------------------------------
_OWN = "pretrain-t5 --model_cls modeling_t5:T5ForConditionalGeneration --lr 1e-3"
MEMORY = (
    f"{_OWN} --bf16 --model_cfg t5-v1_1-small --batch_size 32 --input_seq_len 512",
    f"{_OWN} --bf16 --model_cfg t5-v1_1-base --batch_size 16 --input_seq_len 512 --optimizer AdamWScale",
    f"{_OWN} --bf16 --model_cfg t5-v1_1-base --batch_size 64 --input_seq_len 512 --gradient_checkpointing",
    f"{_OWN} --no_bf16 --model_cfg t5-small --batch_size 16 --input_seq_len 512 --optimizer Adafactor",
    "pretrain-t5 --speed off --lr 1e-3 --bf16 --model_cfg t5-v1_1-base --batch_size 8 --input_seq_len 512",
    "pretrain-bert --model_cls modeling_bert.modeling_bert:BertForPreTraining --lr 1e-3 --vocab_file - --bf16 "
    "--model_cfg bert_base_uncased --batch_size 16 --input_seq_len 512",
    "pretrain-bert --speed off --lr 1e-3 --mlm_positions all --vocab_file - --bf16 --model_cfg bert_base_uncased "
    "--batch_size 16 --input_seq_len 512",
    "finetune --speed off --lr 1e-3 --bf16 --peft lora --model_cfg t5-v1_1-large --batch_size 8",
)


def memory(settings: dict[str, Any], emit: Emit) -> None:
    """Estimated and allocated memory of three training steps."""
    from memory_plan import allocated_peak, make_steps

    from lm_experiments_tools.config.cli import parse
    from lm_experiments_tools.planning.build import prepare
    from lm_experiments_tools.planning.estimate import estimate_memory
    from lm_experiments_tools.tools.plan import SCRIPTS

    name, *flags = shlex.split(settings["command"])
    args, origins = parse(SCRIPTS[name], [*flags, "--device", settings["device"]])
    estimate = estimate_memory(args, args, origins)
    row = {"predicted": estimate.total / MIB}
    if settings["device"] == "cuda":
        torch.set_float32_matmul_precision("high" if estimate.args.speed == "auto" else "highest")
        make_steps(prepare(estimate.args, "cuda"))
        row |= {"allocated": torch.cuda.max_memory_allocated() / MIB}
        row |= {"reserved": torch.cuda.max_memory_reserved() / MIB}
    else:
        row["allocated"] = allocated_peak(estimate.args) / MIB
    emit({"name": settings["command"], **row, "ratio": row["predicted"] / row["allocated"]})


# ---- runs of the training script ------------------------------------------------------------------------------------
def _pretrain(settings: dict[str, Any], run: Path, **flags: Any) -> list[dict[str, Any]]:
    """Run run_t5_pretraining.py in this process; returns its lines of metrics."""
    import run_t5_pretraining

    values = {
        "data_path": _corpus(settings), "vocab": Path(settings["output"], "data", "vocab.model"), "model_path": run,
        "model_cfg": settings["model_cfg"], "input_seq_len": settings["length"], "batch_size": settings["rows"],
        "optimizer": "AdamWScale", "lr": 1e-3, "clip_grad_norm": 1.0, "compile": False, "seed": 1,
    }  # fmt: skip
    words = []
    for name, value in {**values, **flags}.items():
        words += [f"--{name}", str(value)] if not isinstance(value, bool) else [f"--{'' if value else 'no_'}{name}"]
    run_t5_pretraining.main(words)
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == "train" and line["metrics"]]


def _corpus(settings: dict[str, Any]) -> Path:
    """Python's own documentation as text, with a vocabulary; made by the first that asks."""
    from pydoc_data.topics import topics

    import sentencepiece

    folder = Path(settings["output"], "data")
    folder.mkdir(exist_ok=True)
    texts, made = folder / "text.jsonl", folder / "vocab.model"
    if made.exists():
        return texts
    documents = [" ".join(text.split()) for _, text in sorted(topics.items())]
    own = folder / f"made_{os.getpid()}"  # cases run next to each other: a file appears when it is complete
    own.with_suffix(".txt").write_text("\n".join(documents))
    sentencepiece.SentencePieceTrainer.train(
        input=str(own.with_suffix(".txt")), model_prefix=str(own), vocab_size=1000, pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    own.with_suffix(".jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    own.with_suffix(".jsonl").replace(texts)
    own.with_suffix(".model").replace(made)
    return texts


def _run_folder(settings: dict[str, Any]) -> Path:
    """A folder in which no interrupted case has begun a run."""
    return Path(settings["output"], "runs", str(os.getpid()))


def resume(settings: dict[str, Any], emit: Emit) -> None:
    """A run next to one that was stopped halfway and resumed: the weights must have the same bits."""
    from safetensors.torch import load_file

    name, flags, iters = settings["name"], settings["flags"], settings["iters"]
    folder = _run_folder(settings)
    logged = _pretrain(settings, folder / "whole", iters=iters, log_interval=iters // 2, **flags)
    for end in (iters // 2, iters):
        _pretrain(settings, folder / "resumed", iters=end, log_interval=iters // 2, **flags)
    whole, resumed = (load_file(folder / run / "last" / "model.safetensors") for run in ("whole", "resumed"))
    differs = max((whole[key].double() - resumed[key].double()).abs().max().item() for key in whole)
    seconds = logged[-1]["seconds_per_step"]
    equal = differs == 0 and all(torch.equal(whole[key], resumed[key]) for key in whole)
    emit({"name": name, "result": "same bits" if equal else f"largest difference {differs:.3g}",
          "passed": equal or not settings["must"], "seconds_per_step": seconds})  # fmt: skip


def fp16(settings: dict[str, Any], emit: Emit) -> None:
    """fp16 with its loss scale: the loss falls, and few updates are skipped."""
    logged = _pretrain(settings, _run_folder(settings), iters=40, log_interval=10, fp16=True)
    first, last = logged[0]["loss"], logged[-1]["loss"]
    skipped = logged[-1]["skipped_updates"]
    emit({"name": "fp16 with GradScaler", "result": f"loss {first:.2f} to {last:.2f}, {skipped} updates skipped",
          "passed": last < first and skipped < 20, "seconds_per_step": logged[-1]["seconds_per_step"]})  # fmt: skip


def queue(settings: dict[str, Any], emit: Emit) -> None:
    """A profiler trace of steady steps of the script: the device is never idle, the host never waits for its queue."""
    steps, folder = settings["steps"], _run_folder(settings)
    flags = {"iters": 2 * steps + 12, "log_interval": steps, "profile": 10, "profile_after": 2 * steps + 1}
    logged = _pretrain(settings, folder, **flags, compile=settings["compile"])[1]
    row = {"name": settings["name"], "data_share": logged["data_wait_fraction"]}
    row |= {"seconds_per_step": logged["seconds_per_step"]}
    trace = read_trace(next((folder / "profile").glob("*.json")))
    blocking, idle, on_gpu = waits_of(trace), idle_share(kernels_of(trace)), settings["device"] == "cuda"
    row |= {"kernels": by_kind(kernels_of(trace), flags["profile"]), "idle": idle}
    said = f"{len(blocking)} waits {', '.join(sorted(set(blocking)))}; device idle {idle:.1%}"
    row["passed"] = not blocking and idle < 0.02 and row["data_share"] < 0.02 if on_gpu else None
    emit({**row, "result": said})


# ---- programs -------------------------------------------------------------------------------------------------------
def gpu_tests(settings: dict[str, Any], emit: Emit) -> None:
    """`pytest -m gpu` of one file; pytest's plug-ins need not be there."""
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "gpu", "-rfE"]
    command += [str(ROOT / settings["file"]), "-k", settings["only"]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    Path(settings["output"], "logs", f"pytest_{os.getpid()}.log").write_text(done.stdout + done.stderr)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    said = ", ".join([last_line(done.stdout or done.stderr), *failed])
    emit({"name": settings["name"], "result": said, "passed": done.returncode == 0})


def launcher(settings: dict[str, Any], emit: Emit) -> None:
    """The script under a launcher with one process: it must say which backend it has, and train."""
    folder = _run_folder(settings)
    flags = f"""--data_path {_corpus(settings)} --vocab {settings["output"]}/data/vocab.model --iters 20 --lr 1e-3
        --model_cfg {settings["model_cfg"]} --input_seq_len {settings["length"]} --batch_size {settings["rows"]}
        --log_interval 5 --no_compile --model_path {folder}"""
    command = [*shlex.split(settings["command"]), str(ROOT / "run_t5_pretraining.py"), *shlex.split(flags)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    logged = done.stdout + done.stderr
    named = settings["says"] in logged
    error = "" if done.returncode == 0 and named else f": {last_line(logged)}"
    emit({"name": settings["name"], "result": f"exit code {done.returncode}{error}",
          "passed": done.returncode == 0 and named})  # fmt: skip


# ---- all cases, the most valuable first -----------------------------------------------------------------------------
def skipped(settings: dict[str, Any], emit: Emit) -> None:
    """A case that this machine cannot run."""
    emit({"name": settings["name"], "skipped": settings["why"]})


def lacks(*packages: str) -> str | None:
    """The first package that is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{missing[0]} is not installed" if missing else None


BEFORE = ", before"  # ours of the tree that --before names
STEP_LOOPS = ["ours", f"ours{BEFORE}", "ours, CUDA graphs"]
T5_LOOPS = ["ours", "nanoT5, compiled", "transformers, bare loop, compiled"]
OTHER_LOOPS = ["ours", "transformers Trainer", "nanoT5", "transformers, bare loop", "ours, --speed off"]
BASE = Shape("t5-v1_1-base", 128, 512, 114)
TESTS = {  # file: expressions of -k, each a process
    "tests/unit/attention/test_attention_triton.py": (
        "exact and bfloat16", "exact and float32", "exact and float16 and not bfloat16", "long", "two_runs or auto",
    ),
    "tests/parity/test_optimizers_reference.py": ("cuda",),
    "tests/unit/modeling_t5/test_modeling_t5.py": ("gpu",),
    "tests/unit/training/test_running_ahead.py": ("gpu",),
}  # fmt: skip
FIRST_TESTS = "exact and bfloat16", "cuda"


def attention_cases(common: dict[str, Any], tiny: bool) -> list[Case]:
    """A case for each layout and length; without time to measure first, which fills the compile caches."""
    found = []
    for layout, length in itertools.product(("dense", "BigBird"), (64,) if tiny else (512, 2048)):
        settings, name = {**common, "layout": layout, "length": length}, f"{layout}, {length} tokens"
        if common["device"] == "cuda":
            found.append(Case("attention", f"compile {name}", attention, {**settings, "warm": True}, 75, alone=False))
        found.append(Case("attention", name, attention, settings, 20 + length // 400))
    return sorted(found, key=lambda case: case.alone)


def step_cases(common: dict[str, Any], shape: Shape, loops: list[str]) -> Iterator[Case]:
    """Cases of a shape: as many as its loops need to fit into the device's memory."""
    on_gpu = common["device"] == "cuda"
    length = f"{shape.inputs}/{shape.targets}" if shape.is_t5 else f"{shape.inputs}"
    precision = "bf16" if on_gpu or has_bf16("cpu") else "fp32"
    title = f"{Path(shape.preset).stem}, {shape.rows} x {length}, {precision}"
    absent = {loop: "nanot5" for loop in loops if "nanoT5" in loop and not common["nanot5"]}
    absent |= {loop: "before" for loop in loops if loop.endswith(BEFORE) and not common["before"]}
    loops = [loop for loop in loops if loop not in absent]
    total = torch.cuda.get_device_properties(0).total_memory / MIB if on_gpu else math.inf
    settings = {**common, "shape": vars(shape),
                "precision": precision, "rounds": ROUNDS if on_gpu else 1,
                "steps": STEPS if on_gpu else 2}  # fmt: skip
    for group in groups_of(loops, shape, 0.93 * total):
        seconds = 80 + 20 * len(group)  # 60 of them compile, at the same time
        yield Case("step", f"{title}: {'; '.join(group)}", step, {**settings, "loops": group}, seconds)
    for loop, flag in absent.items():
        why = f"--{flag} names no checkout"
        yield Case("step", f"{title}: {loop}", skipped, {**settings, "name": loop, "why": why}, 5, alone=False)


def tile_cases(common: dict[str, Any], names: tuple[str, ...], jobs: int) -> Iterator[Case]:
    """Tiles of these kernels: compiled next to each other, then timed."""
    settings = {**common, "kernels": names, "lengths": (512, 2048), "shards": jobs}
    if common["device"] == "cpu":
        settings |= {"lengths": (32, 64), "shards": 1}
    for shard in range(settings["shards"]):
        title = f"compile {', '.join(names)}, {shard}"
        yield Case("tiles", title, tile_compile, {**settings, "shard": shard}, 40, alone=False)
    yield Case("tiles", ", ".join(names), tile_search, settings, 10 + 10 * len(names))


def test_cases(common: dict[str, Any], is_first: bool) -> Iterator[Case]:
    """Tests that need a GPU: in the lease attention in bf16 and AdamWScale, the others later."""
    for file, expressions in TESTS.items():
        for only in [only for only in expressions if (only in FIRST_TESTS) == is_first]:
            name = f"{Path(file).stem}: {only}"
            why = lacks("pytest") or (None if common["device"] == "cuda" else "needs CUDA")
            settings = {**common, "name": name, "file": file, "only": only, "why": why}
            yield Case("pytest", name, skipped if why else gpu_tests, settings, 60, alone=False)


def loop_cases(common: dict[str, Any], tiny: bool, is_first: bool) -> Iterator[Case]:
    """What the script promises of a GPU: in the lease resume bits and a trace, the others later."""
    model = {"model_cfg": "t5-v1_1-small", "length": 512, "rows": 32, "iters": 12}
    if tiny:
        model = {"model_cfg": common["tiny_t5"], "length": 32, "rows": 4, "iters": 4}
    if is_first:
        name, flags = "resume, --reproducible fixed", {"reproducible": "fixed"}
        settings = {**common, **model, "name": name, "flags": flags, "must": True}
        yield Case("loop", name, resume, settings, 60, alone=False)
        name = "queue and data, t5-v1_1-base, batch 128, compiled"
        settings = {**common, **model, "name": name, "compile": not tiny, "steps": 5 if tiny else 20}
        settings |= {} if tiny else {"model_cfg": BASE.preset, "rows": BASE.rows}
        yield Case("loop", name, queue, settings, 60)
        return
    for name, flags in {"resume": {}, "resume, compiled": {"compile": True}}.items():
        settings = {**common, **model, "name": name, "flags": flags, "must": False}
        yield Case("loop", name, resume, settings, 90, alone=False)
    body, name = fp16 if common["device"] == "cuda" else skipped, "fp16 with GradScaler"
    yield Case("loop", name, body, {**common, **model, "name": name, "why": "needs CUDA"}, 45, alone=False)


def launcher_cases(common: dict[str, Any]) -> Iterator[Case]:
    """Horovod and DeepSpeed in one process, where they are installed."""
    zero = f"accelerate launch --config_file {ROOT / 'accelerate_configs' / 'zero1.yaml'} --num_processes 1"
    programs = {
        "Horovod with NCCL": ("horovod", f"horovodrun -np 1 {sys.executable}", "backend horovod"),
        "DeepSpeed ZeRO-1": ("deepspeed", zero, "DeepSpeedEngine"),
    }
    model = {"model_cfg": "t5-v1_1-small", "length": 512, "rows": 32}
    for name, (package, command, says) in programs.items():
        why = lacks(package) or ("needs CUDA" if common["device"] == "cpu" else None)
        settings = {**common, **model, "name": name, "why": why, "command": command, "says": says}
        yield Case("launchers", name, skipped if why else launcher, settings, 90, alone=False)


def lease_cases(common: dict[str, Any], tiny: bool, jobs: int) -> Iterator[Case]:
    """Cases of a lease of 15 minutes, the most valuable first; starting a machine takes the rest of it.

    With 80 GB fewer loops fit next to each other, so the last case may need another lease.
    """
    yield Case("environment", "environment", environment, common, 15)
    trees = {"now": str(ROOT), **({"before": common["before"]} if common["before"] else {})}
    yield Case("kernels", "kernels", kernels, {**common, "trees": trees}, 45)
    shape = Shape(common["tiny_t5"], 2, 32, 8) if tiny else BASE
    # On a CPU Inductor records no graphs, and compiling all loops would take longer than the rest of the trial.
    yield from step_cases(common, shape, STEP_LOOPS[:2] if tiny else STEP_LOOPS)
    why = lacks("cudnn") or (None if common["device"] == "cuda" else "needs CUDA")
    yield Case("cudnn", "cudnn", skipped if why else cudnn_bias, {**common, "name": "cudnn", "why": why}, 30)
    yield from tile_cases(common, ("key_gradient",), jobs)
    yield from step_cases(common, shape, [loop.removesuffix(", compiled") for loop in T5_LOOPS] if tiny else T5_LOOPS)
    if not tiny:
        yield from step_cases(common, Shape("bert_base_uncased", 32, 512), OTHER_LOOPS[:2])
    yield from test_cases(common, True)
    yield from loop_cases(common, tiny, True)


def all_cases(common: dict[str, Any], tiny: bool, jobs: int = 8) -> list[Case]:
    """Those of a lease, then the rest."""
    found = [*lease_cases(common, tiny, jobs), *attention_cases(common, tiny), *test_cases(common, False)]
    commands = (f"{_OWN} --no_bf16 --model_cfg {common['tiny_t5']} --batch_size 2 --input_seq_len 32",)
    for command in commands if tiny else MEMORY:
        found.append(Case("memory", command, memory, {**common, "command": command}, 40, alone=False))
    if not tiny:
        found += tile_cases(common, ("forward", "query_gradient"), jobs)
        found += [*step_cases(common, BASE, OTHER_LOOPS), *loop_cases(common, tiny, False)]
    found += launcher_cases(common)
    why = lacks("sentencepiece")  # of the vocabulary
    needing = ("memory", "loop", "launchers") if why else ()
    return [case if case.part not in needing else _left_out(case, why) for case in found]


def _left_out(case: Case, why: str) -> Case:
    settings = {"name": case.settings.get("name", case.name), "why": why}
    return case._replace(run=skipped, settings=settings, seconds=5, alone=False)
