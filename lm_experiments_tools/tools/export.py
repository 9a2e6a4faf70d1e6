"""Write a fine-tuned model as ONNX, check it against torch, and say how far they differ.

    lmtools export --from_pretrained runs/polarity --output polarity.onnx
    lmtools export --from_pretrained runs/summaries/best --output summaries.onnx

The output is a folder: model.onnx of an encoder with its classifier, encoder_model.onnx, decoder_model.onnx and
decoder_with_past_model.onnx of an encoder-decoder, with configuration and tokenizer. `onnx_export.OnnxModel(folder)`
runs it in ONNX Runtime. An adapter is merged into its base model where its kind allows (lora).
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Exporting."""

    from_pretrained: str
    """Hugging Face name or folder, or a run directory or checkpoint of ours."""
    output: str
    """Folder to write."""


def run(args: ExportArgs) -> None:
    """Export, and say what was written."""
    from pathlib import Path

    from lm_experiments_tools.checkpoint.source import find_source
    from lm_experiments_tools.models.saved import whole_model
    from lm_experiments_tools.tools.onnx_export import check_onnxruntime, copy_tokenizer, export

    check_onnxruntime()
    source = find_source(args.from_pretrained)
    folder = Path(args.output)
    differences = export(whole_model(source), folder)
    if source.path is not None:
        copy_tokenizer(source.path, folder)
    for name, difference in differences.items():
        size = sum(file.stat().st_size for file in folder.glob(f"{name}*")) / 2**20
        print(f"{folder / name}: {size:.1f} MiB, differs from torch by at most {difference:.1e}")
