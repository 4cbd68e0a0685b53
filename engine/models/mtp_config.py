"""The configuration of the head that a checkpoint brings along for multi-token prediction (MTP). Integers only, no
torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.models.decoder_config import DecoderConfig
from engine.models.model_shape import ModelShape

WHY_NO_MTP_HEAD = "transformers' code computes the model, and only our own decoder has heads of checkpoints"


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    layer: DecoderConfig
    """Of a decoder whose last layer is the head's: the model's and one more."""

    @property
    def number(self) -> int:
        """Of the head's layer."""
        return self.layer.num_layers - 1

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The head reads the model's last hidden state."""
        return (self.number,)

    @property
    def feature_size(self) -> int:
        return self.layer.hidden_size

    @staticmethod
    def of(model: ModelShape) -> MtpConfig:
        """`model`: one rank's part, or the whole. Raises `ValueError` if it has no such head that can be computed."""
        if not isinstance(model, DecoderConfig):
            raise ValueError(WHY_NO_MTP_HEAD)
        if not model.num_nextn_predict_layers:
            raise ValueError("the model brings no head along: its config.json has no num_nextn_predict_layers above 0")
        return MtpConfig(
            layer=replace(
                model,
                num_layers=model.num_layers + 1,
                sliding_windows=(*model.sliding_windows, 0),
                num_nextn_predict_layers=0,
            )
        )
