"""Export a model as a folder for the Hugging Face Hub, and verify its logits.

    lmtools export runs/t5 --to t5-mine
    lmtools export runs/t5/checkpoints/step_001000 --to t5-mine --max_shard_size 2GB
    lmtools export runs/t5 --average runs/t5/checkpoints/step_00[89]* --to t5-mine
    lmtools export runs/t5 --to t5-mine --push_to_hub me/t5-mine

The folder has configuration, weights, tokenizer, generation settings, the code of your own classes and a model card
without licence. It is created only if it loads with bit-identical logits. A LoRA adapter is merged into its base
model. A run directory means its best checkpoint, else its last.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lm_experiments_tools.errors import UserError, first_line

POSITIONAL = "from_pretrained"


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Which model to export, and where."""

    from_pretrained: str | None = None
    """Hugging Face name or folder, run directory or checkpoint. As the first argument it needs no flag."""
    to: str | None = None
    """New folder in the layout of the Hugging Face Hub."""
    max_shard_size: str = "50GB"
    """Largest file of weights in --to, as in 5GB or 500MB."""
    average: tuple[str, ...] = ()
    """Other checkpoints of the same model: the mean of their weights and its own is written."""
    push_to_hub: str | None = None
    """Private repository of the Hugging Face Hub, as me/my-t5, to which --to is uploaded; `hf auth login` first."""
    model_cls: str | None = None
    """Class of the model, as module:Class. None: the one it was saved from."""

    def __post_init__(self) -> None:
        if self.from_pretrained is None:
            raise UserError("lmtools export: name the model, as in lmtools export runs/mine --to mine.")
        if self.to is None:
            raise UserError("there is nothing to write: give --to, a new folder.")
        check_shard_size(self.max_shard_size)


def check_shard_size(size: str) -> None:
    """Raise UserError unless `size` has the form 5GB or 500MB."""
    if not re.fullmatch(r"[1-9]\d*[KMGT]B", size):
        raise UserError(f"--max_shard_size {size}: write a size as 5GB or 500MB.")


def run(args: ExportArgs) -> None:
    """Export a model as the flags say, and print what was written."""
    _to_hub(args, Path(args.to))
    if args.push_to_hub is not None:
        _upload(args.push_to_hub, args.to)


def _to_hub(args: ExportArgs, folder: Path) -> None:
    from lm_experiments_tools.models.saved import average_weights, open_saved
    from lm_experiments_tools.tools.hub_folder import new_folder, write_card, write_folder

    with new_folder(folder) as temporary:
        opened = open_saved(args.from_pretrained, args.model_cls)
        others = ((name, open_saved(name, args.model_cls, "--average").model) for name in args.average)
        average_weights(opened.model, others)
        loading = write_folder(opened, temporary, args.max_shard_size)
        write_card(opened, temporary, folder.resolve().name, loading)
        if args.average:
            with (temporary / "README.md").open("a", encoding="utf-8") as card:
                card.write(f"\nWeights: the mean of {len(args.average) + 1} checkpoints.\n")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20
    print(f"{folder}: {type(opened.model).__name__}, {size:.1f} MiB of weights; its loaded logits are equal.")
    print(f"Choose a licence in {folder / 'README.md'} before you publish it.")
    if loading.note:
        print(loading.note)


def _upload(name: str, folder: str) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalTokenNotFoundError

    try:
        repository = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=repository.repo_id, folder_path=folder)
    except (OSError, HTTPError, HFValidationError, LocalTokenNotFoundError) as error:
        raise UserError(f"--push_to_hub {name}: {first_line(error)}; {folder} is complete.") from error
    print(f"uploaded to {repository}, which you alone can see")
