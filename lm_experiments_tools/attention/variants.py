"""Keeps checkpoints of modeling_t5 and modeling_bert from being taken for transformers' own where they are not."""

from __future__ import annotations

from typing import Any, ClassVar


class VariantConfig:
    """Goes before a configuration class of transformers, some keys of whose subclass change what the model computes.

    transformers' class of the same `model_type` would read such a checkpoint and, without a word, compute something
    else. So wherever one of these keys is not at its default, config.json names `variant_type` instead: AutoModel
    refuses it as unknown, and transformers' classes warn. In memory `model_type` stays what PEFT and others know.
    """

    variant_type: ClassVar[str]
    variant_keys: ClassVar[tuple[str, ...]]

    @property
    def is_variant(self) -> bool:
        """Whether transformers' own class would compute something else."""
        return any(getattr(self, key) != getattr(type(self), key) for key in self.variant_keys)

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written to config.json."""
        values = super().to_diff_dict()
        return {**values, "model_type": self.variant_type} if self.is_variant else values

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is read from config.json, and the keyword arguments that are left."""
        values, unused = super().get_config_dict(*args, **kwargs)
        if values.get("model_type") == cls.variant_type:
            values["model_type"] = cls.model_type
        return values, unused
