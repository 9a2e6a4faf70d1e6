"""Write a checkpoint of megatron-core's BERT or T5, in Megatron-LM's `torch` format, and what the model computes.

    python -m tests.helpers.megatron_models FOLDER bert|bert_without_pairs|t5 RANKS

A program that forks a process per rank, since one process can be no more than one rank. Transformer Engine and a GPU
are not needed.
"""

import argparse
import contextlib
import importlib
import multiprocessing
import sys
from pathlib import Path

import numpy as np
import torch

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 40}
VOCABULARY, POSITIONS = 64, 32


def inputs() -> dict[str, torch.Tensor]:
    """Two rows of 10 ids, the second with padding."""
    ids = torch.arange(3, 23).reshape(2, 10)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"ids": ids, "types": ids % 2, "mask": mask, "decoder_ids": ids.flip(1)[:, :6]}


def bert(config, pairs: bool = True):
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    settings = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": POSITIONS,
        "share_embeddings_and_output_weights": True,
    }
    settings |= {"parallel_output": False, "add_binary_head": pairs}
    return BertModel(config, 2 if pairs else 0, bert_layer_local_spec, **settings)


def bert_without_pairs(config):
    return bert(config, pairs=False)


def t5(config):
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    settings = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": POSITIONS,
        "share_embeddings_and_output_weights": True,
    }
    layers = t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()
    return T5Model(config, config, *layers, **settings, parallel_output=False)


def computed(model, kind: str) -> dict[str, torch.Tensor]:
    given = inputs()
    if kind != "t5":
        logits, pairs = model(given["ids"], given["mask"], given["types"] if kind == "bert" else None)
        return {"logits": logits, "pairs": pairs}
    hidden = given["mask"][:, None, None] < 0.5
    rows, (batch, length) = given["ids"].shape[1], given["decoder_ids"].shape
    future = torch.ones(length, length, dtype=torch.bool).triu(1).expand(batch, 1, -1, -1)
    masks = hidden.expand(-1, 1, rows, -1), future, hidden.expand(-1, 1, length, -1)
    return {"logits": model(given["ids"], given["decoder_ids"], *masks)}


def main(folder: Path, kind: str, rank: int, ranks: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    random.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    torch.manual_seed(0)
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True, "init_method_std": 0.3}
    model = globals()[kind](TransformerConfig(**SIZES, **rates, tensor_model_parallel_size=ranks)).eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 1:  # biases and norms, which start at 0 and 1; those that are split get a value a rank
            split = getattr(weight, "tensor_model_parallel", False)
            generator = torch.Generator().manual_seed(len(name) + rank * split)
            weight.data += torch.randn(weight.shape, generator=generator) * 0.3
    with torch.no_grad():
        outputs = computed(model, kind)
    settings = {"max_position_embeddings": POSITIONS, "padded_vocab_size": VOCABULARY, "bias_gelu_fusion": False}
    args = argparse.Namespace(**SIZES, **settings, tensor_model_parallel_size=ranks, pipeline_model_parallel_size=1)
    args.attention_backend, args.params_dtype = AttnBackend.auto, torch.float32
    state = {"np_rng_state": np.random.get_state(), "random_rng_state": (3, (1, 2), None)}
    content = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model.state_dict(),
        "rng_state": [state],
    }
    to = folder / "iter_0000007" / f"mp_rank_{rank:02}"
    to.mkdir(parents=True)
    torch.save(content, to / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    torch.save(outputs, folder / f"computed_{rank}.pt")


def fork(folder: Path, kind: str, ranks: int) -> int:
    """Import megatron-core, fork the ranks, and return 1 if one of them failed."""
    torch.cuda.current_device = lambda: "cpu"  # which megatron-core asks for on any machine
    importlib.import_module("megatron.core.models.bert.bert_model")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=main, args=(folder, kind, rank, ranks)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return int(any(worker.exitcode for worker in workers))


if __name__ == "__main__":
    sys.exit(fork(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
