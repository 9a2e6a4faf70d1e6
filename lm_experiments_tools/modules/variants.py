"""Model types in config.json for variants of BERT and T5, which transformers must not load as its own models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar


class VariantConfig:
    """Mixin before a configuration class of transformers, for models with variants that transformers does not know.

    A model is a variant if a key of `variant_keys` is not at its default, or if its class is derived from ours. A
    variant is saved with `variant_type` as `model_type`, so that transformers does not load it as its own model. In
    memory `model_type` stays that of transformers, which PEFT and other libraries know.
    """

    variant_type: ClassVar[str]
    variant_keys: ClassVar[tuple[str, ...]]

    @property
    def is_variant(self) -> bool:
        """True if transformers' class would compute something else with this configuration, or lose keys of it."""
        ours = next(cls for cls in type(self).__mro__ if "variant_type" in vars(cls))
        return type(self) is not ours or any(getattr(self, key) != getattr(ours, key) for key in self.variant_keys)

    def check_variant(self, positions: Collection[str], counts: Sequence[str]) -> None:
        """Check the settings that the configurations of BERT and T5 have in common. Raises ValueError.

        `positions` are the allowed `position_embedding_type`s, besides a user's class; `counts` must be at least 1.
        """
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        kind = self.position_embedding_type
        if kind not in positions and ":" not in kind:
            known = ", ".join(positions)
            raise ValueError(f"position_embedding_type={kind!r} is none of {known}, nor a class written module:Class.")
        if self.rotary_dim is not None and kind != "rotary" and kind in positions:
            raise ValueError(f'rotary_dim={self.rotary_dim} is of position_embedding_type "rotary": leave it out.')
        groups, heads = self.num_key_value_heads, self.num_attention_heads
        if groups is not None and (groups < 1 or heads % groups):
            raise ValueError(f"num_key_value_heads={groups} must divide num_attention_heads={heads}.")

    def to_diff_dict(self) -> dict[str, Any]:
        """Values to write to config.json; a variant gets its own `model_type`."""
        values = super().to_diff_dict()
        return {**values, "model_type": self.variant_type} if self.is_variant else values

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the values of a config.json, as transformers does, and return the unused keyword arguments too."""
        values, unused = super().get_config_dict(*args, **kwargs)
        if values.get("model_type") == cls.variant_type:
            values["model_type"] = cls.model_type
        return values, unused


class TakesBothConfigs(type):
    """Metaclass that lets a model class accept transformers' configuration as well as its own subclass of it."""

    def __call__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        ours, given = cls.config_class, type(config)
        if given in ours.__mro__ and not isinstance(config, VariantConfig):
            config = ours(**config.to_dict())
        if not isinstance(config, ours):
            raise ValueError(
                f"{cls.__name__} needs a {ours.__name__}, of {ours.__module__.partition('.')[0]} or transformers, not "
                f"{given.__module__}.{given.__name__}."
            )
        return super().__call__(config, *args, **kwargs)


class InitializesAllModules:
    """Mixin before PreTrainedModel, which makes transformers call `_init_weights` for every module."""

    def _initialize_weights(self, module: Any, *args: Any) -> None:
        """Without transformers' flag for remote code, with which modules without direct parameters are left out."""
        super()._initialize_weights(module)


def register_variants(
    config_cls: type[VariantConfig], models: Mapping[type, type], architectures: Sequence[str]
) -> None:
    """Register models with transformers' AutoConfig and AutoModel classes, so that these load saved variants.

    Args:
        models: class of transformers (AutoModel, AutoModelForMaskedLM, ...) -> class of the model.
        architectures: class names in a config.json that may be read; other classes would lose keys and methods.
    """
    from transformers import AutoConfig

    class Saved(config_cls):
        """Subclass of `config_cls` with the variant's model type, by which AutoConfig finds classes."""

        model_type = config_cls.variant_type

        @classmethod
        def from_dict(cls, values: dict[str, Any], **kwargs: Any) -> Any:
            unknown = sorted({*(values.get("architectures") or ())} - {*architectures})
            if unknown:
                raise ValueError(f"This checkpoint is of {', '.join(unknown)}: read it with that class.")
            return config_cls.from_dict({**values, "model_type": config_cls.model_type}, **kwargs)

    AutoConfig.register(Saved.model_type, Saved)
    for auto, model_cls in models.items():
        auto.register(config_cls, model_cls, exist_ok=True)  # its name is that of transformers' class
